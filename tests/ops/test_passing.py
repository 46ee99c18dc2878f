"""What a part of a sequence adds to a state and keeps of it: those of its tokens one by one, at lengths of several blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.ops.authoring import Sum
from fastweights.testing.contract.compare import relative_error


class Scanned(TorchDispatchMode):
    """Notes the lengths of all cumsums."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.cumsum.default:
            self.lengths.add(args[0].shape[args[1]])
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("per_channel", [False, True])
def test_a_long_part_is_its_tokens_one_by_one(per_channel: bool) -> None:
    time, heads, keys, values = 2500, 2, 3, 2
    torch.manual_seed(0)
    given = {"k": torch.randn(1, time, heads, keys), "v": torch.randn(1, time, heads, values)}
    given["g"] = -0.1 * torch.rand(1, time, heads, *(keys,) * per_channel)
    given["g"][0, 700, 1] = -torch.inf
    given = {name: x.double().requires_grad_() for name, x in given.items()}
    with Scanned() as scanned:
        found = Sum(x="k", y="v", decay="g").summarize(given, None)
        gradients = torch.autograd.grad(found.added.square().sum() + found.kept.sum(), list(given.values()))
    state, kept = torch.zeros(1, heads, keys, values).double(), 1
    for token in range(time):
        decay = given["g"][:, token].exp()
        kept = kept * decay
        decay = decay if per_channel else decay[..., None]
        state = decay[..., None] * state + given["k"][:, token, :, :, None] * given["v"][:, token, :, None]
    torch.testing.assert_close(found, (state, kept))
    wanted = torch.autograd.grad(state.square().sum() + kept.sum(), list(given.values()))
    assert all(relative_error(x, y) < 1e-10 for x, y in zip(gradients, wanted, strict=True))
    assert max(scanned.lengths) <= 32  # torch 2.11 fails to compile long ones of few rows
