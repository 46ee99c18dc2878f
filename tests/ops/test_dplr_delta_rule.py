"""The delta rule with erase directions of its own: what a reads moves along b, and v is written along k."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import delta_rule, dplr_delta_rule
from fastweights.ops.dplr_delta_rule import compose_two_steps
from fastweights.testing import CASES
from fastweights.testing.contract.compare import assert_close

backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def numbers(*rows: object) -> Tensor:
    """One sequence and one head: [1, T, 1, ...]."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    """(4, 8) answers 4 to a; halved and moved by 4 along b it is (-2, 4), and 6 along k makes (-2, 10). The second token reads
    10 before everything is forgotten: (0, 0) + 10 (1, 1) + 0."""
    o, S = dplr_delta_rule(
        numbers([1.0, 1.0], [2.0, 1.0]), numbers([0.0, 1.0], [0.0, 1.0]), numbers([6.0], [0.0]),
        numbers([1.0, 0.0], [0.0, 1.0]), numbers([-1.0, 0.0], [1.0, 1.0]),
        numbers([math.log(0.5)] * 2, [-math.inf] * 2), scale=1.0,
        initial_state=torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64), output_final_state=True, backend=backend,
    )  # fmt: skip
    torch.testing.assert_close(o.flatten(), torch.tensor([8.0, 30.0], dtype=torch.float64))
    torch.testing.assert_close(S.flatten(), torch.tensor([10.0, 10.0], dtype=torch.float64))


@backends
def test_the_delta_rule_is_one_of_them(backend: str) -> None:
    x = CASES["delta_rule-none"].draw(time=70).tokens
    q, k, v, gain = x["q"], x["k"], x["v"], x["beta"][..., None]
    got = dplr_delta_rule(q, k, gain * v, -k, gain * k, output_final_state=True, backend=backend)
    assert_close(got, delta_rule(**x, output_final_state=True, backend="reference"), 1e-10)


@pytest.mark.parametrize("form", ["none", "G", "H", "GK", "HK"])
@pytest.mark.parametrize("lengths", [None, [0, 3, 70]], ids=["rows", "packed"])
def test_two_steps_of_the_delta_rule_are_the_rule(form: str, lengths: list[int] | None) -> None:
    """What backend "triton" runs, by way of PyTorch, and the chunkwise form with a decay per head."""
    inputs = CASES["dplr_delta_rule-channel"].draw(batch=1, time=70, heads=2, value_heads=4).tokens
    g = {
        "none": None,
        "G": inputs["g"][..., 0],
        "GK": inputs["g"],
        "H": inputs["g"][:, :, :2, 0],
        "HK": inputs["g"][:, :, :2],
    }
    x = {**inputs, "g": g[form]}
    cu_seqlens = None if lengths is None else torch.tensor(lengths)
    wanted = dplr_delta_rule(**x, output_final_state=True, cu_seqlens=cu_seqlens, backend="reference")
    given = {"output_final_state": True, "cu_seqlens": cu_seqlens, "backend": "torch"}
    o, (S,) = compose_two_steps(**x, S=None, scale=8**-0.5, **given)
    assert_close([o, S], wanted, 1e-10)
    assert_close(dplr_delta_rule(**x, **given), wanted, 1e-10)


def test_two_steps_forget_everything_but_what_was_read() -> None:
    """In float32, where a quotient by exp(-40) is exact; float16 is computed with in float32."""
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.float16, 3e-3)):
        x = CASES["dplr_delta_rule-channel"].draw(time=20, dtype=dtype).tokens
        x = {**x, "g": torch.where(x["g"] < x["g"].float().median(), -math.inf, x["g"])}
        wanted, _ = dplr_delta_rule(**{name: y.double() for name, y in x.items()}, backend="reference")
        o, _ = compose_two_steps(**x, S=None, scale=8**-0.5, output_final_state=False, cu_seqlens=None, backend="torch")
        assert o.dtype == dtype and (o - wanted).norm() <= tolerance * wanted.norm()
