"""The product of SwiGLU: the PyTorch form against the formula, the kernels (on a GPU or in Triton's interpreter) against it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops.silu_product import silu_product, silu_product_of_halves
from tests.kernels.cases import DEVICE


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for _ in range(2)]


def results(given: list[Tensor], call: Any = silu_product, **options: Any) -> list[Tensor]:
    y = call(*given, **options)
    torch.manual_seed(1)
    return [y, *torch.autograd.grad(y, given, torch.randn_like(y))]


def formula(z: Tensor, u: Tensor) -> Tensor:
    return z / (1 + (-z).exp()) * u


def test_formula():
    given = inputs((2, 3, 5), torch.float64)
    torch.testing.assert_close(results(given, backend="torch"), results(given, formula))


@pytest.mark.kernels
@pytest.mark.parametrize("shape", [(1,), (2, 3, 48), (3, 1365), (2, 2048)], ids=str)
def test_kernels(shape):
    given = inputs(shape)
    got, wanted = (results(given, backend=backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.kernels
def test_kernels_take_any_layout_and_no_numbers_at_all():
    joint = torch.randn(3, 40, device=DEVICE)
    z, u = joint[:, :17], joint[:, 20:37]
    torch.testing.assert_close(silu_product(z, u, backend="triton"), silu_product(z, u, backend="torch"))
    assert silu_product(z[:0], u[:0], backend="triton").shape == (0, 17)


@pytest.mark.kernels
def test_kernels_round_once():
    z, u = (x.detach().half() for x in inputs((3, 50)))
    got = silu_product(z, u, backend="triton")
    assert got.dtype == torch.float16
    torch.testing.assert_close(got.double(), formula(z.double(), u.double()), rtol=2**-11 * 1.01, atol=1e-6)


@pytest.mark.kernels
def test_kernels_in_one_graph():
    given = inputs((4, 8))
    compiled = torch.compile(silu_product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        results(given, compiled, backend="triton"), results(given, backend="triton"), rtol=0, atol=0
    )


@pytest.mark.parametrize(
    "z, u, options, message",
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), {}, "u must have the shape of z"),
        (torch.zeros(2).int(), torch.zeros(2), {}, "z must be float16"),
        (torch.zeros(2), torch.zeros(2), {"backend": "cuda"}, "backend must be one of"),
        (torch.zeros(2).double(), torch.zeros(2).double(), {"backend": "triton"}, "backend 'triton'"),
    ],
)
def test_bad_input(z, u, options, message):
    with pytest.raises(ValueError, match=message):
        silu_product(z, u, **options)


def test_an_argument_of_the_wrong_kind():
    with pytest.raises(TypeError, match="u must be a torch.Tensor"):
        silu_product(torch.zeros(2), 1.0)


@pytest.mark.kernels
@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("shape", [(2, 3, 48), (3, 34)], ids=str)
def test_halves_of_one_tensor(shape, traced):
    joint = inputs(shape)[:1]
    call = (
        torch.compile(silu_product_of_halves, fullgraph=True, backend="aot_eager") if traced else silu_product_of_halves
    )
    got, wanted = (results(joint, call, backend=backend) for backend in ("triton", "torch"))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
