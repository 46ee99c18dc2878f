"""Products of the transitions of delta rules, and bounds on their norms. All [B, T, ...], float64."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["log_norms", "penalties", "penalty_bound", "preconditioner_bound"]


def log_norms(write: Tensor, read: Tensor, decay: Tensor | None = None) -> Tensor:
    """log |J_t ... J_1|_2 with J_t = (I - write_t read_t^T) Diag(decay_t), [B, T]."""
    B, T, K = read.shape
    product = torch.eye(K, dtype=read.dtype, device=read.device).repeat(B, 1, 1)
    scale, found = read.new_zeros(B), []
    for t in range(T):
        if decay is not None:
            product = decay[:, t, :, None] * product
        product = product - write[:, t, :, None] * (read[:, t, None, :] @ product)
        norm = torch.linalg.matrix_norm(product, ord=2)
        product = product / norm[:, None, None]
        scale = scale + norm.log()
        found.append(scale)
    return torch.stack(found, 1)


def preconditioner_bound(factors: Tensor, keys: Tensor, beta: Tensor, decay: Tensor | None = None) -> Tensor:
    r"""A bound on `log_norms` for J_t = (I - beta_t D_t k_t k_t^T) Diag(decay_t), D_t = Diag(factors_t), [B, T].

    In the norm $|x|_t^2 = x^\top D_t^{-1} x$ a step is symmetric, with eigenvalues 1 and $1 - \beta_t k_t^\top D_t k_t$, and a
    diagonal decay is at most its largest element. The next step has another norm: it is larger by at most
    $\max_i (d_{t,i} / d_{t+1,i})^{1/2}$."""
    logs = factors.log()
    step = (1 - beta * (factors * keys.square()).sum(-1)).abs().clamp_min(1).log()
    if decay is not None:
        step = step + decay.amax(-1).log()
    change = (logs[:, :-1] - logs[:, 1:]).amax(-1)
    changes = torch.cat([torch.zeros_like(step[:, :1]), change.cumsum(1)], 1)
    ends = logs.amax(-1) - logs[:, :1].amin(-1)
    return (ends + changes) / 2 + step.cumsum(1)


def penalties(u: Tensor, ridge: float, refresh: float = 0.0, refresh_every: int | None = None) -> tuple[Tensor, Tensor]:
    """A_t = (A_(t-1)^-1 + u_t u_t^T)^-1, with `refresh` I added after every `refresh_every` tokens, [B, T, K, K]; and
    u_t^T A_(t-1) u_t, [B, T]."""
    B, T, K = u.shape
    identity = torch.eye(K, dtype=u.dtype, device=u.device)
    A = (identity / ridge).repeat(B, 1, 1)
    found, growth = [], []
    for t in range(T):
        Au = (A @ u[:, t, :, None]).squeeze(-1)
        growth.append((u[:, t] * Au).sum(-1))
        A = A - Au[:, :, None] * Au[:, None, :] / (1 + growth[-1])[:, None, None]
        if refresh_every and (t + 1) % refresh_every == 0:
            A = A + refresh * identity
        found.append(A)
    return torch.stack(found, 1), torch.stack(growth, 1)


def penalty_bound(A: Tensor, growth: Tensor, ridge: float) -> Tensor:
    r"""A bound on `log_norms` for J_t = I - alpha_t k_t^T with unit k_t and alpha_t = A_t k_t / |A_t k_t|, [B, T].

    In the norm $|x|_t^2 = x^\top A_t^{-1} x$ a step is symmetric, with eigenvalues 1 and
    $1 - k_t^\top A_t k_t / |A_t k_t|$, which is in [0, 1]. The next norm is larger by at most $(1 + u^\top A_t u)^{1/2}$, and a
    refresh makes it smaller."""
    largest = torch.linalg.eigvalsh(A)[..., -1]
    return ((ridge * largest).log() + torch.log1p(growth).cumsum(1)) / 2
