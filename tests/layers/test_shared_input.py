"""Products of one input against those taken one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.layers import shared_input
from fastweights.layers.shared_input import multiply_one_input
from fastweights.models.modeling import SwiGLU


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in [(2, 5, 6), (3, 6), (4, 6), (6, 6)]]


def one_by_one(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, weight) for weight in weights)


def results(call, given: list[Tensor], outputs: slice = slice(None)) -> list[Tensor | None]:
    found = call(*given)[outputs]
    torch.manual_seed(1)
    towards = [torch.randn_like(y) for y in found]
    asked = [x for x in given if x.requires_grad]
    return [*found, *torch.autograd.grad(found, asked, towards, materialize_grads=True)]


@pytest.mark.parametrize("frozen", [(), (0,), (1, 3)])
@pytest.mark.parametrize("outputs", [slice(None), slice(1, 2)])
def test_values_and_gradients(frozen, outputs):
    given = inputs()
    for number in frozen:
        given[number].requires_grad_(False)
    torch.testing.assert_close(results(multiply_one_input, given, outputs), results(one_by_one, given, outputs))


def test_autocast():
    """Products in autocast's dtype, gradients in that of what they are of, as near to the exact ones as one by one."""
    given = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got, twin = (results(call, given) for call in (multiply_one_input, one_by_one))
    exact = results(one_by_one, [x.detach().double().requires_grad_() for x in given])
    assert [x.dtype for x in got] == [torch.bfloat16] * 3 + [torch.float32] * 4
    for found, other, wanted in zip(got, twin, exact, strict=True):
        assert (found - wanted).norm() <= 1.5 * (other - wanted).norm()


def test_modules_train_through_it(monkeypatch):
    """project_together takes it for plain modules and leaves modules with hooks to themselves."""
    taken = []
    monkeypatch.setattr(shared_input, "sums_gradients", lambda x: True)
    monkeypatch.setattr(
        shared_input, "multiply_one_input", lambda *given: taken.append(1) or multiply_one_input(*given)
    )
    torch.manual_seed(0)
    mlp, x = SwiGLU(6, 8).double(), torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    joined = torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()])
    assert taken
    taken.clear()
    mlp.up_proj.register_forward_hook(lambda *_: None)
    torch.testing.assert_close(joined, torch.autograd.grad(mlp(x).square().sum(), [x, *mlp.parameters()]))
    assert not taken
