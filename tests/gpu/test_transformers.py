"""Models of transformers with our kernels, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastweights.integrations.transformers import accelerate, restore
from fastweights.kernels.availability import HAS_TRITON
from tests.integrations.tiny_models import INSTALLED, tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
TOKENS = 1 + torch.arange(2 * 150).view(2, 150) * 7 % 49


@pytest.fixture(autouse=True)
def originals_return(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # by which the originals convolve
    yield
    restore()


def outputs(model: nn.Module) -> dict[str, Tensor]:
    """Logits of a whole reading and of three tokens after a prompt, and all gradients, in float32."""
    tokens = TOKENS.cuda()
    model.zero_grad()
    whole = model(tokens, use_cache=False)[0]
    towards = torch.linspace(-1, 1, whole.numel(), device="cuda").sin().view_as(whole)
    (whole.float() * towards).sum().backward()
    found, tokens_after = {"whole": whole}, []
    with torch.no_grad():
        step = model(tokens[:, :100], use_cache=True)
        for i in range(3):
            step = model(tokens[:, 100 + i : 101 + i], past_key_values=step.past_key_values, use_cache=True)
            tokens_after.append(step[0])
    found["tokens after a prompt"] = torch.cat(tokens_after, 1)
    found["gradients"] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return {name: x.detach().float() for name, x in found.items()}


def errors(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    return {name: float((got[name] - x).norm() / x.norm()) for name, x in wanted.items()}


@pytest.mark.parametrize("family", INSTALLED)
def test_families(family: str, record_property: Any) -> None:
    """In float32 as without us; in bfloat16 at most twice as far from that as transformers' own code, over several draws: random
    layers on one another enlarge the roundings of a single one."""
    far: dict[str, list[dict[str, float]]] = {"float32": [], "bfloat16": [], "theirs": []}
    for seed in range(3):
        exact = tiny(family, seed).cuda()
        rounded = deepcopy(exact).bfloat16()
        wanted = outputs(exact)
        far["theirs"].append(errors(outputs(rounded), wanted))
        accelerate(exact)
        far["float32"].append(errors(outputs(exact), wanted))
        far["bfloat16"].append(errors(outputs(rounded), wanted))
        restore()
    mean = {side: {name: fmean(one[name] for one in found) for name in found[0]} for side, found in far.items()}
    for name in mean["theirs"]:
        record_property(f"{family} {name}", {side: found[name] for side, found in mean.items()})
    assert max(mean["float32"].values()) < 1e-4, mean
    assert all(mean["bfloat16"][name] <= 2 * x for name, x in mean["theirs"].items()), mean
