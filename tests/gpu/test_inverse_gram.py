"""The inverse Gram matrix after many tokens on a CUDA device: write directions and the matrix itself, against float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops.shared.inverse_gram import apply_inverse_gram
from fastweights.testing import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS = 2


def keys(time: int, width: int, spread: float | None, dtype: torch.dtype) -> Tensor:
    """Of unit length: any, or with noise of `spread` per channel around one."""
    generator = torch.Generator("cuda").manual_seed(time + width)
    noise = torch.randn(1, time, HEADS, width, generator=generator, device="cuda")
    if spread is not None:
        noise = F.normalize(noise[:, :1], dim=-1) + spread * noise
    return F.normalize(noise, dim=-1).to(dtype)


def directions(
    u: Tensor, k: Tensor, backend: str, every: int | None, before: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What the op of that period writes along, of length 1, and the matrix after the last token."""
    shared = {
        "ridge": 0.1 if every else 1.0, "initial_state": before, "heads": HEADS, "final": True, "cu_seqlens": None,
        "dtype": torch.float64 if backend == "torch" else torch.float32, "backend": backend,
    }  # fmt: skip
    if every is None:
        y, P = apply_inverse_gram(u, gain=torch.ones(u.shape[:3], device=u.device), **shared)
    else:
        due = (torch.arange(u.shape[1], device=u.device) + 1) % every == 0
        y, P = apply_inverse_gram(u, k, refresh=1e-3 * due.double()[None, :, None], **shared)
    return F.normalize(y.double(), dim=-1), P


def largest(got: Tensor, wanted: Tensor) -> float:
    """The error of a token's direction at most."""
    return float((got - wanted).norm(dim=-1).max())


@pytest.mark.parametrize("every", [None, 20])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("spread", [None, 0.02], ids=["any keys", "nearly dependent keys"])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-3)], ids=str)
def test_write_directions(
    every: int | None, width: int, spread: float | None, dtype: torch.dtype, bound: float,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    k = keys(8192, width, spread, dtype)
    u = k if every is None else keys(8192, width, spread, torch.float32).mul(width**-0.5).to(dtype)
    (got, _), (wanted, _) = directions(u, k, "triton", every), directions(u.double(), k.double(), "torch", every)
    error = largest(got, wanted)
    record_property("error of a write direction", error)
    assert error < bound


@pytest.mark.parametrize("every", [None, 20])
@pytest.mark.parametrize("spread", [None, 0.02], ids=["any keys", "nearly dependent keys"])
def test_the_inverse_does_not_drift(
    every: int | None, spread: float | None, record_property: Callable[[str, object], None]
) -> None:
    """65,536 tokens in eight calls, each from the matrix of the one before."""
    k = keys(65_536, 64, spread, torch.bfloat16)
    u = k if every is None else k / 8
    got, wanted = None, None
    for part, same in zip(u.split(8_000, 1), k.split(8_000, 1)):
        got = directions(part, same, "triton", every, got)[1]
        wanted = directions(part.double(), same.double(), "torch", every, wanted)[1]
    assert got is not None and wanted is not None
    error = float((got - wanted).norm() / wanted.norm())
    record_property("error of the inverse", error)
    assert error < 1e-3


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("recursive_least_squares-none", "k"),
        ("recursive_least_squares-none", "beta"),
        ("variational_linear_attention-refresh", "u"),
        ("variational_linear_attention-refresh", "k"),
    ],
)
def test_a_bad_number_reaches_later_tokens_only(form: str, name: str, width: int) -> None:
    case, bad = CASES[form], 600
    sizes = {"batch": 1, "time": 700, "heads": 2, "key": width, "value": width, "value_heads": 2}
    clean = case.draw(**sizes, dtype=torch.bfloat16).map(Tensor.cuda)
    tokens = {**clean.tokens, name: clean.tokens[name].clone()}
    tokens[name][0, bad, 1] = torch.nan
    o, wanted = (case(inputs, backend="triton")[0] for inputs in (replace(clean, tokens=tokens), clean))
    assert torch.equal(o[:, :bad], wanted[:, :bad]) and torch.equal(o[:, :, 0], wanted[:, :, 0])
    assert o[:, bad:, 1].isnan().all()


@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_penalties_far_beyond_the_prior(width: int, dtype: torch.dtype) -> None:
    """A factor of such a chunk's products is nothing but rounding, and pivots below 0 make A grow."""
    u = 300 * keys(500, width, 1e-4, dtype)
    P = directions(u, u, "triton", every=20)[1].double()
    wanted = directions(u.double(), u.double(), "torch", every=20)[1]
    assert float((P - wanted).norm() / wanted.norm()) < 2e-2
