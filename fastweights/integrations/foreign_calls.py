"""Calls of ops by another library: which of them our ops take, where packed sequences begin, and the delta rule under its
arguments.

The original op serves a call that ours do not take, so that a model of any dtype on any device works with or without this
library. It also runs while a model is exported: the exported program must run where this library is not installed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..checks import LARGEST_HEAD
from ..kernels.availability import takes_kernels
from ..ops import delta_rule
from ..ops.gated_norm import gated_rms_norm
from ..ops.l2_normalize import l2_normalize

__all__ = ["call_delta_rule", "packed_lengths", "runs_here", "explain_refusal"]


def runs_here(*tensors: Tensor | None) -> bool:
    """Whether our ops serve these tensors: on one device, which is a CPU or a GPU with our kernels, and not in float64."""
    given = [x for x in tensors if x is not None]
    first = given[0]
    if torch.compiler.is_exporting() or any(x.device != first.device or x.dtype == torch.float64 for x in given):
        return False
    return first.device.type == "cpu" or takes_kernels("auto", first)


def explain_refusal(
    q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None, cu_seqlens: Tensor | None = None
) -> str | None:
    """Why `delta_rule` cannot take a call, None where it can. others: gains, decays, states."""
    if not runs_here(q, k, v, *others):
        return "tensors must be on one CPU or one GPU of our kernels, not in float64, in a program that is not exported"
    if not q.dtype == k.dtype == v.dtype:
        return "q, k and v must have one dtype"
    if max(q.shape[-1], v.shape[-1]) > LARGEST_HEAD:
        return f"heads must have at most {LARGEST_HEAD} channels"
    if v.shape[2] % q.shape[2]:
        return "the number of v heads must be a multiple of that of q heads"
    if cu_seqlens is not None and len(q) != 1:
        return "sequences packed with cu_seqlens must be in one row"
    return None


def packed_lengths(arguments: dict[str, Any]) -> Tensor | None:
    """The cumulative lengths of the sequences packed into a row, None where nothing is packed.

    In models of transformers they come as cu_seqlens or cu_seq_lens_q. Where only seq_idx [1, T] is there, the number of each
    token's sequence, they are read off it, which waits for a GPU.
    """
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if arguments.get(name) is not None:
            return arguments[name]
    index = arguments.get("seq_idx")
    if index is None:
        return None
    inner = 1 + (index[0, 1:] != index[0, :-1]).nonzero().flatten()
    ends = inner.new_tensor([0, index.shape[1]])
    return torch.cat([ends[:1], inner, ends[1:]])


EPS = 1e-6  # that of transformers and of flash-linear-attention


def call_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    g: Tensor,
    *,
    normalize: bool,
    initial_state: Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """`delta_rule`, with a first state of any dtype. normalize: whether q and k are divided by their lengths first."""
    if normalize:
        q, k = _unit(q), _unit(k)
    state = None if initial_state is None else initial_state.float()
    return delta_rule(q, k, v, beta, g, initial_state=state, **options)


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(|x|^2 + eps), in float32 inside. A single token takes one launch. Others take the norm, which has gradients on a
    GPU: |x|^2 + eps is K times the mean square plus eps / K."""
    if x.shape[1] == 1:
        return l2_normalize(x, EPS)
    width = x.shape[-1]
    weight = x.new_full((width,), width**-0.5, dtype=torch.float32)
    return gated_rms_norm(x if x.is_cuda else x.float(), weight, eps=EPS / width).to(x.dtype)
