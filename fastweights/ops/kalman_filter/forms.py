r"""The Kalman filter token by token, which is the specification, and chunk by chunk, exact, both in float64: the observations of
a chunk are jointly Gaussian, and one Cholesky factor of their covariance conditions on every prefix of them.

Given the memory's mean S and covariance P at a chunk's start, without any observation the memory at token i would have the
covariance  exp(G_i) P exp(G_i) + Diag(N_i)  with the noise N_i = exp(2 g_i) N_{i-1} + process_noise_i  that has come in since,
and exp(G_i - G_j) times that of token j <= i with token j. Rows as tokens, G the summed log decay, W = K exp(G), and a lower
triangle of what the noise gives to the covariances of a key and of a query with the observations:
    F = tril((K exp(G)) ((N K) exp(-G))^T)        B = tril((Q exp(G)) ((N K) exp(-G))^T)
    L = cholesky(W P W^T + F + F^T - diag F + Diag(noise))
    E = L^-1 (V - W S)                      innovations, whitened: row i knows of rows up to i alone
    Z = L^-1 (W P exp(G_last) + N K exp(G_last - G))
    O = Q exp(G) S + tril(tril(Q exp(G) P W^T + B) L^-T) E
    S_next = exp(G_last) S + Z^T E          P_next = exp(G_last) P exp(G_last) + Diag(N_last) - Z^T Z
The leading blocks of L are the factors of all prefixes, so tril conditions row i on rows up to i. Only the lines with P and S are
computed one chunk after another.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..framework.call import stack_time
from ..framework.sequences import Chunks, Sequences
from ..shared.decay import make_decay

CHUNK = 64
LEAST_NOISE = 1e-6


def per_channel(x: Tensor) -> Tensor:
    """Numbers per head [B, H] or per channel [B, H, K] as what multiplies the rows of [B, H, K, ...]."""
    return x[..., None, None] if x.ndim == 2 else x[..., None]


def reference(
    q: Tensor, k: Tensor, v: Tensor, noise: Tensor, process_noise: Tensor | None, g: Tensor | None, S: Tensor, P: Tensor
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """q (scaled), k [B,T,H,K]; v [B,T,H,V]; noise [B,T,H]; process_noise, g None, [B,T,H] or [B,T,H,K]; S [B,H,K,V];
    P [B,H,K,K]."""
    dtype, identity = v.dtype, torch.eye(k.shape[3], dtype=torch.float64, device=k.device)
    q, k, v, noise, S, P = (x.double() for x in (q, k, v, noise.clamp_min(LEAST_NOISE), S, P))
    outputs = []
    for t in range(v.shape[1]):
        if g is not None:
            decay = per_channel(g[:, t].double().exp())
            S, P = decay * S, decay * P * decay.mT
        if process_noise is not None:
            P = P + per_channel(process_noise[:, t].double()) * identity
        Pk = torch.einsum("bhij,bhj->bhi", P, k[:, t])
        innovation = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        gain = Pk / ((k[:, t] * Pk).sum(-1) + noise[:, t])[..., None]
        S = S + gain[..., None] * innovation[:, :, None, :]
        P = P - gain[..., None] * Pk[:, :, None, :]
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return stack_time(outputs, v).to(dtype), (S.to(dtype), P.to(dtype))


def chunked(
    q: Tensor, k: Tensor, v: Tensor, noise: Tensor, process_noise: Tensor | None, g: Tensor | None, S: Tensor, P: Tensor,
    sequences: Sequences,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:  # fmt: skip
    chunks, dtype = Chunks(sequences, CHUNK, v.device), v.dtype
    Q, K, V, measured = (chunks.split(x.double()) for x in (q, k, v, noise))
    g = None if g is None else chunks.split(g.double())
    decay = make_decay(g, len(V))
    gathered = (
        torch.zeros_like(K) if process_noise is None else gather_noise(chunks.split(process_noise.double()), g, K)
    )
    spread = gathered * K
    of_keys, of_queries = decay.scores(spread, K, Q)
    covariance = of_keys + of_keys.tril(-1).mT + torch.diag_embed(measured.clamp_min(LEAST_NOISE))
    answers: list[Tensor] = []

    def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        S, P = states
        keys, queries, values, covariance, of_queries, spread, kept, added = parts
        reads = keys @ P
        L = torch.linalg.cholesky(covariance + reads @ keys.mT)
        scores = (queries @ reads.mT + of_queries).tril()
        rows = torch.cat([values - keys @ S, reads * kept.mT + spread, scores.mT], -1)
        E, Z, weights = torch.linalg.solve_triangular(L, rows, upper=False).split(
            [V.shape[3], K.shape[3], K.shape[2]], -1
        )
        answers.append(queries @ S + weights.mT.tril() @ E)
        return kept * S + Z.mT @ E, kept * P * kept.mT + torch.diag_embed(added) - Z.mT @ Z

    _, (S, P) = chunks.scan(
        step, (S.double(), P.double()), decay.carry_from_start(K), decay.carry_from_start(Q), V, covariance, of_queries,
        decay.carry_to_end(spread), decay.across(V).expand(-1, K.shape[1], K.shape[3], 1), gathered[:, :, -1],
    )  # fmt: skip
    o = torch.cat(answers) if answers else V
    return chunks.merge(o).to(dtype), (S.to(dtype), P.to(dtype))


def gather_noise(added: Tensor, g: Tensor | None, like: Tensor) -> Tensor:
    """N_i = exp(2 g_i) N_{i-1} + added_i [M, H, C, K], in log2(C) steps, in which sums of w tokens become sums of 2w."""
    total = (added if added.ndim == 4 else added[..., None]).expand_as(like)
    if g is None:
        return total.cumsum(2)
    kept = (2 * (g if g.ndim == 4 else g[..., None])).exp()
    width = 1
    while width < total.shape[2]:
        earlier, before = (F.pad(x[:, :, :-width], (0, 0, width, 0)) for x in (total, kept))
        total, kept = total + kept * earlier, kept * before
        width *= 2
    return total
