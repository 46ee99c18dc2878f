"""Palimpsa's gates: the PyTorch form against the formula, the kernels (on a GPU or in Triton's interpreter) against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops.gated_writes import divide_answers, gate_both, gated_writes, importance_writes
from tests.kernels.cases import DEVICE


def inputs(shape: tuple[int, ...], gain: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    torch.manual_seed(0)
    shapes = {"v": shape, "s": shape[:-1], **({"z": shape, "c": shape[:-1]} if gain else {})}
    return {name: torch.randn(size, device=DEVICE).to(dtype).requires_grad_() for name, size in shapes.items()}


def results(given: dict[str, Tensor], call: Any = gated_writes, **options: Any) -> dict[str, Tensor]:
    """What is written, the gain where there is one, and the gradients in what is given."""
    outputs = [x for x in call(**given, **options) if x is not None]
    torch.manual_seed(1)
    gradients = torch.autograd.grad(outputs, list(given.values()), [torch.randn_like(x) for x in outputs])
    return {**dict(zip(("write", "beta"), outputs)), **{f"d{name}": g for name, g in zip(given, gradients)}}


def assert_same(got: dict[str, Tensor], wanted: dict[str, Tensor], **tolerance: float) -> None:
    assert got.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], msg=lambda m, n=name: f"{n}: {m}", **tolerance)


def formula(v: Tensor, s: Tensor, z: Tensor | None = None, c: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    return torch.einsum("...v,...->...v", v, s), None if z is None else torch.einsum(
        "...v,...->...v", 1 / (1 + (-z).exp()), c
    )


@pytest.mark.parametrize("gain", [False, True])
def test_formula(gain):
    given = inputs((2, 3, 4, 5), gain, torch.float64)
    assert_same(results(given, backend="torch"), results(given, formula))


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
def test_both_outputs_have_the_dtype_of_values_and_are_rounded_once(backend):
    """Gates in float32 beside values of 16 bits, as layers have them under autocast."""
    given = {name: x.detach() for name, x in inputs((3, 2, 20), True).items()}
    given = {**given, "v": given["v"].half(), "z": given["z"].half()}
    outputs = gated_writes(**given, backend=backend)
    for got, wanted in zip(outputs, formula(**{name: x.double() for name, x in given.items()})):
        assert got.dtype == torch.float16
        torch.testing.assert_close(got.double(), wanted, rtol=2**-11 * 1.001, atol=1e-7)


@pytest.mark.kernels
@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 2, 20), (2, 63, 3, 48), (65, 33), (2, 3, 192), (1, 2, 300)], ids=str)
def test_kernels(shape, gain):
    given = inputs(shape, gain)
    assert_same(results(given, backend="triton"), results(given, backend="torch"), rtol=1e-5, atol=1e-5)


def written_importance(v: Tensor, s: Tensor, z: Tensor, b: Tensor) -> tuple[Tensor, Tensor | None]:
    return formula(v, s, z, torch.nn.functional.softplus(b) * s)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_forms_of_a_layer(backend: str, needs_gradient: bool) -> None:
    """The gain from one number per head, and two tensors with one gate: in one launch where no gradient is needed."""
    given = inputs((2, 3, 4, 20), True)
    v, s, z = given["v"], given["s"], given["z"]
    b = torch.tensor([-30.0, -1.0, 0.5, 30.0], device=DEVICE, requires_grad=True)
    with torch.set_grad_enabled(needs_gradient):
        outputs = importance_writes(v, s, z, b, backend=backend)
        both = gate_both(z, v, s, backend=backend)
        torch.testing.assert_close(outputs, written_importance(v, s, z, b), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(both, (formula(z, s)[0], formula(v, s)[0]), rtol=0, atol=0)
        narrow = gate_both(z[..., :7], v, s, backend=backend)
        torch.testing.assert_close(narrow, (both[0][..., :7], both[1]), rtol=0, atol=0)
    if needs_gradient:
        given = {"v": v, "s": s, "z": z, "b": b}
        assert_same(
            results(given, importance_writes, backend=backend), results(given, written_importance), rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
@pytest.mark.parametrize("needs_gradient", [False, True])
def test_divided_answers(backend: str, needs_gradient: bool) -> None:
    """Divisors below the least count as it, and a bad one spoils its own row."""
    o = torch.randn(2, 3, 4, 20, device=DEVICE, requires_grad=needs_gradient)
    s = torch.linspace(-1, 2, 24, device=DEVICE).view(2, 3, 4)
    s[1, 2, 3] = float("nan")
    got = divide_answers(o, s, 0.25, backend=backend)
    torch.testing.assert_close(got, o / torch.where(s < 0.25, 0.25, s)[..., None], equal_nan=True)
    assert got.requires_grad == needs_gradient and got.isnan().sum() == 20


@pytest.mark.kernels
def test_kernels_read_slices_where_they_lie():
    given = inputs((2, 3, 2, 10), True)
    joint = torch.randn(2, 3, 50, device=DEVICE)
    joint[..., 7:27], joint[..., 27:47] = given["v"].detach().flatten(2), given["z"].detach().flatten(2)
    sliced = {name: joint[..., a : a + 20].unflatten(2, (2, 10)) for name, a in (("v", 7), ("z", 27))}
    sliced = {**given, **{name: x.requires_grad_() for name, x in sliced.items()}}
    order = {name: sliced[name] for name in given}
    assert_same(results(order, backend="triton"), results(given, backend="triton"), rtol=0, atol=0)


@pytest.mark.kernels
@pytest.mark.parametrize("unread", [0, 1])
def test_kernels_where_nothing_reads_an_output(unread):
    given = inputs((2, 3, 2, 10), True)
    got, wanted = (
        torch.autograd.grad(
            gated_writes(**given, backend=backend)[1 - unread].sum(), list(given.values()), allow_unused=True
        )
        for backend in ("triton", "torch")
    )
    for x, y in zip(got, wanted):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("gain", [False, True])
def test_kernels_in_one_graph(gain):
    given = inputs((1, 4, 2, 8), gain)
    compiled = torch.compile(gated_writes, fullgraph=True, backend="aot_eager")
    wanted = results(given, backend="triton")
    assert_same(results(given, compiled, backend="triton"), wanted, rtol=0, atol=0)


@pytest.mark.kernels
def test_kernels_without_rows():
    got = results(inputs((2, 0, 3, 8), True), backend="triton")
    assert got["write"].shape == got["beta"].shape == (2, 0, 3, 8)


GOOD: dict[str, Any] = {
    "v": torch.zeros(2, 5, 3, 6), "s": torch.ones(2, 5, 3), "z": torch.zeros(2, 5, 3, 6), "c": torch.ones(2, 5, 3)
}  # fmt: skip


@pytest.mark.parametrize(
    "change, message",
    [
        ({"v": torch.zeros(6)}, r"v must be \[\.\.\., G, V\]"),
        ({"s": torch.zeros(2, 5, 3, 1)}, r"s must be \[2, 5, 3\]"),
        ({"c": torch.zeros(3)}, r"c must be \[2, 5, 3\]"),
        ({"z": torch.zeros(2, 5, 18)}, "z must have the shape of v"),
        ({"z": None}, "z and c must be given together"),
        ({"c": None}, "z and c must be given together"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"v": torch.zeros(2, 5, 3, 6).int()}, "v must be float16"),
        ({"v": torch.zeros(2, 5, 3, 6).double(), "backend": "triton"}, "backend 'triton'"),
    ],
)
def test_bad_input(change, message):
    with pytest.raises(ValueError, match=message):
        gated_writes(**{**GOOD, **change})


def test_an_argument_of_the_wrong_kind():
    with pytest.raises(TypeError, match="s must be a torch.Tensor"):
        gated_writes(GOOD["v"], 1.0)


@pytest.mark.kernels
def test_rows_too_wide_for_the_kernels():
    v, s = torch.zeros(2, 1, 4097, device=DEVICE), torch.ones(2, 1, device=DEVICE)
    with pytest.raises(ValueError, match="up to 4096 wide"):
        gated_writes(v, s, backend="triton")
    assert gated_writes(v, s)[0].shape == v.shape
