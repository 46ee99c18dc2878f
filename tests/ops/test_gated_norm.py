"""The gated norm: the PyTorch form against plain formulas, the kernels (on a GPU or in Triton's interpreter) against it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops.gated_norm import gated_rms_norm
from tests.fast_set import fast_where, slow
from tests.kernels.cases import DEVICE

ACTIVATIONS = [None, "silu", "sigmoid", "gelu"]


def inputs(
    shape: tuple[int, ...],
    activation: str | None,
    per_group: bool,
    dtype: torch.dtype = torch.float32,
    skip: bool = False,
) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"x": shape, "weight": shape[-2:] if per_group else shape[-1:], "gate": shape}
    if activation is None:
        del shapes["gate"]
    if skip:
        shapes |= {"value": shape, "skip": shape[-2:-1]}
    return {name: torch.randn(s, device=DEVICE).to(dtype).requires_grad_() for name, s in shapes.items()}


def results(given: dict[str, Tensor], **options: object) -> dict[str, Tensor]:
    """y and its gradients in what is given."""
    y = gated_rms_norm(**given, **options)  # type: ignore[arg-type]
    torch.manual_seed(1)
    gradients = torch.autograd.grad(y, list(given.values()), torch.randn_like(y))
    return {"y": y.detach(), **{f"d{name}": g for name, g in zip(given, gradients)}}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def activated(z: Tensor, activation: str | None) -> Tensor:
    if activation is None:
        return torch.ones_like(z)
    share = 1 / (1 + torch.exp(-z))
    return {"silu": z * share, "sigmoid": share, "gelu": z * (1 + torch.erf(z / math.sqrt(2))) / 2}[activation]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_formula(activation, per_group, first, skip):
    given = inputs((2, 3, 4, 5), activation, per_group, torch.float64, skip)
    a = activated(given.get("gate", given["x"]), activation)
    x = given["x"] + given["skip"][:, None] * given["value"] if skip else given["x"]
    u = x * a if first else x
    wanted = u / (u.square().mean(-1, keepdim=True) + 1e-3).sqrt() * given["weight"] * (1 if first else a)
    options = {"activation": activation or "silu", "eps": 1e-3, "gate_first": first}
    got = results(given, **options, backend="torch")
    torch.testing.assert_close(got["y"], wanted)
    torch.manual_seed(1)
    gradients = torch.autograd.grad(wanted, list(given.values()), torch.randn_like(wanted))
    assert_same(got, {f"d{name}": g for name, g in zip(given, gradients)})


@fast_where(lambda given: given["shape"] == (3, 2, 96) or (given["activation"] == "silu") == given["first"])
@pytest.mark.kernels
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(
    "shape, per_group",
    [
        ((1, 1, 2, 20), False),
        ((2, 3, 2, 20), True),
        ((1, 63, 1, 7), False),
        ((65, 33), False),
        ((3, 2, 96), True),
        ((7,), False),
        ((2, 2, 300), True),
    ],
    ids=str,
)
def test_kernels(shape, per_group, activation, first):
    given = inputs(shape, activation, per_group)
    options = {"activation": activation or "silu", "gate_first": first}
    tolerance = {"rtol": 1e-4, "atol": 1e-5}
    assert_same(results(given, **options, backend="triton"), results(given, **options, backend="torch"), **tolerance)


@pytest.mark.kernels
@pytest.mark.parametrize("activation, first", [(None, False), ("silu", False), ("silu", True)])
@pytest.mark.parametrize("shape", [(1, 1, 2, 20), (2, 63, 3, 7), (65, 1, 33)], ids=str)
def test_kernels_with_a_skip(shape, activation, first):
    """Several groups, each with a D of its own; rows that fill no tile."""
    given = inputs(shape, activation, False, skip=True)
    options = {"activation": activation or "silu", "gate_first": first}
    wanted = results(given, **options, backend="torch")
    assert_same(results(given, **options, backend="triton"), wanted, rtol=1e-4, atol=3e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("per_group", [pytest.param(False, marks=pytest.mark.slow), True])
def test_kernels_sum_over_many_tiles(per_group, monkeypatch):
    from fastweights.kernels.pointwise import gated_norm as kernels

    monkeypatch.setattr(kernels, "ENOUGH_PROGRAMS", 4)
    monkeypatch.setattr(kernels, "BACKWARD_NUMBERS", 1)
    given = inputs((150, 2, 32), "silu", per_group, skip=True)
    assert_same(results(given, backend="triton"), results(given, backend="torch"), rtol=1e-4, atol=1e-5)


@pytest.mark.kernels
def test_kernels_read_slices_where_they_lie():
    given = inputs((2, 3, 2, 10), "silu", True, skip=True)
    names = ("x", "gate", "value")
    joint = torch.cat([torch.randn(2, 3, 7, device=DEVICE), *(given[name].detach().flatten(2) for name in names)], 2)
    parts = joint[..., 7:].split(20, 2)
    sliced = given | {name: x.unflatten(2, (2, 10)).requires_grad_() for name, x in zip(names, parts)}
    assert_same(results(sliced, backend="triton"), results(given, backend="triton"), rtol=0, atol=0)


@pytest.mark.kernels
@pytest.mark.parametrize("activation", [*slow(None), "gelu"])
def test_kernels_in_one_graph(activation):
    given = inputs((1, 4, 2, 8), activation, False, skip=activation is not None)
    compiled = torch.compile(gated_rms_norm, fullgraph=True, backend="aot_eager")
    options = {"activation": activation or "silu", "backend": "triton"}
    wanted = results(given, **options)
    torch.manual_seed(1)
    y = compiled(**given, **options)
    gradients = torch.autograd.grad(y, list(given.values()), torch.randn_like(y))
    assert_same({"y": y, **{f"d{name}": g for name, g in zip(given, gradients)}}, wanted, rtol=0, atol=0)


@pytest.mark.kernels
@pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning")
def test_kernels_without_eps():
    """Rows that fill no tile: those that are not there leave the sums alone."""
    given = inputs((3, 2, 20), "silu", False, skip=True)
    assert_same(
        results(given, eps=0.0, backend="triton"), results(given, eps=0.0, backend="torch"), rtol=1e-4, atol=1e-5
    )


@pytest.mark.kernels
def test_kernels_without_rows():
    given = inputs((2, 0, 3, 8), "silu", False, skip=True)
    got = results(given, backend="triton")
    assert got["y"].shape == (2, 0, 3, 8) and not got["dweight"].any() and not got["dskip"].any()


GOOD = {"x": torch.zeros(2, 5, 3, 6), "weight": torch.ones(6), "gate": torch.zeros(2, 5, 3, 6)}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(())}, r"x must be \[\.\.\., V\]"),
        ({"weight": torch.zeros(3)}, r"weight must be \[6\] or \[3, 6\]"),
        ({"gate": torch.zeros(2, 5, 18)}, "gate must have the shape of x"),
        ({"value": torch.zeros(2, 5, 3, 6)}, "value and skip must be given together"),
        ({"value": torch.zeros(2, 5, 18), "skip": torch.ones(3)}, "value must have the shape of x"),
        ({"value": torch.zeros(2, 5, 3, 6).half(), "skip": torch.ones(3)}, "value must have the dtype of x"),
        ({"value": torch.zeros(2, 5, 3, 6), "skip": torch.ones(6)}, r"skip must be \[G\], one number per group"),
        ({"activation": "relu"}, "activation must be one of 'silu', 'sigmoid', 'gelu'"),
        ({"eps": -1.0}, "eps must be"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"x": torch.zeros(2, 5, 3, 6).int()}, "x must be float16"),
        ({"x": torch.zeros(2, 5, 3, 6).double(), "backend": "triton"}, "backend 'triton'"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        gated_rms_norm(**{**GOOD, **change})


@pytest.mark.kernels
def test_rows_too_wide_for_the_kernels():
    x, weight = torch.zeros(1, 4097, device=DEVICE), torch.zeros(4097, device=DEVICE)
    with pytest.raises(ValueError, match="up to 4096 wide"):
        gated_rms_norm(x, weight, backend="triton")
    assert gated_rms_norm(x, weight).shape == x.shape
