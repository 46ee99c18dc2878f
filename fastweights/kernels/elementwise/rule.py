"""Elementwise Longhorn by kernels: the tokens of a sequence from first to last, their gradients chunk by chunk from the last, and
the launches of both. The derivation stands in __init__.py.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from ..common.call import Call, Specs, make_rule, padded
from ..common.math import infinite_to_nan, to_float_or_nan
from ..common.packing import CHUNK, pieces_of_sequence, record_tables, tokens_of_sequence
from ..common.tiles import token_address
from ..runtime.gluon import runs_gluon
from ..runtime.workspace import TensorSpec
from .chunks import differentiate_chunk, join_elements, read_chunk, summarize_elements


@triton.jit
def load_kv_beta(
    k, v, beta, token, head, channel, column, HV,
    K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """The key, value and gain of a token, as they lie in memory: loops load them a step before `update_terms` takes them."""
    return (
        tl.load(token_address(k, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0),
        tl.load(token_address(v, token, head, HV, 1, V) + column, column < V, 0.0),
        tl.load(token_address(beta, token, head, HV, HEADS_BETA, V) + column, column < V, 0.0),
    )


@triton.jit
def update_terms(raw):
    """The key and L, the value, beta, least, e and others of a token: see the derivation."""
    key, value, beta = to_float_or_nan(raw[0]), to_float_or_nan(raw[1]), to_float_or_nan(raw[2])
    squares = key * key
    length = tl.sum(squares, 0)
    least = 1 / (1 + beta * length)
    return key, length, value, beta, least, beta * least, tl.maximum(length - squares, 0.0, tl.PropagateNan.ALL)


@triton.jit
def decay(least, e, others):
    """The decay of every element, [PK, BV]."""
    return least[None, :] + others[:, None] * e[None, :]


@triton.jit
def next_state(S, key, value, least, e, others):
    """The state after a token."""
    return decay(least, e, others) * S + key[:, None] * (e * value)[None, :]


@triton.jit
def state_places(state, channel, column, K: tl.constexpr, V: tl.constexpr):
    """Where a tile lies in the state of this number (int64) in a tensor [.., K, V], and which of its numbers there are."""
    return state * (K * V) + channel[:, None] * V + column[None, :], (channel < K)[:, None] & (column < V)[None, :]


@triton.jit(do_not_specialize=["T"])
def read_elements(
    q, k, v, beta, start, o, end, states, cu_seqlens, T, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """start, end [N, HV, K, V]; states [M, HV, K, V]: those at the chunks' starts. start may be None, and those of o, end and
    states that are not wanted."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    n, head = tl.program_id(0) // TILES, tl.program_id(1)
    channel, column = tl.arange(0, PK), tl.program_id(0) % TILES * BV + tl.arange(0, BV)
    first, count = tokens_of_sequence(cu_seqlens, n, T)
    chunk, pieces = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
    own, inside = state_places(n.to(tl.int64) * HV + head, channel, column, K, V)
    S = tl.zeros((PK, BV), tl.float32) if start is None else to_float_or_nan(tl.load(start + own, inside, 0.0))
    if count > 0:
        ahead = load_kv_beta(k, v, beta, first, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
        for i in range(0, count):
            token = first + i
            if states is not None:  # noqa: SIM102 (one is known when compiling)
                if i % 64 == 0:
                    at, held = state_places((chunk + i // 64).to(tl.int64) * HV + head, channel, column, K, V)
                    tl.store(states + at, S, held)
            if o is not None:  # before the state is computed, so that the load does not come late
                raw_query = tl.load(token_address(q, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0)
            raw, later = ahead, first + tl.minimum(i + 1, count - 1)
            ahead = load_kv_beta(k, v, beta, later, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
            key, length, value, gain, least, e, others = update_terms(raw)
            S = next_state(S, key, value, least, e, others)
            if o is not None:
                query = to_float_or_nan(raw_query)
                answer = tl.sum(S * (query * scale)[:, None], 0)
                to = token_address(o, token, head, HV, 1, V) + column
                tl.store(to, infinite_to_nan(answer).to(o.dtype.element_ty), column < V)
    if end is not None:
        tl.store(end + own, infinite_to_nan(S), inside)


@triton.jit
def load_q_do(q, do, token, head, channel, column, HV, K: tl.constexpr, V: tl.constexpr, HEADS_K: tl.constexpr):
    """The query of a token and the gradient of its output, as they lie in memory."""
    query = tl.load(token_address(q, token, head, HV, HEADS_K, K) + channel, channel < K, 0.0)
    return query, tl.load(token_address(do, token, head, HV, 1, V) + column, column < V, 0.0)


@triton.jit(do_not_specialize=["T", "tokens", "items"])
def element_gradients(
    q, k, v, beta, states, do, d_end, scratch, dq, dk, dv, dbeta, d_start, cu_seqlens, T, tokens, items, scale, HV,
    K: tl.constexpr, PK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    HEADS_K: tl.constexpr, HEADS_BETA: tl.constexpr,
):  # fmt: skip
    """Every program takes one work item after the other: a tile of columns of a sequence and head.

    states [M, HV, K, V]: those at the chunks' starts. scratch [programs, 64, PK, BV]. dq, dk [tiles, tokens, HV, K]: what each
    tile of columns adds; dv, dbeta [tokens, HV, V]. d_end, d_start [N, HV, K, V] or None."""
    TILES: tl.constexpr = (V + BV - 1) // BV
    scratch += tl.program_id(0).to(tl.int64) * (64 * PK * BV)
    in_tile = tl.arange(0, PK)[:, None] * BV + tl.arange(0, BV)[None, :]
    for step in range(0, tl.cdiv(items - tl.program_id(0), tl.num_programs(0))):
        item = tl.program_id(0) + step * tl.num_programs(0)
        tile, head, n = item % TILES, item // TILES % HV, item // TILES // HV
        channel, column = tl.arange(0, PK), tile * BV + tl.arange(0, BV)
        first, count = tokens_of_sequence(cu_seqlens, n, T)
        chunk, pieces = pieces_of_sequence(cu_seqlens, n, T, 64, 0)
        own, inside = state_places(n.to(tl.int64) * HV + head, channel, column, K, V)
        tile_start = tile.to(tl.int64) * tokens * HV * K
        tile_dq, tile_dk = dq + tile_start, dk + tile_start
        dS = tl.zeros((PK, BV), tl.float32) if d_end is None else to_float_or_nan(tl.load(d_end + own, inside, 0.0))
        for c in range(pieces - 1, -1, -1):
            begin, size = first + c * 64, tl.minimum(count - c * 64, 64)
            at, held = state_places((chunk + c).to(tl.int64) * HV + head, channel, column, K, V)
            S = tl.load(states + at, held, 0.0)
            ahead = load_kv_beta(k, v, beta, begin, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
            for i in range(0, size):
                token, later = begin + i, begin + tl.minimum(i + 1, size - 1)
                grad_o = (
                    tl.load(token_address(do, token, head, HV, 1, V) + column, column < V, 0.0).to(tl.float32) * scale
                )
                raw = ahead
                ahead = load_kv_beta(k, v, beta, later, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
                tl.store(scratch + i * (PK * BV) + in_tile, S)
                key, length, value, gain, least, e, others = update_terms(raw)
                S = next_state(S, key, value, least, e, others)
                grad_query = infinite_to_nan(tl.sum(S * grad_o[None, :], 1))
                tl.store(
                    token_address(tile_dq, token, head, HV, 1, K) + channel,
                    grad_query.to(dq.dtype.element_ty),
                    channel < K,
                )
            tl.debug_barrier()
            ahead_q_do = load_q_do(q, do, begin + size - 1, head, channel, column, HV, K, V, HEADS_K)
            earlier = tl.load(scratch + (size - 1) * (PK * BV) + in_tile)
            for i in range(size - 1, -1, -1):
                token, previous = begin + i, tl.maximum(i - 1, 0)
                raw, q_do, before = ahead, ahead_q_do, earlier
                ahead = load_kv_beta(k, v, beta, begin + previous, head, channel, column, HV, K, V, HEADS_K, HEADS_BETA)
                ahead_q_do = load_q_do(q, do, begin + previous, head, channel, column, HV, K, V, HEADS_K)
                earlier = tl.load(scratch + previous * (PK * BV) + in_tile)
                query, grad_o = to_float_or_nan(q_do[0]), q_do[1].to(tl.float32) * scale
                key, length, value, gain, least, e, others = update_terms(raw)
                dS += query[:, None] * grad_o[None, :]
                da = dS * before
                grad_write, grad_least = tl.sum(dS * key[:, None], 0), tl.sum(da, 0)
                grad_e = tl.sum(da * others[:, None], 0) + value * grad_write
                grad_length = tl.sum(e * (grad_least - e * grad_e - least * grad_least), 0)
                grad_key = tl.sum(dS * (e * value)[None, :] - (2 * key)[:, None] * (da * e[None, :]), 1)
                grad_key = infinite_to_nan(grad_key + 2 * key * grad_length)
                grad_value = infinite_to_nan(e * grad_write)
                grad_beta = infinite_to_nan(least * least * (grad_e - length * grad_least))
                tl.store(
                    token_address(tile_dk, token, head, HV, 1, K) + channel,
                    grad_key.to(dk.dtype.element_ty),
                    channel < K,
                )
                tl.store(
                    token_address(dv, token, head, HV, 1, V) + column, grad_value.to(dv.dtype.element_ty), column < V
                )
                tl.store(
                    token_address(dbeta, token, head, HV, 1, V) + column,
                    grad_beta.to(dbeta.dtype.element_ty),
                    column < V,
                )
                dS = decay(least, e, others) * dS
            tl.debug_barrier()
        if d_start is not None:
            tl.store(d_start + own, infinite_to_nan(dS), inside)


COLUMNS = 16  # of a program's tile
NUMBERS_PER_WARP = 1024  # of a state: 32 per thread, which leaves registers for its gradient and the state loaded ahead
WARPS = 1024  # of a backward: about as many as run at the same time, for each has a scratch of states
NUMBERS = 16384  # of a state, that a program holds for products
JOINED = 2048  # numbers that a program takes from chunk to chunk


def takes_products(dtype: torch.dtype) -> bool:
    """Whether chunks are read by matrix products, whose operands have this dtype."""
    return dtype != torch.float32


class ElementwiseInputs(namedtuple("ElementwiseInputs", "q k v beta S cu_seqlens", defaults=(None, None))):
    """q, k [B, T, H, K]; v [B, T, HV, V]; beta [B, T, H or HV, V]; S [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the
    device."""


class Elementwise(Call):
    """Options: the scale of q. Outputs: o, S (None unless it is wanted). In 16 bits chunks are read by matrix products, and a
    backward needs the states at their starts; in float32 token after token, and a backward needs the inputs alone.
    tiles: of columns, each a program per sequence or chunk and head."""

    def set_up(self) -> None:
        x = self.x
        self.constants |= {"HEADS_K": self.group(x.k), "HEADS_BETA": self.group(x.beta)}
        self.by_products = takes_products(self.dtype)
        self.columns = min(padded(self.V), 128, NUMBERS // padded(self.K)) if self.by_products else COLUMNS
        self.tiles = -(-self.V // self.columns)
        numbers = padded(self.K) * self.columns
        self.warps = max(1, numbers // NUMBERS_PER_WARP)
        if self.by_products:  # at most a thread per channel: Triton then keeps vectors where they are loaded
            self.warps = 4 if numbers > NUMBERS // 2 else max(1, min(padded(self.K), self.columns) // 32)
        self.constants["BV"] = self.columns

    @property
    def on_hopper(self) -> bool:
        """Whether kernels in Gluon take the place of those in plain Triton: tiles are square, inputs alike."""
        square = self.columns == padded(self.K) and self.columns in (64, 128)
        alike = {y.dtype for y in (self.x.q, self.x.k, self.x.v)} in ({torch.bfloat16}, {torch.float16})
        return square and alike and runs_gluon(self.device)

    @property
    def product_warps(self) -> int:
        """Of kernels that read chunks by products: in Gluon a thread has a row of keys or of values."""
        return self.columns // 16 if self.on_hopper else self.warps

    def matrices(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """So many states as programs hold them, [HV, tiles, columns, PK]."""
        return self.empty(count, self.HV, self.tiles, self.columns, padded(self.K), dtype=dtype)

    def shapes(self, final: bool) -> tuple[Specs, Specs]:
        o = self.token_tensor(self.HV, self.V, dtype=self.x.v.dtype)
        saved: Specs = ()
        if self.by_products:
            chunks = self.empty(self.M, 2, dtype=torch.int32) if self.packed else None
            saved = self.matrices(self.M, self.dtype), chunks
        return (o, self.state(self.N) if final else None), saved

    def read(self, o: Any, end: Any, states: Any) -> None:
        """Step through all sequences; None for what is not wanted."""
        x = self.x
        self.launch(
            read_elements, (self.tiles * self.N, self.HV), x.q, x.k, x.v, x.beta, x.S, o, end, states, x.cu_seqlens, self.T,
            *self.options, self.HV, num_warps=self.warps,
        )  # fmt: skip

    def join(self, begin: Any, do: Any, starts: Any, end: Any, chunks: Any, back: bool) -> None:
        """The state that every chunk starts from (back: the gradient of that at its end), and the one after all."""
        x, PK = self.x, padded(self.K)
        added, kept = self.matrices(self.M), self.matrices(self.M)
        operands = (x.q, x.k, x.v, x.beta, do, added, kept, chunks, self.T, *self.options, self.HV)
        options = {"BACK": back, "num_warps": self.product_warps, "num_stages": 1}
        if self.on_hopper:
            from .chunks_on_hopper import summarize_square_tile  # needs Gluon

            self.launch(summarize_square_tile, (self.tiles * self.M, self.HV), *operands, **options)
        else:
            self.launch(summarize_elements, (2 * self.tiles * self.M, self.HV), *operands, **options)
        block = min(PK, max(16, JOINED // self.columns))
        self.launch(
            join_elements, (PK // block * self.tiles * self.N, self.HV), begin, added, kept, starts, end, x.cu_seqlens, self.T,
            self.HV, BLOCK=block, BACK=back, num_warps=4,
        )  # fmt: skip

    def forward(self, final: bool) -> tuple[Specs, Specs]:
        x = self.x
        outputs, saved = self.shapes(final)
        if not self.by_products:
            self.read(outputs[0], outputs[1], None)
            return outputs, saved
        starts, chunks = saved
        if chunks is not None:
            places = self.empty(self.M, 5, dtype=torch.int32)
            record_tables(self.recorder, x.cu_seqlens, chunks, places, self.T, CHUNK)
        self.join(x.S, None, starts, outputs[1], chunks, back=False)
        operands = (x.q, x.k, x.v, x.beta, starts, outputs[0], chunks, self.T, *self.options, self.HV)
        grid, options = (self.tiles * self.M, self.HV), {"num_warps": self.product_warps, "num_stages": 1}
        if self.on_hopper:
            from .chunks_on_hopper import read_square_tile  # needs Gluon

            self.launch(read_square_tile, grid, *operands, **options)
        else:
            self.launch(read_chunk, grid, *operands, **options)
        return outputs, saved

    def backward(self, saved: Specs, output_grads: Sequence[Any], state_grads: bool) -> ElementwiseInputs:
        x, (do, d_end), HV, K = self.x, output_grads, self.HV, self.K
        dq, dk = (self.token_tensor(HV, K) for _ in range(2))
        dv, dbeta = (self.token_tensor(HV, self.V, dtype=y.dtype) for y in (x.v, x.beta))
        alone = self.tiles == 1
        parts = [y if alone else self.floats(self.tiles, *y.shape) for y in (dq, dk)]
        d_start = self.state(self.N) if state_grads and x.S is not None else None
        differentiate = self.chunk_gradients if self.by_products else self.token_gradients
        differentiate(saved, do, d_end, (*parts, dv, dbeta), d_start)
        if not alone:
            for part, out in zip(parts, (dq, dk)):
                self.sum_tiles(part, out)
        return ElementwiseInputs(dq, dk, dv, dbeta, d_start)

    def chunk_gradients(self, saved: Specs, do: Any, d_end: Any, grads: Sequence[Any], d_start: Any) -> None:
        x, (starts, chunks) = self.x, saved
        ends = self.matrices(self.M, self.dtype)
        self.join(d_end, do, ends, d_start, chunks, back=True)
        items = self.tiles * self.M * self.HV
        programs = min(items, max(1, WARPS // self.product_warps))
        kept = CHUNK // 4 if self.on_hopper else CHUNK // 2
        scratch = self.empty(programs, kept, self.columns, padded(self.K))
        operands = (x.q, x.k, x.v, x.beta, starts, ends, do, scratch, *grads, chunks, self.T)
        operands += (self.B * self.T, items, *self.options, self.HV)
        options = {"num_warps": self.product_warps, "num_stages": 1}
        if self.on_hopper:
            from .chunks_on_hopper import differentiate_square_tile  # needs Gluon

            self.launch(differentiate_square_tile, (programs,), *operands, **options)
        else:
            self.launch(differentiate_chunk, (programs,), *operands, **options)

    def token_gradients(self, saved: Specs, do: Any, d_end: Any, grads: Sequence[Any], d_start: Any) -> None:
        x = self.x
        states = self.state(self.M)
        self.read(None, None, states)
        items = self.tiles * self.N * self.HV
        programs = min(items, max(1, WARPS // self.warps))
        scratch = self.floats(programs, CHUNK, padded(self.K), COLUMNS)
        self.launch(
            element_gradients, (programs,), x.q, x.k, x.v, x.beta, states, do, d_end, scratch, *grads, d_start,
            x.cu_seqlens, self.T, self.B * self.T, items, *self.options, self.HV, num_warps=self.warps,
        )  # fmt: skip


ELEMENTWISE = make_rule(Elementwise)
