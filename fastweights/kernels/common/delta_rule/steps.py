"""Several steps of the delta rule per token, as sequences in which every step is a token: inputs and outputs, in PyTorch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LEAST_LOG_DECAY = -40.0


def unroll_steps(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, g: Tensor | None = None, write_key: Tensor | None = None
) -> dict[str, Any]:
    """The inputs of the delta rule [B, T R, ...] for k, v, beta and write_key [B, T, heads, R, ...].

    The memory decays at the first step of a token, and q reads it after the last one: the other log decays and queries are 0.
    """
    steps = k.shape[3]

    def at_step(x: Tensor | None, step: int) -> Tensor | None:
        if x is None:
            return None
        return F.pad(x.unsqueeze(2), [0, 0] * (x.ndim - 2) + [step, steps - 1 - step]).flatten(1, 2)

    return {
        "q": at_step(q, steps - 1), "k": in_order(k), "v": in_order(v), "beta": in_order(beta), "g": at_step(g, 0),
        "write_key": in_order(write_key),
    }  # fmt: skip


def in_order(x: Tensor | None) -> Tensor | None:
    """[B, T, heads, R, ...] -> [B, T R, heads, ...]: what each step of every token has."""
    return None if x is None else x.transpose(2, 3).flatten(1, 2)


def unroll_lengths(cu_seqlens: Tensor | None, steps: int) -> Tensor | None:
    """The cumulative lengths of packed sequences in steps."""
    return None if cu_seqlens is None else cu_seqlens * steps


def outputs_of_tokens(o: Tensor, steps: int) -> Tensor:
    """[B, T R, ...] -> [B, T, ...], the outputs after the last step of every token."""
    return o[:, steps - 1 :: steps].contiguous()


def erase_and_write(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, g: Tensor | None = None) -> dict[str, Any]:
    """The inputs of `unroll_steps` for S = (Diag(exp(g)) + b a^T) S + k v^T in two steps.

    The first reads -a / exp(g), as the memory has decayed by then, and corrects it along b towards 0; the second reads nothing
    and writes v along k. Kernels cut off log decays at `LEAST_LOG_DECAY` anyway. Float16 cannot hold the quotients: float32.
    """
    heads, dtype = v.shape[2], torch.float32 if v.dtype == torch.float16 else v.dtype
    read = a
    if g is not None:
        g = g.to(torch.promote_types(g.dtype, torch.float32)).clamp_min(LEAST_LOG_DECAY)
        growth = (-g).exp() if g.ndim == 4 else (-g).exp()[..., None]
        if g.shape[2] != a.shape[2]:  # one quotient per value head: all keys with as many heads
            q, k, a, b = (x.repeat_interleave(heads // x.shape[2], 2) for x in (q, k, a, b))
        read = a * growth
    keys = torch.stack([(-read).to(dtype), torch.zeros_like(k, dtype=dtype)], 3)
    values = torch.stack([torch.zeros_like(v), v], 3).to(dtype)
    return {
        "q": q.to(dtype), "k": keys, "v": values, "beta": torch.ones_like(values[..., 0]), "g": g,
        "write_key": torch.stack([b, k], 3).to(dtype),
    }  # fmt: skip
