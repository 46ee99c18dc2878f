"""The inputs of recurrent kernels: tensors of any layout, read token by token."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

__all__ = ["jit_options", "decay_from_log", "load_number", "load_row", "strides"]


def strides(x: Tensor | None, batch: int, time: int, heads: int) -> tuple[Tensor | None, int, int, int]:
    """x [B, T, h, ...], its strides from token to token and from head to head, and the value heads that one head serves."""
    if x is None:
        return None, 0, 0, 1
    steps = x.stride()
    if (len(steps) == 4 and steps[3] != 1) or (batch > 1 and time > 1 and steps[0] != time * steps[1]):
        x = x.contiguous()
        steps = x.stride()
    return x, steps[0 if time == 1 and batch > 1 else 1], steps[2], heads // x.shape[2]


def jit_options(inputs: tuple[str, ...], *others: str, numbers: tuple[str, ...] = ()) -> dict[str, Any]:
    """Keywords of triton.jit for a kernel with x, x_token and x_head for every input x, other tensors, and numbers. Only the
    alignment of the states matters for speed: Triton would compile the kernel again for every layout of the inputs."""
    return {
        "do_not_specialize": [*numbers, *(f"{name}_{step}" for name in inputs for step in ("token", "head"))],
        "do_not_specialize_on_alignment": [*inputs, *others, "o", "state_indices", "P", "cu_seqlens", "T"],
    }


@triton.jit
def load_row(x, token, token_step, head, head_step, GROUP: tl.constexpr, channel, exists):
    """The channels of one token and head, 0 where there is none."""
    return tl.load(x + token * token_step + head // GROUP * head_step + channel, mask=exists, other=0)


@triton.jit
def load_number(x, token, token_step, head, head_step, GROUP: tl.constexpr):
    return tl.load(x + token * token_step + head // GROUP * head_step)


@triton.jit
def decay_from_log(g):
    """exp(g): 0 for -inf, which is legal, NaN for infinity, which is not."""
    g = g.to(tl.float32)
    return tl.where(g < float("inf"), tl.exp(g), float("nan"))
