"""Causal softmax attention: the baseline whose memory grows with the sequence, and the other half of hybrids."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ._checks import check_flag, check_input, check_positive, check_size
from .cache import LayerCache
from .heads import head_width
from .initialization import ResidualProjection
from .mixer import Mixer
from .norms import RMSNorm
from .packing import Rectangle
from .rotary import rotate

__all__ = ["SoftmaxAttention"]


class SoftmaxAttention(Mixer):
    r"""o_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s, through torch's scaled_dot_product_attention.

    Args:
        hidden_size: width D of the input and the output.
        num_heads: query heads H.
        head_dim: channels K of a head; hidden_size / num_heads when None.
        num_kv_heads: key and value heads, a divisor of num_heads (grouped-query attention); num_heads when None.
        rope_theta: base of the rotary position embedding; None for no positions.
        qk_norm: whether queries and keys pass an RMSNorm a head before the rotation.
        norm_eps: of that norm.

    Raises:
        ValueError: an option that does not fit.
    """

    def __init__(
        self,
        *,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        num_kv_heads: int | None = None,
        rope_theta: float | None = 10000.0,
        qk_norm: bool = False,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__()
        width = head_width(hidden_size, num_heads, head_dim)
        num_kv_heads = num_heads if num_kv_heads is None else check_size("num_kv_heads", num_kv_heads)
        if num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {num_heads}, got {num_kv_heads}")
        if rope_theta is not None:
            check_positive("rope_theta", rope_theta)
            if width % 2:
                raise ValueError(f"head_dim must be even for rotary positions, got {width}; pass rope_theta=None")
        check_positive("norm_eps", norm_eps)
        self.hidden_size = hidden_size
        self.head_dim = width
        self.num_kv_heads = num_kv_heads
        self.rope_theta = rope_theta
        self.q_proj = nn.Linear(hidden_size, num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden_size, num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden_size, num_kv_heads * width, bias=False)
        normed = check_flag("qk_norm", qk_norm)
        self.q_norm = RMSNorm(width, eps=norm_eps) if normed else nn.Identity()
        self.k_norm = RMSNorm(width, eps=norm_eps) if normed else nn.Identity()
        self.o_proj = ResidualProjection(num_heads * width, hidden_size)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(x_BTD, self.hidden_size, cache, cu_seqlens)
        q_BTHK = self.q_norm(self.q_proj(x_BTD).unflatten(2, (-1, self.head_dim)))
        k_BTHK = self.k_norm(self.k_proj(x_BTD).unflatten(2, (-1, self.head_dim)))
        v_BTHK = self.v_proj(x_BTD).unflatten(2, (-1, self.head_dim))
        if cu_seqlens is None:
            return self._project(self._attend(q_BTHK, k_BTHK, v_BTHK, None, cache))
        rectangle = Rectangle(cu_seqlens.to(x_BTD.device))
        q, k, v = (rectangle.lay_out(y) for y in (q_BTHK, k_BTHK, v_BTHK))
        return self._project(rectangle.pack(self._attend(q, k, v, rectangle.valid, cache)))

    def _project(self, o_BTHK: Tensor) -> Tensor:
        return self.o_proj(o_BTHK.flatten(2))

    def _attend(
        self, q_NTHK: Tensor, k_NTHK: Tensor, v_NTHK: Tensor, valid_NT: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """Answers [N, T, H, K] of rows whose tokens follow on the cache's. valid: which tokens are no padding, None for all;
        padding stands at the end of a row and its answers mean nothing."""
        held = LayerCache() if cache is None else cache
        past_keys, past_values = held.memory.get("keys"), held.memory.get("values")
        slots = 0 if past_keys is None else past_keys.shape[1]
        past_valid = held.context.get("valid")
        if self.rope_theta is not None:
            seen = slots if past_valid is None else past_valid.sum(1, keepdim=True)
            position = seen + torch.arange(q_NTHK.shape[1], device=q_NTHK.device)[None]
            q_NTHK = rotate(q_NTHK, position, self.rope_theta)
            k_NTHK = rotate(k_NTHK, position, self.rope_theta)
        if past_valid is not None or valid_NT is not None:
            present = q_NTHK.new_ones(q_NTHK.shape[0], slots + q_NTHK.shape[1], dtype=torch.bool)
            past_valid = present[:, :slots] if past_valid is None else past_valid
            valid_NT = torch.cat([past_valid, present[:, slots:] if valid_NT is None else valid_NT], 1)
        if past_keys is not None and past_values is not None:
            k_NTHK, v_NTHK = torch.cat([past_keys, k_NTHK], 1), torch.cat([past_values, v_NTHK], 1)
        if cache is not None:
            cache.memory = {"keys": k_NTHK, "values": v_NTHK}
            cache.context = {} if valid_NT is None else {"valid": valid_NT}
        o_NHTK = F.scaled_dot_product_attention(
            q_NTHK.transpose(1, 2),
            k_NTHK.transpose(1, 2),
            v_NTHK.transpose(1, 2),
            attn_mask=visible_slots(q_NTHK.shape[1], slots, valid_NT, q_NTHK.device) if slots else None,
            is_causal=slots == 0,  # padding at the end of a row is then out of sight of every token before it
            enable_gqa=k_NTHK.shape[2] != q_NTHK.shape[2],
        )
        return o_NHTK.transpose(1, 2)

    def state_size(self, length: int = 1) -> int:
        return 2 * length * self.num_kv_heads * self.head_dim


def visible_slots(time: int, past: int, valid_NS: Tensor | None, device: torch.device) -> Tensor | None:
    """Which of `past` + `time` slots each of the last `time` tokens sees: [T, S] or [N, 1, T, S], None for all of them.
    A token always sees its own slot, so that no row is empty."""
    if time == 1 and valid_NS is None:
        return None
    own = past + torch.arange(time, device=device)[:, None]
    slot = torch.arange(past + time, device=device)
    if valid_NS is None:
        return slot <= own
    return (slot <= own) & valid_NS[:, None, None] | (slot == own)
