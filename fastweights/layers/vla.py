"""Variational linear attention layer: a delta rule whose write direction an adaptive penalty bends."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.framework.run import BACKENDS
from ..ops.variational_linear_attention.memory import penalized_memory
from ._checks import check_choice, check_flag, check_input, check_number, check_positive, check_size
from .cache import LayerCache
from .heads import HeadSizes
from .initialization import OwnInitialValues, ResidualProjection
from .mixer import Mixer
from .norms import LayerNorm, l2_normalize
from .projections import QKVProjection

__all__ = ["VariationalLinearAttention"]


class PenaltyDirection(OwnInitialValues):
    """u = unit(W_u k) / sqrt(K), a matrix a q/k head: [B, T, H, K]."""

    def __init__(self, num_heads: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads, channels, channels))
        self.reset_parameters()

    def initial_values(self) -> dict[str, Tensor]:
        weight = torch.empty_like(self.weight, dtype=torch.float32)
        return {"weight": weight.normal_(std=weight.shape[-1] ** -0.5)}

    def forward(self, k_BTHK: Tensor) -> Tensor:
        direction = (k_BTHK[..., None, :] @ self.weight.to(k_BTHK.dtype)).squeeze(-2)
        return l2_normalize(direction) * k_BTHK.shape[-1] ** -0.5


class VariationalLinearAttention(Mixer):
    r"""A sequence mixer that writes along directions which an adaptive penalty bends towards what has been written little.

    $$A_t = (A_{t-1}^{-1} + u_t u_t^\top)^{-1}, \qquad \alpha_t = A_t \hat k_t / |A_t \hat k_t|, \qquad
      S_t = S_{t-1} + \alpha_t (v_t - S_{t-1}^\top \hat k_t)^\top, \qquad o_t = S_t^\top q_t / (z_t^\top q_t)$$

    with q and k = ELU + 1 of the raw ones, khat = k / |k|, u the unit direction of a projection of the raw key divided by
    sqrt(K), z the sum of the k, and $A_0 = I / \mathrm{ridge}$. The answers of all heads pass one LayerNorm and the output
    projection. Variational Linear Attention, section 3 and Algorithm 1, which has neither convolutions nor an activation
    (`conv_size` None, `activation` "none"); for what departs from its text see `fastweights.ops.variational_linear_attention`.

    Without normalisation the step is $I - \alpha_t k_t^\top$ with an eigenvalue $1 - \alpha_t \cdot k_t$: beyond 2 the memory
    grows without end, and at ridge 0.1 alpha . khat starts at 10. The paper finds NaN from 96 dimensions on (its tables 2 and
    4); a ridge of at least 1/2 keeps `normalize_writes` False alone within bounds.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: q/k heads H.
        head_dim: key channels K of a head; hidden_size / num_heads when None.
        expand_v: value channels V = expand_v * K.
        num_v_heads: value heads G, a multiple of H (each q/k head serves G/H of them); H when None.
        adaptive: whether A changes; otherwise it stays I / ridge, which is the delta rule with gain 1.
        ridge: penalty before the first token, positive.
        refresh_every: number of tokens between additions of `refresh` to A's diagonal, or None.
        refresh: what is added, at least 0.
        normalize_keys: whether khat has length 1; otherwise it is k.
        normalize_writes: whether alpha has length 1; otherwise it is A khat.
        conv_size: width of the short convolutions on q, k and v; None leaves them out.
        activation: after them, "silu" or "none".
        norm_eps: of the LayerNorm.
        backend: of the op.

    Raises:
        ValueError: an option that does not fit.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        expand_v: float = 1.0,
        num_v_heads: int | None = None,
        adaptive: bool = True,
        ridge: float = 0.1,
        refresh_every: int | None = 20,
        refresh: float = 1e-3,
        normalize_keys: bool = True,
        normalize_writes: bool = True,
        conv_size: int | None = 4,
        activation: str = "silu",
        norm_eps: float = 1e-5,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        heads = HeadSizes.choose(hidden_size, num_heads, head_dim, expand_v, num_v_heads)
        check_choice("backend", backend, BACKENDS)
        if refresh_every is not None:
            check_size("refresh_every", refresh_every)
        if check_number("refresh", refresh) < 0:
            raise ValueError(f"refresh must be at least 0, got {refresh}")
        self.hidden_size = hidden_size
        self.heads = heads
        self.refresh_every, self.refresh = refresh_every, refresh
        self.ridge = check_positive("ridge", ridge)
        self.normalize_keys = check_flag("normalize_keys", normalize_keys)
        self.normalize_writes = check_flag("normalize_writes", normalize_writes)
        self.backend = backend
        self.qkv = QKVProjection(hidden_size, heads, conv_size, activation, normalize_qk=False, backend=backend)
        self.penalty = PenaltyDirection(heads.key_heads, heads.key) if check_flag("adaptive", adaptive) else None
        self.norm = LayerNorm(heads.value_heads * heads.value, eps=check_positive("norm_eps", norm_eps))
        self.o_proj = ResidualProjection(heads.value_heads * heads.value, hidden_size)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        held = LayerCache() if cache is None else cache
        q_BTHK, k_BTHK, v_BTGV, windows = self.qkv(x_BTD, cache, cu_seqlens)
        o_BTGV, state = penalized_memory(
            F.elu(q_BTHK) + 1, F.elu(k_BTHK) + 1, v_BTGV,
            None if self.penalty is None else self.penalty(k_BTHK),
            ridge=self.ridge, refresh_every=self.refresh_every, refresh=self.refresh, eps=1e-4,
            normalize_keys=self.normalize_keys, normalize_writes=self.normalize_writes,
            initial_state=self._state(held), output_final_state=cache is not None, cu_seqlens=cu_seqlens,
            backend=self.backend,
        )  # fmt: skip
        if cache is not None and state is not None:
            cache.update({name: state.get(name) for name in "SAz"}, {**windows, "seen": state["count"]})
        return self.o_proj(self.norm(o_BTGV.flatten(2)))

    def _state(self, held: LayerCache) -> tuple[Tensor, ...] | None:
        """(S, A, z, number of tokens), without A where it does not change, as the cache holds them; None when empty."""
        names = [name for name in "SAz" if name in held.memory]
        return (*(held.memory[name] for name in names), held.context["seen"]) if names else None

    def state_size(self, length: int = 1) -> int:
        columns = self.heads.value + 1 + (0 if self.penalty is None else self.heads.key)
        return self.heads.value_heads * self.heads.key * columns
