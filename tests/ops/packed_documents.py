"""Documents packed into a row in several ways, and what layers compute for them around the memories."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from fastweights.ops.gated_norm import gated_rms_norm
from fastweights.ops.l2_normalize import l2_normalize
from fastweights.ops.residual_norm import residual_norm
from fastweights.ops.short_convolution import short_convolution
from fastweights.ops.silu_product import silu_product

__all__ = ["AROUND_MEMORIES", "PACKS", "around_memories", "assert_same_bits", "with_gradients"]

# Numbers of documents, of six. The first packs have the same ones in other orders, the others also other ones beside them.
PACKS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0), (4, 0, 5), (5, 4, 3, 2, 1, 0), (1, 4))

Call = Callable[..., Iterable[Tensor]]


def assert_same_bits(
    call: Call,
    lengths: Sequence[int],
    shapes: Sequence[tuple[int, ...]],
    packs: Sequence[Sequence[int]],
    **options: object,
) -> None:
    """That call(*tokens [1, T, ...], cu_seqlens) gives every document the same bits in all packs. options: dtype and device."""
    generator = torch.Generator().manual_seed(0)
    documents = [
        [torch.randn(1, length, *shape, generator=generator).to(**options) for length in lengths]
        for shape in shapes  # type: ignore[call-overload]
    ]
    first: dict[int, list[Tensor]] = {}
    for pack in packs:
        taken = [lengths[n] for n in pack]
        edges = torch.tensor([0, *taken], device=documents[0][0].device).cumsum(0)
        results = call(*(torch.cat([x[n] for n in pack], 1) for x in documents), edges)
        for n, *found in zip(pack, *(y.split(taken, 1) for y in results), strict=True):
            assert all(x.isfinite().all() for x in found), n
            wanted = first.setdefault(n, found)
            assert wanted and all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True)), (n, pack)


def with_gradients(call: Call) -> Call:
    """The outputs, and the gradients of all tokens."""

    def called(*given: Tensor) -> list[Tensor]:
        *tokens, edges = given
        leaves = [x.requires_grad_() for x in tokens]
        outputs = list(call(*leaves, edges))
        gradients = torch.autograd.grad(sum(y.float().square().sum() for y in outputs), leaves, allow_unused=True)
        return [y.detach() for y in outputs] + [g for g in gradients if g is not None]

    return called


# Of x and z [1, T, D], cu_seqlens, and parameters: a filter [D, 4], weights [D] and [V]; in heads of V channels.
AROUND_MEMORIES: dict[str, Call] = {
    "convolution": lambda x, z, edges, w, d, v, **o: short_convolution(
        x, w, d, activation="silu", cu_seqlens=edges, **o
    )[:1],
    "convolution and norm": lambda x, z, edges, w, d, v, **o: short_convolution(
        x, w, d, activation="silu", normalize=len(v), cu_seqlens=edges, **o
    )[:1],
    "gated norm": lambda x, z, edges, w, d, v, **o: [gated_rms_norm(_heads(x, v), v, _heads(z, v), **o)],
    "gate before the norm": lambda x, z, edges, w, d, v, **o: [
        gated_rms_norm(_heads(x, v), v, _heads(z, v), gate_first=True, **o)
    ],
    "residual norm": lambda x, z, edges, w, d, v, **o: residual_norm(x, z, d, **o),
    "length of heads": lambda x, z, edges, w, d, v, **o: [l2_normalize(_heads(x, v), **o)],
    "SwiGLU": lambda x, z, edges, w, d, v, **o: [silu_product(x, z, **o)],
}


def around_memories(name: str, channels: int, head: int, device: str, backend: str) -> Call:
    """One of these with random parameters."""
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=generator).to(device) for shape in ((channels, 4), (channels,), (head,))]
    return lambda x, z, edges: AROUND_MEMORIES[name](x, z, edges, *drawn, backend=backend)


def _heads(x: Tensor, v: Tensor) -> Tensor:
    return x.unflatten(2, (-1, len(v)))
