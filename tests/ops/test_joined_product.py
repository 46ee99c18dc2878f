"""The product of one input with several weights: values, gradients and what it keeps for the backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from fastweights.ops.joined_product import add_product_, joined_product


def draw(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64, requires_grad=True)


def kept_by(x: Tensor, *weights: Tensor) -> list[int]:
    """Where the storages of the tensors begin that wait for a backward."""
    kept: list[int] = []
    with saved_tensors_hooks(lambda y: kept.append(y.untyped_storage().data_ptr()) or y, lambda y: y):
        joined_product(x, *weights)
    return kept


@pytest.mark.parametrize("shape", [(3, 7), (5,), (2, 0)], ids=str)
def test_values_and_gradients(shape: tuple[int, ...]) -> None:
    x, a, b = draw(*shape, 4), draw(3, 4), draw(2, 4)
    found = joined_product(x, a, b, multiple=8)
    wanted = torch.cat([x @ a.T, x @ b.T, x.new_zeros(*shape, 3)], -1)
    torch.testing.assert_close(found, wanted)
    towards = torch.randn_like(wanted)
    got, expected = (torch.autograd.grad(y, (x, a, b), towards, retain_graph=True) for y in (found, wanted))
    for one, right in zip(got, expected, strict=True):
        torch.testing.assert_close(one, right)


def test_no_copy_of_the_weights_is_kept() -> None:
    x, a, b = draw(7, 4), draw(3, 4), draw(2, 4)
    given = {y.untyped_storage().data_ptr() for y in (x, a, b)}
    assert set(kept_by(x, a, b)) == given


def test_frozen_weights_keep_no_input() -> None:
    x, a, b = draw(7, 4), draw(3, 4).detach(), draw(2, 4).detach()
    assert x.untyped_storage().data_ptr() not in kept_by(x, a, b)


def test_a_product_is_added_when_compiled_too() -> None:
    total, a, b = torch.ones(3, 2), torch.randn(3, 5), torch.randn(5, 2)
    wanted = total + a @ b
    torch.compile(add_product_, backend="aot_eager", fullgraph=True)(total, a, b)
    torch.testing.assert_close(total, wanted)
