"""Which calls of a model of transformers our ops can take, and where packed sequences begin in them.

What they cannot take runs as before, so that a model of any dtype on any device works with or without us. An exported program
must run where this library is not installed, so that while a model is exported the originals run too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels

__all__ = ["first_of_packed", "runs_here"]


def runs_here(*tensors: Tensor | None) -> bool:
    """Whether our ops serve these tensors: on one device, which is a CPU or a GPU with our kernels, and not in float64."""
    given = [x for x in tensors if x is not None]
    first = given[0]
    if torch.compiler.is_exporting() or any(x.device != first.device or x.dtype == torch.float64 for x in given):
        return False
    return first.device.type == "cpu" or takes_kernels("auto", first)


def first_of_packed(arguments: dict[str, Any]) -> Tensor | None:
    """The cumulative lengths of the sequences packed into a row, None where nothing is packed.

    They come as cu_seqlens or cu_seq_lens_q. Where only seq_idx [1, T] is there, the number of each token's sequence, they are
    read off it, which waits for a GPU.
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
