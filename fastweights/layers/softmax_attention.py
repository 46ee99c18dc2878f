"""Causal softmax attention: the baseline whose memory grows with the sequence, also for layers of hybrid models."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checks import check_flag, check_positive, check_size
from ..ops.authoring import on_heads, takes_ring, token_positions
from ..ops.authoring import ring_attention as fused_ring_attention
from .attention import (
    Rectangle,
    attend_documents,
    causal_attention,
    lengths_are_unread,
    ring_attention,
    rotate,
    rotation,
    slot_attention,
)
from .cache import LayerCache, check_memory
from .heads import head_width
from .initialization import ResidualProjection
from .mixer import ConfiguredMixer, check_input
from .norms import RMSNorm
from .options import LONGEST_CONVOLUTION, MixerOptions, one_of, option, up_to
from .projections import ACTIVATIONS, FIRST_FILTERS, ShortConvolution, convolve_together
from .registry import register_mixer
from .rope_scaling import RopeScaling, check_scaling
from .shared_input import InputProducts, plain_products, project_together

__all__ = ["SoftmaxAttention", "SoftmaxAttentionOptions"]


@dataclass(frozen=True, kw_only=True)
class SoftmaxAttentionOptions(MixerOptions):
    """Options of `SoftmaxAttention`, whose docstring explains them."""

    num_kv_heads: int | None = option(None, check_size)
    rope_theta: float | None = option(10000.0, check_positive, or_none=True)
    rope_scaling: RopeScaling | None = option(None, check_scaling)
    window: int | None = option(None, check_size)
    qk_norm: bool = option(False, check_flag)
    norm_eps: float = option(1e-6, check_positive)
    conv_size: int | None = option(None, up_to(LONGEST_CONVOLUTION))
    conv_init: str = option("uniform", one_of(*FIRST_FILTERS))
    activation: str = option("none", one_of(*ACTIVATIONS))

    def check_together(self) -> None:
        width = head_width(self.hidden_size, self.num_heads, self.head_dim)
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads, {self.num_heads}, got {self.num_kv_heads}")
        if self.rope_theta is not None and width % 2:
            raise ValueError(f"head_dim must be even for rotary positions, got {width}; pass rope_theta=None")
        if self.rope_theta is None and self.rope_scaling is not None:
            raise ValueError("rope_scaling must be None without rotary positions; leave it out, or give rope_theta")


@register_mixer(
    "softmax",
    summary="causal softmax attention with rotary positions",
    equation="o_t = sum_s softmax_s(q_t.k_s / sqrt K) v_s",
    source="Vaswani et al. 2017; rotary positions: Su et al. 2021",
    state="2 T H K after T tokens",
    cost="2 T H K after T tokens",
)
class SoftmaxAttention(ConfiguredMixer):
    r"""o_t = sum_{s <= t} softmax_s(q_t . k_s / sqrt(K)) v_s, the sum over all earlier tokens or, with
    a window, over the last few.

    Args:
        num_kv_heads: key and value heads, a divisor of num_heads (grouped-query attention); num_heads when None.
        rope_theta: base of the rotary position embedding; None for no positions.
        rope_scaling: for longer contexts, a table with the fields of `fastweights.layers.rope_scaling.RopeScaling`, such as
            {"rope_type": "yarn", "factor": 32, "original_max_position_embeddings": 4096}; None for none.
        window: how many tokens each token attends to, itself included (sliding window; the cache then holds window - 1 of
            them); None for all tokens before it.
        qk_norm: whether queries and keys pass one RMSNorm per head before the rotation.
        norm_eps: number added in that norm, positive.
        conv_size: width of short convolutions on q, k and v, as the memory layers have them; None, the default, for none.
        conv_init: first filters, "uniform" or "normal".
        activation: function after the convolutions, "silu" or, the default, "none".

    The other options are those of `MixerOptions`; num_heads counts the query heads.
    """

    Options = SoftmaxAttentionOptions
    serves_context_parallel = True
    options: SoftmaxAttentionOptions
    probes = {"q": "", "k": "", "v": "", "o": ""}  # the state grows with every token
    head_counts = ("num_heads", "num_kv_heads")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        settings, hidden_size = self.options, self.hidden_size
        num_heads = settings.num_heads
        width = self.head_dim = head_width(hidden_size, num_heads, settings.head_dim)
        self.num_kv_heads = num_heads if settings.num_kv_heads is None else settings.num_kv_heads
        self.rope_theta = settings.rope_theta
        self.rope_scaling = settings.rope_scaling
        self.window = settings.window
        self.q_proj = nn.Linear(hidden_size, num_heads * width, bias=False)
        self.k_proj = nn.Linear(hidden_size, self.num_kv_heads * width, bias=False)
        self.v_proj = nn.Linear(hidden_size, self.num_kv_heads * width, bias=False)
        self.q_norm = RMSNorm(width, eps=settings.norm_eps) if settings.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(width, eps=settings.norm_eps) if settings.qk_norm else nn.Identity()
        if settings.conv_size is not None:
            for part in "qkv":
                channels = self.get_submodule(f"{part}_proj").out_features
                filters = ShortConvolution(channels, settings.conv_size, first_filters=settings.conv_init)  # type: ignore[arg-type]
                self.add_module(f"{part}_conv", filters)
        self.o_proj = ResidualProjection(num_heads * width, hidden_size)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        check_input(self, x_BTD, cache, cu_seqlens)
        return self.mix_projected(
            x_BTD, project_together(x_BTD, self.q_proj, self.k_proj, self.v_proj), cache, cu_seqlens
        )

    def input_products(self) -> InputProducts:
        return plain_products(self.q_proj, self.k_proj, self.v_proj)

    def mix_projected(
        self, x_BTD: Tensor, flat: list[Tensor], cache: LayerCache | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """What `forward` does after the projections of q, k and v [B, T, channels], which another module may have made. x_BTD is
        not looked at."""
        flat, windows = self._convolve(flat, cache, cu_seqlens)
        q_BTHK, k_BTHK, v_BTHK = (y.unflatten(2, (-1, self.head_dim)) for y in flat)
        q_BTHK, k_BTHK = self.q_norm(q_BTHK), self.k_norm(k_BTHK)
        self.probe(q=q_BTHK, k=k_BTHK, v=v_BTHK)
        answer = partial(self._answer, cu_seqlens=cu_seqlens, cache=cache)
        o_BTHK = on_heads(answer, q_BTHK, k_BTHK, v_BTHK, cp_group=self.cp_group)
        self.probe(o=o_BTHK)
        if cache is not None:
            cache.context = {**cache.context, **windows}
        return self.o_proj(o_BTHK.flatten(2))

    def _convolve(
        self, flat: list[Tensor], cache: LayerCache | None, cu_seqlens: Tensor | None
    ) -> tuple[list[Tensor], dict[str, Tensor]]:
        """q, k and v after convolution and activation, and with a cache the last inputs of each convolution by name."""
        activation = ACTIVATIONS[self.options.activation]
        if self.options.conv_size is None:
            return [F.silu(y) for y in flat] if activation else flat, {}
        before = {} if cache is None else cache.context
        flat, states = convolve_together(
            [self.get_submodule(f"{part}_conv") for part in "qkv"], flat, [before.get(part) for part in "qkv"], cu_seqlens,
            norms=[None] * 3, activation=activation, keep=cache is not None, backend="auto", cp_group=self.cp_group,
        )  # fmt: skip
        return flat, {part: state for part, state in zip("qkv", states, strict=True) if state is not None}

    def _answer(
        self,
        q_BTHK: Tensor,
        k_BTHK: Tensor,
        v_BTHK: Tensor,
        cu_seqlens: Tensor | None,
        cache: LayerCache | None,
    ) -> Tensor:
        """Answers [B, T, H, K] of all heads or of some."""
        if cu_seqlens is None:
            return self._attend(q_BTHK, k_BTHK, v_BTHK, None, cache)
        cu_seqlens = cu_seqlens.to(q_BTHK.device)
        if cache is None or (lengths_are_unread() and not cache.memory):
            return self._attend_documents(q_BTHK, k_BTHK, v_BTHK, cu_seqlens, cache)
        return self._attend_packed(q_BTHK, k_BTHK, v_BTHK, cu_seqlens, cache)

    def _attend_documents(
        self, q_1THK: Tensor, k_1THK: Tensor, v_1THK: Tensor, cu_seqlens: Tensor, cache: LayerCache | None
    ) -> Tensor:
        """Answers [1, T, H, K] of whole sequences packed into one row; a cache only where their lengths are not read."""
        q_1THK, k_1THK = self._rotate(q_1THK, k_1THK, cu_seqlens=cu_seqlens)
        if cache is not None:
            rectangle = Rectangle(cu_seqlens, k_1THK.shape[1])
            k, v = (rectangle.lay_out(y) for y in (k_1THK, v_1THK))
            self._update_cache(cache, k, v, rectangle.width, rectangle.lengths)
        return attend_documents(q_1THK, k_1THK, v_1THK, cu_seqlens, self.window)

    def _attend_packed(
        self, q_1THK: Tensor, k_1THK: Tensor, v_1THK: Tensor, cu_seqlens: Tensor, cache: LayerCache | None
    ) -> Tensor:
        rectangle = Rectangle(cu_seqlens, q_1THK.shape[1])
        q, k, v = (rectangle.lay_out(y) for y in (q_1THK, k_1THK, v_1THK))
        return rectangle.pack(self._attend(q, k, v, rectangle.lengths, cache))

    def _rotate(
        self, q_NTHK: Tensor, k_NTHK: Tensor, seen_N: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys rotated by their positions, which begin after the tokens seen, or with cu_seqlens at the start of each
        sequence. Not at the start of the row: cosines and sines are rounded, so the bits of a sequence would depend on its
        place."""
        if self.rope_theta is None:
            return q_NTHK, k_NTHK
        time, before_N = q_NTHK.shape[1], seen_N if cu_seqlens is None else torch.zeros_like(cu_seqlens[1:])
        position = (
            torch.arange(time, device=q_NTHK.device)[None]
            if before_N is None
            else token_positions(time, before_N, cu_seqlens)
        )
        cos, sin = rotation(position, self.head_dim, self.rope_theta, q_NTHK.dtype, self.rope_scaling)
        return rotate(q_NTHK, cos, sin), rotate(k_NTHK, cos, sin)

    def _attend(
        self, q_NTHK: Tensor, k_NTHK: Tensor, v_NTHK: Tensor, lengths_N: Tensor | None, cache: LayerCache | None
    ) -> Tensor:
        """Answers [N, T, H, K] of rows whose tokens follow those of the cache. lengths: tokens of each row, None for T. Slots
        after the tokens of a row are padding, which no token attends to; their outputs mean nothing."""
        before = LayerCache() if cache is None else cache
        if cache is not None and "place" in cache.context:
            return self._attend_in_ring(q_NTHK, k_NTHK, v_NTHK, cache)
        if cache is not None and "filled" in cache.context:
            return self._attend_in_slots(q_NTHK, k_NTHK, v_NTHK, lengths_N, cache)
        q_NTHK, k_NSHK = self._rotate(q_NTHK, k_NTHK, before.context.get("seen"))
        v_NSHK = v_NTHK
        check_memory(before.memory, ("keys", "values"))
        if before.memory:
            k_NSHK = torch.cat([before.memory["keys"], k_NSHK], 1)
            v_NSHK = torch.cat([before.memory["values"], v_NSHK], 1)
        o_NTHK = causal_attention(q_NTHK, k_NSHK, v_NSHK, self.window, before.context.get("padding"))
        if cache is not None:
            self._update_cache(cache, k_NSHK, v_NSHK, q_NTHK.shape[1], lengths_N)
        return o_NTHK

    def _update_cache(
        self, cache: LayerCache, k_NSHK: Tensor, v_NSHK: Tensor, time: int, lengths_N: Tensor | None
    ) -> None:
        """Bring the cache up to date. Its rows are aligned at the right, so that new tokens follow directly: `seen` [N] says
        how many tokens each row has read, `padding` [N], once rows differ in length, how many of its first slots are empty."""
        context = {"seen": k_NSHK.new_full((len(k_NSHK),), time, dtype=torch.long) if lengths_N is None else lengths_N}
        if "seen" in cache.context:
            context["seen"] = context["seen"] + cache.context["seen"]
        padding_N = cache.context.get("padding")
        slots = k_NSHK.shape[1]
        if lengths_N is not None:
            gap_N = time - lengths_N
            padding_N = gap_N if padding_N is None else padding_N + gap_N
            row = torch.arange(len(k_NSHK), device=k_NSHK.device)[:, None]
            slot = (torch.arange(slots, device=k_NSHK.device) - gap_N[:, None]).clamp_min(0)
            k_NSHK, v_NSHK = k_NSHK[row, slot], v_NSHK[row, slot]
        if self.window is not None and slots >= self.window:
            dropped = slots - self.window + 1
            k_NSHK, v_NSHK = k_NSHK[:, dropped:].clone(), v_NSHK[:, dropped:].clone()  # a view would keep them all
            padding_N = None if padding_N is None else (padding_N - dropped).clamp_min(0)
        if padding_N is not None:
            context["padding"] = padding_N
        cache.memory, cache.context = {"keys": k_NSHK, "values": v_NSHK}, context

    def _attend_in_ring(self, q_N1HK: Tensor, k_N1HK: Tensor, v_N1HK: Tensor, cache: LayerCache) -> Tensor:
        """Answers [N, 1, H, K] of one token more, which takes the place of the oldest in the slots of a fixed cache."""
        seen_N, place_N = (cache.context[name] for name in ("seen", "place"))
        k_NSHK, v_NSHK = (cache.memory[name] for name in ("keys", "values"))
        if self.rope_scaling is None and takes_ring(q_N1HK, k_N1HK, v_N1HK, k_NSHK, v_NSHK):
            o_N1HK, seen_N, place_N = fused_ring_attention(
                q_N1HK, k_N1HK, v_N1HK, k_NSHK, v_NSHK, seen_N, place_N, cache.context.get("padding"), self.rope_theta
            )
            cache.update(cache.memory, {**cache.context, "seen": seen_N, "place": place_N})
            return o_N1HK
        q_N1HK, k_N1HK = self._rotate(q_N1HK, k_N1HK, seen_N)
        slot = place_N[:1] % k_NSHK.shape[1]
        k_NSHK.index_copy_(1, slot, k_N1HK.to(k_NSHK.dtype))
        v_NSHK.index_copy_(1, slot, v_N1HK.to(v_NSHK.dtype))
        o_N1HK = ring_attention(q_N1HK, k_NSHK, v_NSHK, place_N, cache.context.get("padding"))
        cache.update(cache.memory, {**cache.context, "seen": seen_N + 1, "place": place_N + 1})
        return o_N1HK

    def _attend_in_slots(
        self, q_NTHK: Tensor, k_NTHK: Tensor, v_NTHK: Tensor, lengths_N: Tensor | None, cache: LayerCache
    ) -> Tensor:
        """Answers [N, T, H, K] of tokens that fill the next slots of a slotted cache. Tokens beyond the lengths fill slots, too,
        into which later calls write again."""
        seen_N, filled_N = (cache.context[name] for name in ("seen", "filled"))
        q_NTHK, k_NTHK = self._rotate(q_NTHK, k_NTHK, seen_N)
        slot_NT = filled_N[:, None] + torch.arange(k_NTHK.shape[1], device=k_NTHK.device)
        row_N1 = torch.arange(len(k_NTHK), device=k_NTHK.device)[:, None]
        new = {"keys": k_NTHK, "values": v_NTHK}
        memory = {name: x.index_put((row_N1, slot_NT), new[name].to(x.dtype)) for name, x in cache.memory.items()}
        o_NTHK = slot_attention(
            q_NTHK, memory["keys"], memory["values"], slot_NT, self.window, cache.context.get("padding")
        )
        added: Tensor | int = k_NTHK.shape[1] if lengths_N is None else lengths_N
        cache.update(memory, {**cache.context, "seen": seen_N + added, "filled": filled_N + added})
        return o_NTHK

    def slotted_cache(self, cache: LayerCache, slots: int) -> LayerCache | None:
        """Slots for all tokens, also with a window. `filled` [1] counts those that have tokens."""
        if not cache.memory or cache.memory["keys"].shape[1] == slots and "filled" in cache.context:
            return cache
        cache = self.free_cache(cache)
        held = cache.memory["keys"].shape[1]
        memory = {name: F.pad(x, (0, 0, 0, 0, 0, slots - held)) for name, x in cache.memory.items()}
        return LayerCache(memory, {**cache.context, "filled": torch.full_like(cache.context["seen"], held)})

    def cache_of_first(self, cache: LayerCache, count: int, tokens: int, same_length: bool) -> LayerCache:
        """The slots that no row needs are left out."""
        slots = cache.memory["keys"].shape[1]
        empty = slots - min(slots, tokens)
        memory = {name: x[:count, empty:].clone() for name, x in cache.memory.items()}
        context = {name: x[:count].clone() for name, x in cache.context.items()}
        if same_length:
            context.pop("padding", None)
        elif "padding" in context:
            context["padding"] = (context["padding"] - empty).clamp_min(0)
        return LayerCache(memory, context)

    def fixed_cache(self, cache: LayerCache, tokens: int) -> LayerCache:
        """Slots for all tokens to come, or as many as a window has. `place` [N] counts the tokens that went into the slots,
        padding included; token number p is in slot p modulo their number."""
        fixed = super().fixed_cache(LayerCache(context=cache.context), tokens)
        held = cache.memory["keys"].shape[1]
        slots = held + tokens if self.window is None else min(held + tokens, self.window)
        for name, x_NSHK in cache.memory.items():
            fixed.memory[name] = x_NSHK.new_zeros(len(x_NSHK), slots, *x_NSHK.shape[2:])
            fixed.memory[name][:, :held] = x_NSHK
        fixed.context["place"] = torch.full_like(fixed.context["seen"], held)
        return fixed

    def refill_cache(self, kept: LayerCache, fixed: LayerCache) -> bool:
        """Slots that stay empty are not seen, so that `kept` may have more of them; they are zero, as weights of zero times what
        another call left there might be NaN. A window's ring turns at its last slot."""
        slots, more = (cache.memory["keys"].shape[1] for cache in (fixed, kept))
        if slots == more or slots > more or slots == self.window:
            return super().refill_cache(kept, fixed)
        for x in kept.memory.values():
            x[:, slots:].zero_()
        first = LayerCache({name: x[:, :slots] for name, x in kept.memory.items()}, kept.context, fixed=True)
        return super().refill_cache(first, fixed)

    def free_cache(self, cache: LayerCache) -> LayerCache:
        context = dict(cache.context)
        if "filled" in context:
            place = int(context.pop("filled")[0])
            first = 0 if self.window is None else max(0, place - self.window + 1)
            if "padding" in context:
                context["padding"] = (context["padding"] - first).clamp_min(0)
            held = {name: x[:, first:place] for name, x in cache.memory.items()}
            if self.window is not None:  # a view would keep all slots
                held = {name: x.clone() for name, x in held.items()}
            return LayerCache(held, context)
        if "place" not in context:
            return cache
        place, slots = int(context.pop("place")[0]), cache.memory["keys"].shape[1]
        kept = min(place, slots if self.window is None else self.window - 1)
        slot = torch.arange(place - kept, place, device=cache.memory["keys"].device) % slots
        if "padding" in context:
            context["padding"] = (context["padding"] - (place - kept)).clamp_min(0)
        return LayerCache({name: x[:, slot] for name, x in cache.memory.items()}, context)

    def state_size(self, length: int = 1) -> int:
        slots = length if self.window is None else min(length, self.window - 1)
        return 2 * slots * self.num_kv_heads * self.head_dim
