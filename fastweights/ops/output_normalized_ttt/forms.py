"""Output-normalised test-time training token by token, which is the specification, and chunk by chunk, exact.

A token writes gamma_t k_t u_t^T, where u_t depends on the memory's answer z_t alone. With S the memory at the chunk's start,
    z_t = S^T k_t + sum_{j < t} gamma_j (k_j.k_t) u_j
so that only vectors of the size of a value follow each other; all that touches the K x V memory is matrix products.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences

SHORTEST = 1e-6  # an answer z that is shorter has no direction
CHUNK = 64


def reference(q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, S: Tensor) -> tuple[Tensor, tuple[Tensor]]:
    """q, k [B,T,H,K]; v [B,T,H,V]; gamma [B,T,H]; S [B,H,K,V]."""
    queries, keys, values = q[..., None, :].unbind(1), k[..., None].unbind(1), v[..., None, :].unbind(1)
    outputs = []
    for q_t, k_t, v_t, gamma_t in zip(queries, keys, values, gamma[..., None, None].unbind(1)):
        z = k_t.mT @ S
        square = z.square().sum(-1, keepdim=True)
        short = square < SHORTEST**2
        inverse = square.masked_fill(short, 1.0).rsqrt()
        direction = z * inverse
        error = direction - v_t
        along = (direction * (direction @ error.mT)).masked_fill(short, 0.0)
        S = S - gamma_t * k_t * (error - along) * inverse
        outputs.append((q_t @ S)[..., 0, :])
    return stack_time(outputs, v), (S,)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, gamma: Tensor, S: Tensor, sequences: Sequences
) -> tuple[Tensor, tuple[Tensor]]:
    chunks = Chunks(sequences, CHUNK, v.device)
    Q, K, V, gain = chunks.split(q), chunks.split(k), chunks.split(v), chunks.split(gamma)[..., None]
    keys = gain * K
    written: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor]:
        K, V, keys, overlap = parts
        written.append(Writes.apply(K @ states[0], overlap, V))
        return (states[0] + keys.mT @ written[-1],)

    (start,), (final,) = chunks.scan(step, (S,), K, V, keys, (K @ keys.mT).tril(-1))
    U = torch.cat(written) if written else V
    return chunks.merge(Q @ start + (Q @ keys.mT).tril() @ U), (final,)


class Writes(torch.autograd.Function):
    """What the tokens of a chunk write, one after the other, with a backward pass written out by hand.

        u = r v - p z        r = 1 / |z|   p = (z.v) / |z|^3
    is minus the gradient of |z/|z| - v|^2 / 2 in z: the part of v / |z| across z. For |z| < SHORTEST, r = p = 1.

    u [..., C, V] of z = first + overlap u and v, with first, v [..., C, V] and overlap [..., C, C] below its diagonal.

    Inside, the tokens come first; z and v are the two rows of a pair, r and p the numbers that read it: [C, G, 2, V].
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, overlap: Tensor, v: Tensor) -> Tensor:
        ctx.lead = v.shape[:-2]
        pair = torch.stack([move_time_first(first), move_time_first(v)], 2)
        overlap = move_time_first(overlap)
        u, z = torch.empty_like(pair[:, :, :1]), pair[:, :, :1]
        by_writer = overlap.permute(2, 0, 1)[..., None, None]
        for t, (pair_t, z_t, u_t) in enumerate(zip(pair, z, u)):
            square, along = torch.bmm(z_t, pair_t.mT).split(1, -1)
            torch.bmm(torch.cat(compute_reading(square, along), -1), pair_t, out=u_t)
            z[t + 1 :].addcmul_(by_writer[t, t + 1 :], u_t)
        ctx.save_for_backward(overlap, pair, u)
        return move_batch_first(u[:, :, 0], ctx.lead)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, du: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        overlap, pair, u = ctx.saved_tensors
        du = move_time_first(du)[:, :, None].contiguous()
        square, along = (pair[:, :, :1] @ pair.mT).split(1, -1)
        minus_p, r = compute_reading(square, along)
        long = square >= SHORTEST**2
        r_cubed, p_square = r**3 * long, -minus_p * r**2 * long
        # dz = -p du + (z.du, v.du) turned (z, v)
        turned = torch.cat([torch.cat([3 * p_square, -r_cubed], -1), torch.cat([-r_cubed, 0 * r_cubed], -1)], -2)
        dz, inner = torch.empty_like(du), torch.empty_like(minus_p.expand(-1, -1, -1, 2))
        rows = overlap[..., None, None].transpose(1, 2)
        for t in reversed(range(len(du))):
            torch.bmm(du[t], pair[t].mT, out=inner[t])
            torch.mul(du[t], minus_p[t], out=dz[t]).baddbmm_(torch.bmm(inner[t], turned[t]), pair[t])
            du[:t].addcmul_(rows[t, :t], dz[t])
        dv = r * du - r_cubed * inner[..., :1] * pair[:, :, :1]
        d_overlap = (move_batch_first(dz[:, :, 0], ctx.lead) @ move_batch_first(u[:, :, 0], ctx.lead).mT).tril(-1)
        return move_batch_first(dz[:, :, 0], ctx.lead), d_overlap, move_batch_first(dv[:, :, 0], ctx.lead)


def compute_reading(square: Tensor, along: Tensor) -> tuple[Tensor, Tensor]:
    """-p and r, from z.z and z.v."""
    short = square < SHORTEST**2
    r = square.masked_fill(short, 1.0).rsqrt_()
    return (along * r**3).masked_fill_(short, 1.0).neg_(), r


def move_time_first(x: Tensor) -> Tensor:
    """[..., C, n] -> [C, G, n]"""
    return x.flatten(0, -3).transpose(0, 1)


def move_batch_first(x: Tensor, lead: tuple[int, ...]) -> Tensor:
    return x.transpose(0, 1).unflatten(0, lead)
