"""Causal attention over a row of key slots, all of them or the last few, through torch's scaled_dot_product_attention; rotary
positions; and packed sequences laid out as the rows of a rectangle.

There are S slots of keys. The last T belong to the T queries; slots in front come from a cache, and the first `padding` [N]
of a row may be empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.authoring import group_by_length, locate_tokens
from ..private_torch import constant_when_traced
from .rope_scaling import RopeScaling

__all__ = [
    "Rectangle",
    "causal_attention",
    "document_attention",
    "packed_attention",
    "ring_attention",
    "rotate",
    "rotation",
    "split_by_length",
    "takes_packed",
]

WIDEST_PACKED = 256  # channels per head of torch's attention over packed sequences


def split_by_length(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed sequences in groups of about the same length (up to twice the shortest), so that the rectangle of a group is mostly
    full. Yields the positions of a group's tokens in the row [tokens] and the group's own cu_seqlens."""
    lengths = cu_seqlens.diff()
    for group in group_by_length(lengths):
        yield locate_tokens(group, lengths), F.pad(lengths[group].cumsum(0), (1, 0))


class Rectangle:
    """N packed sequences of a row of T tokens as N rows of the longest one's length L, each filled up with zeros at its end. A
    traced graph knows no length as a Python number: there L is T.

    Attributes:
        lengths: [N], number of tokens of each row.
        width: L.
    """

    def __init__(self, cu_seqlens: Tensor, time: int) -> None:
        self.lengths, self._time = cu_seqlens.diff(), time
        self.width = time if torch.compiler.is_compiling() else int(self.lengths.max())
        place_L = torch.arange(self.width, device=cu_seqlens.device)
        token_NL = (cu_seqlens[:-1, None] + place_L).where(
            place_L < self.lengths[:, None], time
        )  # T where there is none
        self._token = token_NL.flatten().long()

    def lay_out(self, x_1T: Tensor) -> Tensor:
        """[1, T, ...] -> [N, L, ...]"""
        filled = torch.cat([x_1T[0], x_1T.new_zeros(1, *x_1T.shape[2:])])
        return filled.index_select(0, self._token).unflatten(0, (len(self.lengths), self.width))

    def pack(self, x_NL: Tensor) -> Tensor:
        """[N, L, ...] -> [1, T, ...]"""
        row = x_NL.new_zeros(self._time + 1, *x_NL.shape[2:]).index_copy(0, self._token, x_NL.flatten(0, 1))
        return row[None, : self._time]


def causal_attention(
    q_NTHK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, window: int | None = None, padding_N: Tensor | None = None
) -> Tensor:
    """o [N, T, H, K]. With a window each token sees that many slots, its own included; time and memory then grow with
    T * window instead of T * S. A window expects at most window - 1 slots in front of the queries'."""
    time, slots = q_NTHK.shape[1], k_NSHK.shape[1]
    if window is None or slots <= window:
        if time == slots and padding_N is None:
            return _attend(q_NTHK, k_NSHK, v_NSHK, causal=True)
        if time == 1 and padding_N is None:
            return _attend(q_NTHK, k_NSHK, v_NSHK)
        return _attend(q_NTHK, k_NSHK, v_NSHK, visible=_find_visible(q_NTHK, slots, None, padding_N))
    if time <= window:
        return _attend(q_NTHK, k_NSHK, v_NSHK, visible=_find_visible(q_NTHK, slots, window, padding_N))
    # The tokens after the first `window` ones see window slots each, none of them empty, wherever they stand.
    first = slots - time + window
    return torch.cat(
        [
            causal_attention(q_NTHK[:, :window], k_NSHK[:, :first], v_NSHK[:, :first], window, padding_N),
            _attend_full_windows(
                q_NTHK[:, window:], k_NSHK[:, first - window + 1 :], v_NSHK[:, first - window + 1 :], window
            ),
        ],
        1,
    )


def ring_attention(q_N1HK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, place_N: Tensor, padding_N: Tensor | None) -> Tensor:
    """o [N, 1, H, K] of one query per row over S slots that tokens fill in turn: slot p modulo S has token p, and the query's own
    is number `place`, the same in every row. The first `padding` tokens of a row are empty."""
    slot_S = torch.arange(k_NSHK.shape[1], device=q_N1HK.device)
    token_NS = place_N[:, None] - (place_N[:, None] - slot_S) % len(slot_S)
    first_N = torch.zeros_like(place_N) if padding_N is None else padding_N
    return _attend(q_N1HK, k_NSHK, v_NSHK, visible=(token_NS >= first_N[:, None])[:, None, None])


def takes_packed(q_1THK: Tensor, v_1THK: Tensor) -> bool:
    """Whether `packed_attention` is there for such tensors: in float16 or bfloat16 on a GPU from Ampere on."""
    width = q_1THK.shape[3]
    fits = q_1THK.is_cuda and q_1THK.dtype == v_1THK.dtype and width % 8 == 0 and width <= WIDEST_PACKED
    return fits and _has_packed(q_1THK.dtype, q_1THK.device)


@constant_when_traced
def _has_packed(dtype: torch.dtype, device: torch.device) -> bool:
    if dtype not in (torch.float16, torch.bfloat16) or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters  # the first version knew no windows


def packed_attention(q_1THK: Tensor, k_1THK: Tensor, v_1THK: Tensor, cu_seqlens: Tensor, window: int | None) -> Tensor:
    """o [1, T, H, K] of sequences packed into one row by torch's own kernel for them, which reads no length on the host."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds

    repeat = q_1THK.shape[2] // k_1THK.shape[2]
    if repeat > 1:
        k_1THK, v_1THK = (x.repeat_interleave(repeat, 2) for x in (k_1THK, v_1THK))
    edges, most = cu_seqlens.int(), q_1THK.shape[1]
    before = -1 if window is None else window - 1  # tokens that a token sees before itself
    o_THK: Any = varlen_attn(q_1THK[0], k_1THK[0], v_1THK[0], edges, edges, most, most, window_size=(before, 0))
    return o_THK[None]


def document_attention(
    q_BTHK: Tensor, k_BTHK: Tensor, v_BTHK: Tensor, cu_seqlens: Tensor, window: int | None
) -> Tensor:
    """o [1, T, H, K] of sequences packed into one row, masked in a square of T x T. Needs no length as a Python number:
    a traced graph has none."""
    token_T = torch.arange(q_BTHK.shape[1], device=q_BTHK.device)
    document_T = torch.bucketize(token_T, cu_seqlens, right=True)
    visible_TS = (document_T[:, None] == document_T) & _find_visible(q_BTHK, len(token_T), window, None)
    return _attend(q_BTHK, k_BTHK, v_BTHK, visible=visible_TS)


def _attend_full_windows(q_NTHK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, window: int) -> Tensor:
    """Each query sees exactly `window` slots, S = T + window - 1: blocks of `window` queries against 2 window - 1 slots."""
    time = q_NTHK.shape[1]
    blocks = -(-time // window)
    missing = blocks * window - time
    q_NTHK, k_NSHK, v_NSHK = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q_NTHK, k_NSHK, v_NSHK))
    q = q_NTHK.unflatten(1, (blocks, window)).flatten(0, 1)
    k, v = (x.unfold(1, 2 * window - 1, window).movedim(-1, 2).flatten(0, 1) for x in (k_NSHK, v_NSHK))
    o = _attend(q, k, v, visible=_find_visible(q, 2 * window - 1, window, None))
    return o.unflatten(0, (-1, blocks)).flatten(1, 2)[:, :time]


def _find_visible(q_NTHK: Tensor, slots: int, window: int | None, padding_N: Tensor | None) -> Tensor:
    """Which slots each query sees: bool [T, S] or [N, 1, T, S]."""
    time = q_NTHK.shape[1]
    slot_S = torch.arange(slots, device=q_NTHK.device)
    own_T1 = slot_S[slots - time :, None]
    visible = slot_S <= own_T1
    if window is not None:
        visible &= slot_S > own_T1 - window
    if padding_N is not None:
        visible = visible & (slot_S >= padding_N[:, None, None, None])
    return visible


def _attend(
    q_NTHK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, visible: Tensor | None = None, causal: bool = False
) -> Tensor:
    o_NHTK = F.scaled_dot_product_attention(
        q_NTHK.transpose(1, 2),
        k_NSHK.transpose(1, 2),
        v_NSHK.transpose(1, 2),
        attn_mask=visible,
        is_causal=causal,
        enable_gqa=k_NSHK.shape[2] != q_NTHK.shape[2],
    )
    return o_NHTK.transpose(1, 2)


def rotation(
    position: Tensor, channels: int, theta: float, dtype: torch.dtype, scaling: RopeScaling | None = None
) -> tuple[Tensor, Tensor]:
    """cos and sin [B or 1, T, 1, K/2] of rotary positions (RoFormer): the angle of a pair of channels grows with the position
    [B or 1, T], at theta^(-2i/K) per token for channel i, which is paired with channel i + K/2, or as a scaling says.

    The angles are computed at every call in float32: positions are exact up to 2^24.
    """
    half = channels // 2
    frequency = theta ** (-torch.arange(half, device=position.device, dtype=torch.float32) / half)
    if scaling is not None:
        frequency = scaling.scale_frequencies(frequency, theta)
    angle = (position[..., None].float() * frequency)[:, :, None]
    cos, sin = angle.cos(), angle.sin()
    if scaling is not None:
        cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
    return cos.to(dtype), sin.to(dtype)


def rotate(x_BTHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with its pairs of channels rotated by the angles of `rotation`."""
    a, b = x_BTHK.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
