"""A residual addition with its norm: the PyTorch form against the formula, the kernels (on a GPU or in Triton's interpreter)
against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops.residual_norm import residual_norm
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE


def inputs(shape: tuple[int, ...], branch: bool, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    torch.manual_seed(0)
    x, b = (torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for _ in range(2))
    return [x, b if branch else None, torch.randn(shape[-1], device=DEVICE).to(dtype).requires_grad_()]


def results(given: list[Tensor | None], call: Any = residual_norm, **options: Any) -> list[Tensor]:
    """Sum, norm and the gradients in what is given."""
    outputs = call(*given, **options)
    torch.manual_seed(1)
    towards = [torch.randn_like(y) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, [x for x in given if x is not None], towards)]


def formula(x: Tensor, branch: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x if branch is None else x + branch
    return s, s / (s.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_formula(branch, offset):
    given = inputs((2, 3, 40), branch, torch.float64)
    wanted = results(given, lambda x, b, w: formula(x, b, w + offset))
    torch.testing.assert_close(results(given, offset=offset, backend="torch"), wanted)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
def test_an_offset_beside_weights_in_16_bits(backend):
    """1 + w keeps the digits of a small w."""
    x, _, w = (None if y is None else y.detach() for y in inputs((2, 3, 40), False, torch.bfloat16))
    w = w / 1000
    _, n = residual_norm(x, None, w, offset=1.0, dtype=torch.float32, backend=backend)
    torch.testing.assert_close(n.double(), formula(x.double(), None, 1 + w.double())[1], rtol=1e-6, atol=1e-6)


@fast_where(lambda given: given["branch"] or given["shape"] != (65, 1024))
@pytest.mark.kernels
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 20), (2, 63, 48), (300,), (65, 1024)], ids=str)
def test_kernels(shape, branch):
    given, offset = inputs(shape, branch), 0.5 * (shape[0] == 2)
    got, wanted = (results(given, offset=offset, backend=backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("unread", [0, 1])
def test_kernels_where_nothing_reads_an_output(unread, branch):
    given = inputs((2, 3, 20), branch)
    asked = [x for x in given if x is not None]
    got, wanted = (
        torch.autograd.grad(residual_norm(*given, backend=backend)[1 - unread].sum(), asked, allow_unused=True)
        for backend in ("triton", "torch")
    )
    for x, y in zip(got, wanted, strict=True):
        torch.testing.assert_close(x, torch.zeros_like(x) if y is None else y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["torch", pytest.param("triton", marks=pytest.mark.kernels)])
def test_a_stream_in_float32_with_a_branch_and_a_norm_of_16_bits(backend):
    """As under autocast: the sum keeps the stream's dtype, the norm is rounded once, each gradient has its input's dtype."""
    x, b, w = (y.detach() for y in inputs((5, 3, 20), True))
    b = b.half()
    s, n = residual_norm(x.requires_grad_(), b.requires_grad_(), w, dtype=torch.float16, backend=backend)
    wanted = formula(x.double(), b.double(), w.double())
    assert (s.dtype, n.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(s.double(), wanted[0], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(n.double(), wanted[1], rtol=2**-11 * 1.01, atol=1e-6)
    dx, db = torch.autograd.grad(s.sum() + n.float().square().sum(), [x, b])
    assert (dx.dtype, db.dtype) == (torch.float32, torch.float16)
    torch.testing.assert_close(db, dx.half(), rtol=0, atol=0)


@pytest.mark.kernels
@pytest.mark.parametrize("branch", [False, True])
def test_kernels_in_one_graph(branch):
    given = inputs((1, 4, 8), branch)
    compiled = torch.compile(residual_norm, fullgraph=True, backend="aot_eager")
    # Without a branch the graph adds the gradients of the stream, and eagerly the kernel does, which may round once less.
    tolerance = 0.0 if branch else 1e-6
    torch.testing.assert_close(
        results(given, compiled, backend="triton"), results(given, backend="triton"), rtol=tolerance, atol=tolerance
    )


@pytest.mark.kernels
def test_kernels_without_rows():
    s, n, *gradients = results(inputs((2, 0, 8), True), backend="triton")
    assert s.shape == n.shape == gradients[0].shape == (2, 0, 8) and not gradients[2].any()


@pytest.mark.parametrize(
    "change, message",
    [
        ({"x": torch.zeros(())}, r"x must be \[\.\.\., V\]"),
        ({"weight": torch.zeros(5)}, r"weight must be \[6\]"),
        ({"branch": torch.zeros(2, 3, 5)}, "branch must have the shape of x"),
        ({"eps": -1.0}, "eps must be"),
        ({"offset": float("inf")}, "offset must be"),
        ({"backend": "cuda"}, "backend must be one of"),
        ({"x": torch.zeros(2, 3, 6).double(), "backend": "triton"}, "backend 'triton'"),
    ],
)
def test_bad_input(change, message):
    good = {"x": torch.zeros(2, 3, 6), "branch": torch.zeros(2, 3, 6), "weight": torch.ones(6)}
    with pytest.raises(ValueError, match=message):
        residual_norm(**{**good, **change})


def test_an_argument_of_the_wrong_kind():
    with pytest.raises(TypeError, match="weight must be a torch.Tensor"):
        residual_norm(torch.zeros(2, 6), None, 1.0)


@pytest.mark.kernels
def test_rows_too_wide_for_the_kernels():
    x, w = torch.zeros(1, 4097, device=DEVICE), torch.ones(4097, device=DEVICE)
    with pytest.raises(ValueError, match="up to 4096 wide"):
        residual_norm(x, None, w, backend="triton")
    assert residual_norm(x, None, w)[1].shape == x.shape
