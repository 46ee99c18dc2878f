"""Float64 answers computed elsewhere: the first contract test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fastweights import ops
from fastweights.testing.contract.compare import relative_error

from .golden import FILES, load

TOLERANCE = {"gated_kalmanet": 1e-8, "mesa": 1e-8}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_golden(path: Path, backend: str) -> None:
    static, arrays = load(path)
    op = getattr(ops, static["op"])
    tolerance = TOLERANCE.get(static["op"], 1e-9)
    arguments = {name[4:]: torch.tensor(x, requires_grad=True) for name, x in arrays.items() if name.startswith("arg.")}
    o, state = op(**arguments, **static["kwargs"], output_final_state=True, backend=backend)
    names = [name[4:] for name in arrays if name.startswith("out.")]
    results = dict(zip(names, (o, *(state if isinstance(state, tuple) else (state,)))))
    if "variance" in names:
        _, results["variance"], _ = ops.palimpsa_posterior(**arguments, **static["kwargs"], backend=backend)
    assert list(results) == names
    for name, result in results.items():
        assert relative_error(result.detach(), torch.tensor(arrays[f"out.{name}"])) <= tolerance, name

    (o * torch.tensor(arrays["do"])).sum().backward()
    checked = [name for name in arguments if f"grad.{name}" in arrays]
    for name in checked:
        assert relative_error(arguments[name].grad, torch.tensor(arrays[f"grad.{name}"])) <= tolerance, name
