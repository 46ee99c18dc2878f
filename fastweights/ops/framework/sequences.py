"""Which tokens form which sequence, and how they are cut into chunks, which many sequences pass together."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checks import check_dense, shape_of, values_are_checked
from ...private_torch import change_count

LARGEST_CHUNK = 64  # tokens; no op has longer ones
CACHED_NUMBERS = 2**18  # in the states of sequences that are read at once: few enough to stay in a processor's cache


@dataclass(frozen=True)
class Sequences:
    """The sequences of one call: `batch` rows of `time` tokens, or sequences of `lengths` packed into a single row (the
    lengths are unknown while a graph is traced, or where reading them would wait for a GPU)."""

    batch: int
    time: int
    lengths: tuple[int, ...] | None = None
    cu_seqlens: Tensor | None = field(default=None, compare=False)

    @property
    def count(self) -> int:
        if self.lengths is not None:
            return len(self.lengths)
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    def index_of_token(self, device: torch.device) -> Tensor:
        """[T] number of the sequence that each token of a packed row belongs to."""
        lengths = torch.tensor(self.lengths, device=device)
        return torch.repeat_interleave(torch.arange(self.count, device=device), lengths)


def group_by_length(lengths: Tensor, longest: int | None = None) -> list[Tensor]:
    """Groups of packed sequences of about the same length, the shortest first: up to one token, 2, 3 and 4, 5 to 8 and so on.
    Sequences longer than `longest` are in the group of that length. lengths: [N]. A group is the numbers of its sequences."""
    group_N = torch.frexp((lengths.clamp(1, longest) - 1).double()).exponent
    return [(group_N == group).nonzero()[:, 0] for group in group_N.unique()]


def locate_tokens(number: Tensor, lengths: Tensor) -> Tensor:
    """Where in the packed row the tokens of the sequences `number` are, one sequence after the other."""
    length, end = lengths[number], lengths.cumsum(0)[number]
    offset = (end - length.cumsum(0)).repeat_interleave(length)
    return offset + torch.arange(len(offset), device=offset.device)


class Groups:
    """The sequences of a packed row in groups of about the same length, each with a row of its own. The longest sequence of a row
    sets the length of its chunks: beside a long one, the chunk of a short one would be mostly padding.

    Attributes:
        sequences: those of each group.
    """

    def __init__(self, sequences: Sequences, states: Sequence[Tensor]) -> None:
        lengths, device = torch.tensor(sequences.lengths), states[0].device
        *short, long = group_by_length(lengths, LARGEST_CHUNK)
        if device.type == "cpu":
            at_once = max(1, CACHED_NUMBERS // max(1, sum(s.shape[1:].numel() for s in states)))
            short = [part for numbers in short for part in numbers.split(at_once)]
        rows = [*short, long]
        tokens = [locate_tokens(numbers, lengths) for numbers in rows]
        self.sequences = [Sequences(1, len(t), tuple(lengths[row].tolist())) for row, t in zip(rows, tokens)]
        self.row, self.token = (torch.cat(parts).to(device) for parts in (rows, tokens))

    def split_tokens(self, x: Tensor) -> tuple[Tensor, ...]:
        """[1, T, ...] -> [1, tokens of the group, ...] of each group."""
        return _move(x, 1, self.token.argsort()).split([group.time for group in self.sequences], 1)

    def split_rows(self, s: Tensor) -> tuple[Tensor, ...]:
        """[N, ...] -> [sequences of the group, ...] of each group."""
        if len(s) > 1 and s.stride(0) == 0:  # all the same
            return s.split([group.count for group in self.sequences])
        return _move(s, 0, self.row.argsort()).split([group.count for group in self.sequences])

    def merge_tokens(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of split_tokens."""
        return _move(torch.cat(list(parts), 1), 1, self.token)

    def merge_rows(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of split_rows."""
        return _move(torch.cat(list(parts)), 0, self.row)


def _move(x: Tensor, dim: int, place: Tensor) -> Tensor:
    """Move each entry of x along `dim` to its new place. Unlike the gradient of indexing, that of a move adds nothing up."""
    return torch.empty_like(x).index_copy(dim, place, x)


_read: dict[int, tuple[weakref.ref[Tensor], int, list[int]]] = {}


def _edges(cu_seqlens: Tensor) -> list[int]:
    """The numbers of cu_seqlens. Reading them from a GPU waits for it, so they are kept while the tensor lives unchanged. One
    wait then serves all layers of a model."""
    if cu_seqlens.device.type == "cpu" or cu_seqlens.is_inference() or (version := change_count(cu_seqlens)) is None:
        return cu_seqlens.tolist()
    key = id(cu_seqlens)
    if key not in _read or _read[key][0]() is not cu_seqlens or _read[key][1] != version:
        _read[key] = (weakref.ref(cu_seqlens, lambda _: _read.pop(key, None)), version, cu_seqlens.tolist())
    return _read[key][2]


def check_cu_seqlens(
    cu_seqlens: Tensor | None, batch: int, time: int, *, read: bool = False, like: Tensor | None = None
) -> Sequences:
    """The sequences that cu_seqlens [N+1], cumulative lengths from 0 to T, packs into one row.

    On a GPU its numbers are read only with `read` or FASTWEIGHTS_CHECK_VALUES=1, because reading waits for the device.

    Args:
        batch, time: of the inputs.
        like: an input. cu_seqlens may be on the device "meta", where it has no numbers, only if `like` is there too.

    Raises:
        TypeError: cu_seqlens is no tensor.
        ValueError: another dtype or shape, a batch that is not 1, or numbers that do not rise from 0 to T.
    """
    if cu_seqlens is None:
        return Sequences(batch, time)
    if not isinstance(cu_seqlens, Tensor):
        raise TypeError(f"cu_seqlens must be an integer tensor [N+1], got {type(cu_seqlens).__name__}")
    check_dense("cu_seqlens", cu_seqlens)
    if cu_seqlens.dtype not in (torch.int32, torch.int64) or cu_seqlens.ndim != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens must be int32 or int64 [N+1] with N >= 1, got {cu_seqlens.dtype} {shape_of(cu_seqlens)}"
        )
    if cu_seqlens.is_meta and like is not None and not like.is_meta:
        raise ValueError(
            f"cu_seqlens must be on the device of the inputs, {like.device}, or on the CPU, got meta, which holds no numbers; "
            "move it there"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens packs its sequences into one row, so the batch must be 1, got {batch}")
    if torch.compiler.is_compiling() or not (read or values_are_checked(cu_seqlens)):
        return Sequences(batch, time, cu_seqlens=cu_seqlens)
    edges = _edges(cu_seqlens)
    if edges[0] != 0 or edges[-1] != time or any(a > b for a, b in zip(edges, edges[1:])):
        raise ValueError(f"cu_seqlens must rise from 0 to the length {time} without a step down, got {edges}")
    return Sequences(batch, time, tuple(b - a for a, b in zip(edges, edges[1:])), cu_seqlens)


class Chunks:
    """Sequences cut into M chunks of `size` tokens (the last one of a sequence padded), ordered by step: first the
    first chunk of every sequence, then every second chunk, and so on, longest sequence first. At each step the sequences
    that still run are therefore one block of rows: packed rows cost no more than their tokens."""

    def __init__(self, sequences: Sequences, largest: int, device: torch.device) -> None:
        self.sequences = sequences
        lengths = sequences.lengths if sequences.lengths is not None else (sequences.time,)
        longest = max(lengths)
        self.size = min(largest, 1 << max(longest - 1, 0).bit_length())
        counts = [-(-n // self.size) for n in lengths]
        self.device = device
        self.order: list[int] | None = None
        self.active = [sequences.batch] * counts[0]
        if sequences.lengths is not None:
            self.order = sorted(range(len(counts)), key=lambda i: -counts[i])
            self.active = [sum(c > n for c in counts) for n in range(max(counts))]
            self._place(self._packed_tokens(lengths, self.order))

    def _packed_tokens(self, lengths: Sequence[int], order: Sequence[int]) -> Tensor:
        """[M, size] index in the row of the token at each place, T where the place is padding."""
        time = self.sequences.time
        token_of_place = torch.full((sum(self.active), self.size), time)
        length = torch.tensor(lengths)[list(order)]
        first = (torch.tensor(lengths).cumsum(0) - torch.tensor(lengths))[list(order)]
        row = 0
        for step, active in enumerate(self.active):
            place = step * self.size + torch.arange(self.size)
            token = first[:active, None] + place
            token_of_place[row : row + active] = token.where(place < length[:active, None], time)
            row += active
        return token_of_place

    def _place(self, token_of_place: Tensor) -> None:
        """Keep which token each place holds, and which place each token."""
        token_of_place, time = token_of_place.flatten(), self.sequences.time
        place_of_token = torch.zeros(time + 1, dtype=torch.long)
        place_of_token[token_of_place] = torch.arange(len(token_of_place))
        self.token_of_place, self.place_of_token = token_of_place.to(self.device), place_of_token[:time].to(self.device)

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """[B, T, H, ...] -> [M, H, size, ...], padding set to `fill`."""
        if self.order is None:
            steps = len(self.active)
            x = F.pad(x, [0, 0] * (x.ndim - 2) + [0, steps * self.size - x.shape[1]], value=fill)
            x = x.unflatten(1, (steps, self.size)).transpose(0, 1).flatten(0, 1)
        else:
            x = torch.cat([x[0], x.new_full((1, *x.shape[2:]), fill)])[self.token_of_place]
            x = x.reshape(len(x) // self.size, self.size, *x.shape[1:])
        return x.transpose(1, 2).contiguous()

    def merge(self, y: Tensor) -> Tensor:
        """[M, H, size, ...] -> [B, T, H, ...], the inverse of split."""
        y = y.transpose(1, 2)
        if self.order is None:
            y = y.reshape(len(self.active), self.sequences.batch, *y.shape[1:])
            return y.transpose(0, 1).flatten(1, 2)[:, : self.sequences.time]
        return y.flatten(0, 1)[self.place_of_token][None]

    def scan(
        self,
        step: Callable[[tuple[Tensor, ...], tuple[Tensor, ...]], tuple[Tensor, ...]],
        states: Sequence[Tensor],
        *inputs: Tensor,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Walk the chunks in order. `step(states, parts)` gets the states [active, H, ...] at the start of some chunks
        and those chunks' part of every input [M, ...], and returns the states at their end. Returns the states at the
        start of every chunk [M, H, ...] and the final states [N, H, ...]."""
        order = None
        if self.order is not None and self.order != sorted(self.order):
            order = torch.tensor(self.order, dtype=torch.long, device=self.device)
        now = tuple(states) if order is None else tuple(s[order] for s in states)
        starts: list[tuple[Tensor, ...]] = []
        finished: list[tuple[Tensor, ...]] = []
        parts_of_step = zip(*(x.split(self.active) for x in inputs)) if self.active else ()
        for active, parts in zip(self.active, parts_of_step):
            if active < len(now[0]):
                finished.append(tuple(s[active:] for s in now))
                now = tuple(s[:active] for s in now)
            starts.append(now)
            now = step(now, parts)
        finished.append(now)
        final = [_join(ends[::-1]) for ends in zip(*finished)]
        if order is not None:
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=self.device)
            final = [s[back] for s in final]
        begun = [_join(parts) for parts in zip(*starts)] if starts else [s[:0] for s in states]
        return begun, final

    def accumulate(self, states: Sequence[Tensor], kept: Tensor, *written: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """`scan` with the step S <- kept S + written, which takes for each state S what its chunks write [M, ...]."""

        def step(states: tuple[Tensor, ...], parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            kept, *written = parts
            return tuple(kept * S + new for S, new in zip(states, written))

        return self.scan(step, states, kept, *written)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if len(parts) > 1 else parts[0]


def token_positions(time: int, count: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """[B, T] how many tokens of its sequence came before each token, `count` [N] of them before the call."""
    token = torch.arange(time, device=count.device)
    if cu_seqlens is None:
        return count[:, None] + token
    edges = cu_seqlens.to(count.device).long()
    # torch.compile's code for searchsorted fails on the device where the number of sequences is unknown (torch 2.11).
    ends = token.new_zeros(time + 1).index_add(0, edges[1:].clamp(0, time), torch.ones_like(edges[1:]))
    sequence = ends.cumsum(0)[:time].clamp_max(len(count) - 1)
    return (count[sequence] + token - edges[sequence])[None]
