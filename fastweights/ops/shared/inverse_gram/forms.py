"""The inverse of a fading Gram matrix token by token, which is the specification, and chunk by chunk.

By chunks, G at the chunks' starts is a running sum, from which all tokens of all chunks are solved at once. A token that adds to
the inverse itself, A += refresh I, ends a chunk, because G = A^-1 is then no longer a sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...framework.call import stack_time
from ...framework.sequences import Chunks, Sequences
from ..decay import Decay, HeadDecay
from ..ridge.system import System
from .prefixes import Steps, solve_prefixes
from .regularization import allowance, diagonal, inverse, inverse_root, missing_prior

CHUNK = 64


def reference(
    u: Tensor,
    b: Tensor | None,
    gain: Tensor | None,
    g: Tensor | None,
    refresh: Tensor | None,
    G: Tensor,
    *,
    ridge: float,
) -> tuple[Tensor, tuple[Tensor]]:
    """u, b [B,T,H,K]; gain, g, refresh [B,T,H]; G [B,H,K,K] -> G_t^-1 b_t [B,T,H,K] or gain G_t^-1 u_t, (G,)."""
    if b is None:
        b = u if gain is None else gain[..., None] * u
    outputs = []
    for t in range(u.shape[1]):
        if g is not None:
            a = g[:, t].exp()
            G = a[..., None, None] * G + diagonal(missing_prior(a, ridge), G)
        row = u[:, t] if gain is None else gain[:, t, :, None] * u[:, t]
        G = G + row[..., :, None] * u[:, t, :, None, :]
        A = inverse(G, allowance(G, ridge))
        if refresh is not None and refresh[:, t].any():
            A = A + diagonal(refresh[:, t], A)
            G = inverse(A, torch.zeros_like(refresh[:, t]))
        outputs.append((A @ b[:, t, :, :, None])[..., 0])
    return stack_time(outputs, b), (G,)


def chunked(
    u: Tensor, b: Tensor | None, gain: Tensor | None, g: Tensor | None, refresh: Tensor | None, G: Tensor,
    sequences: Sequences, *, ridge: float,
) -> tuple[Tensor, tuple[Tensor]]:  # fmt: skip
    chunks = cut(sequences, refresh, u.device)
    U = chunks.split(u)
    B = U if b is None else chunks.split(b)
    ones = torch.ones_like(U[..., :1])
    gains = ones if gain is None else chunks.split(gain)[..., None]
    a = ones if g is None else chunks.split(g)[..., None].exp()
    decay = Decay(len(U)) if g is None else HeadDecay(a)
    restore = missing_prior(a, ridge)
    kept, (weights,), (prior,) = decay.carry_from_start(ones), decay.scores(gains, ones), decay.scores(restore, ones)
    prior = prior.sum(-1, keepdim=True)

    inputs = {"written": decay.carry_to_end(gains * U).mT @ U + diagonal(prior[:, :, -1, 0], G)}
    if g is not None:
        inputs["kept"] = decay.across(U)
    if refresh is not None:
        inputs["refresh"] = chunks.split(refresh).sum(2)[..., None, None]

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        part = dict(zip(inputs, parts))
        G = part["kept"] * states[0] if "kept" in part else states[0]
        G = G + part["written"]
        return (refresh_inverse(G, part["refresh"]) if "refresh" in part else G,)

    (start,), (final,) = chunks.scan(step, (G,), *inputs.values())
    steps = Steps(start, U, gains[..., 0], a[..., 0], restore[..., 0])
    x = chunks.merge(solve_prefixes(B, System(start, U, kept, weights, prior), steps, ridge))
    if refresh is not None:
        x = x + refresh[..., None] * (u if b is None else b)
    return x if gain is None or b is not None else gain[..., None] * x, (final,)


def cut(sequences: Sequences, refresh: Tensor | None, device: torch.device) -> Chunks:
    """Of rows of one token nothing is asked of the device, so that a CUDA graph may capture them."""
    if refresh is None or (sequences.lengths is None and sequences.time == 1):
        return Chunks(sequences, CHUNK, device)
    return RefreshChunks(sequences, CHUNK, refresh[..., 0])


def refresh_inverse(G: Tensor, refresh: Tensor) -> Tensor:
    """(G^-1 + refresh I)^-1 = (I + refresh G)^-1 G for G [..., K, K] and refresh [..., 1, 1], which is constant. The gradient
    comes from a first-order term that is zero in value."""
    fixed = G.detach()
    root = inverse_root(refresh * fixed, torch.ones_like(fixed[..., 0, 0]))
    part = root.mT @ root
    return part @ fixed + part @ (G - fixed) @ part


class RefreshChunks(Chunks):
    """Chunks of at most `largest` tokens, each ending with its sequence or where `refresh` [B, T] is not zero."""

    def __init__(self, sequences: Sequences, largest: int, refresh: Tensor) -> None:
        self.shape = refresh.shape
        lengths = sequences.lengths if sequences.lengths is not None else (sequences.time,) * sequences.batch
        self.sequences = Sequences(1, refresh.numel(), lengths)
        self.device = refresh.device
        ends = (refresh.flatten().nonzero()[:, 0] + 1).tolist()[::-1]
        pieces: list[list[tuple[int, int]]] = []
        stop = 0
        for length in lengths:
            start, stop = stop, stop + length
            pieces.append([])
            while start < stop:
                while ends and ends[-1] <= start:
                    ends.pop()
                end = min(start + largest, stop, *ends[-1:])
                pieces[-1].append((start, end))
                start = end
        self.order = sorted(range(len(pieces)), key=lambda n: -len(pieces[n]))
        steps = range(max(map(len, pieces), default=0))
        self.active = [sum(len(p) > step for p in pieces) for step in steps]
        ordered = [pieces[n][step] for step in steps for n in self.order[: self.active[step]]]
        self.size = max((end - start for start, end in ordered), default=1)
        first, last = torch.tensor(ordered, dtype=torch.long).reshape(-1, 2, 1).unbind(1)
        token = first + torch.arange(self.size)
        self._place(token.where(token < last, self.sequences.time))

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        return super().split(x.flatten(0, 1)[None], fill)

    def merge(self, y: Tensor) -> Tensor:
        return super().merge(y)[0].unflatten(0, self.shape)
