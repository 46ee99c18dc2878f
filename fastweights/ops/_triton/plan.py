"""One call of the kernels: its tensors, sizes, and the choices that are compiled in."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._shared.sequences import Sequences
from .config import programs_at_once, tiles
from .tables import CHUNK, most_segments, segment_length


class Inputs(NamedTuple):
    """Contiguous tensors as the ops take them; what a rule lacks is None."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor | None = None
    g: Tensor | None = None
    write_key: Tensor | None = None
    S: Tensor | None = None
    precond_g: Tensor | None = None
    precond_beta: Tensor | None = None
    center: Tensor | None = None
    A: Tensor | None = None


class Saved(NamedTuple):
    """What backward keeps: T [BT, HV, 64], G [BT, HV], states at the segments' starts [P, HV, K, V], the segments' transitions
    [P, HV, K(, K)], the preconditioner's A at the chunks' starts [M, HV, K]; empty where there is none."""

    T: Tensor
    G: Tensor
    starts: Tensor
    transitions: Tensor
    gram: Tensor


@lru_cache
def is_roomy(device: torch.device) -> bool:
    """See `tiles`; so is the interpreter."""
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200 * 1024


class Plan:
    """Sizes, tables and compile-time choices of one call."""

    def __init__(self, x: Inputs, sequences: Sequences) -> None:
        self.sequences = sequences
        self.tokens = x.q.shape[0] * x.q.shape[1]
        self.H, self.K = x.q.shape[2:]
        self.HV, self.V = x.v.shape[2:]
        self.delta, self.precond = x.beta is not None, x.precond_g is not None
        self.writes = x.write_key is not None or self.precond
        self.decay = 0 if x.g is None else x.g.ndim - 2
        self.tile = tiles(self.K, self.V, x.q.element_size(), self.delta, is_roomy(x.q.device))
        # The preconditioner's sums over key channels come in the same parts as the others.
        self.backward = "channel_gradients" if self.decay == 2 else "gradients"
        self.tile["gram"] = self.tile["gram"]._replace(BK=self.tile[self.backward].BK)
        self.precision = "tf32x3" if x.q.dtype == torch.float32 else "tf32"
        self.segment = segment_length(
            sequences, self.HV * -(-self.V // self.tile["walk"].BV), programs_at_once(self.delta)
        )
        self.device, self.dtype = x.q.device, x.q.dtype

    @property
    def segments(self) -> int:
        """Segments that have a state of their own, 0 where the sequences are walked whole."""
        return 0 if self.segment is None else most_segments(self.sequences, self.segment)

    def kept(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of what is kept for backward, in the order of `Saved`; operands of products in the inputs' dtype."""
        tokens, HV, K, P, float32 = self.tokens, self.HV, self.K, self.segments, torch.float32
        return [
            ((tokens * self.delta, HV, CHUNK), self.dtype),
            ((tokens * (self.decay == 1), HV), float32),
            ((P, HV, K, self.V), float32),
            ((P, HV, K, K), self.dtype) if self.delta else ((P, HV, K), float32),
            ((self.chunks if self.precond else 0, HV, K), float32),
        ]

    @property
    def chunks(self) -> int:
        """A bound on the number of chunks, exact where all sequences are equally long."""
        return most_segments(self.sequences, 1) if self.tokens else 0

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)

    def shared(self, gradient: Tensor, like: Tensor) -> Tensor:
        """A gradient [BT, HV, ...] summed over the value heads that one head of `like` serves, in its dtype."""
        if like.shape[2] != self.HV:
            gradient = gradient.unflatten(1, (like.shape[2], -1)).sum(2, dtype=torch.float32)
        return gradient.view(like.shape).to(like.dtype)

    def options(self, name: str, *tile: str) -> dict[str, Any]:
        found = self.tile[name]
        return {
            **{size: getattr(found, size) for size in tile},
            "num_warps": found.num_warps, "num_stages": found.num_stages,
        }  # fmt: skip


def heads(plan: Plan, x: Tensor | None) -> int:
    """How many value heads one head of x serves."""
    return 1 if x is None else plan.HV // x.shape[2]
