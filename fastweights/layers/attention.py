"""Causal attention over a row of key slots, all of them or the last few, through torch's scaled_dot_product_attention; rotary
positions; and packed sequences laid out as the rows of a rectangle.

There are S slots of keys. The last T belong to the T queries; slots in front come from a cache, and the first `padding` [N]
of a row may be empty.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.authoring import group_by_length, locate_tokens
from ..private_torch import constant_when_traced
from .rope_scaling import RopeScaling

__all__ = [
    "Logits",
    "Rectangle",
    "attend_documents",
    "causal_attention",
    "lengths_are_unread",
    "ring_attention",
    "rotate",
    "rotation",
    "slot_attention",
    "split_by_length",
    "takes_packed",
    "unread_lengths",
]

WIDEST_PACKED = 256  # channels per head of torch's attention over packed sequences


class Logits(NamedTuple):
    """How attention makes logits of q . k: scale q . k, and with a softcap c, c tanh(scale q . k / c) (Gemma 2).

    Attributes:
        scale: None for 1 / sqrt(K).
    """

    scale: float | None = None
    softcap: float | None = None


USUAL = Logits()


_longest: ContextVar[int | None] = ContextVar("longest", default=None)


@contextmanager
def unread_lengths(longest: int) -> Iterator[None]:
    """In the body no length of a packed sequence is read on the host, which would wait for a GPU. All sequences but the last one
    have at most `longest` tokens. The last one is padding, whose cache means nothing."""
    token = _longest.set(longest)
    try:
        yield
    finally:
        _longest.reset(token)


def lengths_are_unread() -> bool:
    """Whether lengths must not become Python numbers: in a traced graph, and in the body of `unread_lengths`."""
    return torch.compiler.is_compiling() or _longest.get() is not None


def split_by_length(cu_seqlens: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Packed sequences in groups of about the same length (up to twice the shortest), so that the rectangle of a group is mostly
    full. Yields the positions of a group's tokens in the row [tokens] and the group's own cu_seqlens."""
    lengths = cu_seqlens.diff()
    for group in group_by_length(lengths):
        yield locate_tokens(group, lengths), F.pad(lengths[group].cumsum(0), (1, 0))


class Rectangle:
    """N packed sequences of a row of T tokens as N rows of the longest one's length L, each filled up with zeros at its end.
    Where no length becomes a Python number, L is T in a traced graph, and the bound of `unread_lengths` in its body, to which
    padding is cut.

    Attributes:
        lengths: [N], number of tokens of each row.
        width: L.
    """

    def __init__(self, cu_seqlens: Tensor, time: int) -> None:
        self.lengths, self._time = cu_seqlens.diff(), time
        if torch.compiler.is_compiling():
            self.width = time
        elif (longest := _longest.get()) is not None:
            self.width = min(longest, time)
            self.lengths = self.lengths.clamp_max(self.width)
        else:
            self.width = int(self.lengths.max())
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
    q_NTHK: Tensor,
    k_NSHK: Tensor,
    v_NSHK: Tensor,
    window: int | None = None,
    padding_N: Tensor | None = None,
    logits: Logits = USUAL,
) -> Tensor:
    """o [N, T, H, K]. With a window each token sees that many slots, its own included; time and memory then grow with
    T * window instead of T * S. A window expects at most window - 1 slots in front of the queries'."""
    time, slots = q_NTHK.shape[1], k_NSHK.shape[1]
    if window is None or slots <= window:
        if time == slots and padding_N is None:
            return _attend(q_NTHK, k_NSHK, v_NSHK, causal=True, logits=logits)
        if time == 1 and padding_N is None:
            return _attend(q_NTHK, k_NSHK, v_NSHK, logits=logits)
        visible = _find_visible(q_NTHK, slots, None, padding_N)
        return _attend(q_NTHK, k_NSHK, v_NSHK, visible, logits=logits)
    if time <= window:
        return _attend(q_NTHK, k_NSHK, v_NSHK, _find_visible(q_NTHK, slots, window, padding_N), logits=logits)
    # The tokens after the first `window` ones see window slots each, none of them empty, wherever they stand.
    first = slots - time + window
    return torch.cat(
        [
            causal_attention(q_NTHK[:, :window], k_NSHK[:, :first], v_NSHK[:, :first], window, padding_N, logits),
            _attend_full_windows(
                q_NTHK[:, window:], k_NSHK[:, first - window + 1 :], v_NSHK[:, first - window + 1 :], window, logits
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


def slot_attention(
    q_NTHK: Tensor,
    k_NSHK: Tensor,
    v_NSHK: Tensor,
    slot_NT: Tensor,
    window: int | None,
    padding_N: Tensor | None,
) -> Tensor:
    """o [N, T, H, K] of queries whose own tokens are in the slots `slot_NT`. A query sees the slots up to its own, with a window
    the last so many of them, but for the first `padding` ones."""
    slot_S = torch.arange(k_NSHK.shape[1], device=q_NTHK.device)
    visible_NTS = slot_S <= slot_NT[..., None]
    if window is not None:
        visible_NTS &= slot_S > slot_NT[..., None] - window
    if padding_N is not None:
        visible_NTS &= slot_S >= padding_N[:, None, None]
    return _attend(q_NTHK, k_NSHK, v_NSHK, visible_NTS[:, None])


def attend_documents(
    q_1THK: Tensor,
    k_1THK: Tensor,
    v_1THK: Tensor,
    cu_seqlens: Tensor,
    window: int | None = None,
    logits: Logits = USUAL,
    longest: int | None = None,
) -> Tensor:
    """o [1, T, H, K] of documents packed into one row, in which no token sees another document.

    In float16 and bfloat16 on a GPU, without a softcap, torch's kernel for packed sequences computes it. Otherwise documents of
    about one length are laid side by side. Where no length becomes a Python number, a square of T x T is masked.

    Args:
        longest: a bound of the documents' lengths; None for T. A kernel does less where it is known.
    """
    if takes_packed(q_1THK, v_1THK) and logits.softcap is None:
        return _attend_packed(q_1THK, k_1THK, v_1THK, cu_seqlens, window, logits.scale, longest)
    if lengths_are_unread():
        return _attend_masked(q_1THK, k_1THK, v_1THK, cu_seqlens, window, logits)
    o_1THK = torch.zeros_like(q_1THK)
    for token, edges in split_by_length(cu_seqlens):
        rectangle = Rectangle(edges, len(token))
        q, k, v = (rectangle.lay_out(y[:, token]) for y in (q_1THK, k_1THK, v_1THK))
        o_1THK = o_1THK.index_copy(1, token, rectangle.pack(causal_attention(q, k, v, window, logits=logits)))
    return o_1THK


def takes_packed(q_1THK: Tensor, v_1THK: Tensor) -> bool:
    """Whether torch has a kernel for packed sequences of such tensors: in float16 or bfloat16 on a GPU from Ampere on."""
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
    return "window_size" in inspect.signature(varlen_attn).parameters  # not in the first versions, as scales


def _attend_packed(
    q_1THK: Tensor,
    k_1THK: Tensor,
    v_1THK: Tensor,
    cu_seqlens: Tensor,
    window: int | None,
    scale: float | None,
    longest: int | None,
) -> Tensor:
    """By torch's own kernel, which reads no length on the host."""
    from torch.nn.attention.varlen import varlen_attn  # takes seconds

    repeat = q_1THK.shape[2] // k_1THK.shape[2]
    if repeat > 1:
        k_1THK, v_1THK = (x.repeat_interleave(repeat, 2) for x in (k_1THK, v_1THK))
    edges, most = cu_seqlens.int(), longest or q_1THK.shape[1]
    before = -1 if window is None else window - 1  # tokens that a token sees before itself
    given: dict[str, Any] = {} if scale in (None, q_1THK.shape[3] ** -0.5) else {"scale": scale}
    o_THK: Any = varlen_attn(
        q_1THK[0], k_1THK[0], v_1THK[0], edges, edges, most, most, window_size=(before, 0), **given
    )
    return o_THK[None]


def _attend_masked(
    q_1THK: Tensor, k_1THK: Tensor, v_1THK: Tensor, cu_seqlens: Tensor, window: int | None, logits: Logits
) -> Tensor:
    token_T = torch.arange(q_1THK.shape[1], device=q_1THK.device)
    document_T = torch.bucketize(token_T, cu_seqlens, right=True)
    visible_TS = (document_T[:, None] == document_T) & _find_visible(q_1THK, len(token_T), window, None)
    return _attend(q_1THK, k_1THK, v_1THK, visible_TS, logits=logits)


def _attend_full_windows(q_NTHK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, window: int, logits: Logits) -> Tensor:
    """Each query sees exactly `window` slots, S = T + window - 1: blocks of `window` queries against 2 window - 1 slots."""
    time = q_NTHK.shape[1]
    blocks = -(-time // window)
    missing = blocks * window - time
    q_NTHK, k_NSHK, v_NSHK = (F.pad(x, (0, 0, 0, 0, 0, missing)) for x in (q_NTHK, k_NSHK, v_NSHK))
    q = q_NTHK.unflatten(1, (blocks, window)).flatten(0, 1)
    k, v = (x.unfold(1, 2 * window - 1, window).movedim(-1, 2).flatten(0, 1) for x in (k_NSHK, v_NSHK))
    o = _attend(q, k, v, _find_visible(q, 2 * window - 1, window, None), logits=logits)
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
    q_NTHK: Tensor,
    k_NSHK: Tensor,
    v_NSHK: Tensor,
    visible: Tensor | None = None,
    causal: bool = False,
    logits: Logits = USUAL,
) -> Tensor:
    if logits.softcap is not None:
        visible = _find_visible(q_NTHK, k_NSHK.shape[1], None, None) if causal else visible
        return _attend_capped(q_NTHK, k_NSHK, v_NSHK, visible, logits.scale, logits.softcap)
    o_NHTK = F.scaled_dot_product_attention(
        q_NTHK.transpose(1, 2),
        k_NSHK.transpose(1, 2),
        v_NSHK.transpose(1, 2),
        attn_mask=visible,
        is_causal=causal,
        scale=logits.scale,
        enable_gqa=k_NSHK.shape[2] != q_NTHK.shape[2],
    )
    return o_NHTK.transpose(1, 2)


def _attend_capped(
    q_NTHK: Tensor, k_NSHK: Tensor, v_NSHK: Tensor, visible: Tensor | None, scale: float | None, softcap: float
) -> Tensor:
    """With all logits in memory, as torch's attention has no softcap. Softmax is in float32."""
    repeat = q_NTHK.shape[2] // k_NSHK.shape[2]
    k_NSHK, v_NSHK = (x.repeat_interleave(repeat, 2) for x in (k_NSHK, v_NSHK))
    q_NHTK, k_NHSK, v_NHSK = (x.transpose(1, 2) for x in (q_NTHK, k_NSHK, v_NSHK))
    scale = q_NTHK.shape[3] ** -0.5 if scale is None else scale
    logits_NHTS = softcap * torch.tanh(q_NHTK @ k_NHSK.mT * scale / softcap)
    if visible is not None:
        logits_NHTS = logits_NHTS.masked_fill(~visible, float("-inf"))
    return (logits_NHTS.softmax(-1, dtype=torch.float32).to(v_NHSK.dtype) @ v_NHSK).transpose(1, 2)


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
