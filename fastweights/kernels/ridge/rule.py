"""What the family computes, and the launches of a forward and a backward."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..common.call import MULTIPROCESSORS, Specs, make_rule, padded
from ..common.delta_rule.launches import ChunkOperands, DeltaRule
from ..common.delta_rule.sizes import KernelInputs, SavedForBackward
from ..common.packing import CHUNK
from ..runtime.gluon import runs_gluon
from ..runtime.workspace import TensorSpec
from .gradients import sum_chunks, system_gradients
from .gram import gram_sums, gram_sums_back, scan_states
from .order import stride_between_roots
from .solve import prepare_systems, solve_chunk

SCAN_BLOCK = 1024  # numbers of a state that one program takes from chunk to chunk
SCAN_AHEAD = 4  # chunks that it loads at once
PREPARE = {"BK": 64, "num_warps": 8, "num_stages": 1, "maxnreg": 128}  # two programs per multiprocessor
SOLVE_REGISTERS = {64: 168, 128: 255}  # per thread: three and two programs per multiprocessor
PAUSES = 30_000, 40_000  # cycles, forward and backward: see `begin_in_turn`
TYPICAL_RIDGE = 0.02  # over |H|_F, where a constant ridge leaves that open


class RidgeInputs(
    namedtuple("RidgeInputs", "q k v g beta mix ridge H U cu_seqlens", defaults=(None, None, None, None, None, None))
):
    """q, k [B, T, H, K]; v [B, T, HV, V]; g [B, T, H or HV]; beta, mix likewise or None; ridge [HV, K] or None; H [N, HV, K, K]
    and U [N, HV, K, V] or None; cu_seqlens [N+1] or None, on the device."""


class Options(NamedTuple):
    """ridge: the number, where there is none per channel."""

    ridge: float
    iterations: int
    solver: str
    adaptive_ridge: bool
    scale: float


class Saved(
    namedtuple(
        "Saved",
        "x x_rest y y_rest writes units outsides norms keys weights factors G starts transitions chunk_table segment_table "
        "states",
    )
):
    """The solutions x and, with a mix, what the memory is asked, y, [BT, HV, K], in 16 bits as sums of two tensors each; beta k
    or None; H at the chunks' starts over its norm [M, HV, K, K], in float16 unless the inputs are float32, the norm [M, HV], and
    |H_t|_F [BT, HV]; what `prepare_systems` leaves, None where nothing takes it; of the memory's linear attention the decays, the
    states at the segments' starts, the tables, and the states at the chunks' starts [M, HV, K, V]."""

    @property
    def asked(self) -> tuple[Any, Any]:
        return (self.x, self.x_rest) if self.y is None else (self.y, self.y_rest)


class Ridge(DeltaRule):
    """The memory's linear attention, which is asked one query per value head, and the systems that the queries solve. Outputs:
    o, H and U, these None unless they are wanted."""

    def read_memory(self) -> KernelInputs:
        x = self.x
        query = TensorSpec((*x.v.shape[:3], x.k.shape[3]), x.k.dtype)  # the dtype of the call
        return KernelInputs(query, x.k, x.v, g=x.g, S=x.U, cu_seqlens=x.cu_seqlens)

    def set_up(self) -> None:
        super().set_up()
        x, self.options = self.x, Options(*self.options)
        self.adaptive = self.options.adaptive_ridge
        self.constants |= {
            "HEADS_K": self.group(x.k), "HEADS_BETA": self.group(x.beta), "HEADS_MIX": self.group(x.mix),
            "ADAPTIVE": self.adaptive,
        }  # fmt: skip
        self.columns = {"BV": min(64, padded(self.K)), "num_warps": 4, "num_stages": 1}
        self.tiles = -(-self.K // self.columns["BV"])

    def two_tensors(self) -> tuple[TensorSpec, TensorSpec | None]:
        """For numbers of 16 bits as a sum of two."""
        rest = None if self.dtype == torch.float32 else self.token_tensor(self.HV, self.K)
        return self.token_tensor(self.HV, self.K), rest

    def gram(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """So many matrices [HV, K, K]."""
        return self.empty(count, self.HV, self.K, self.K, dtype=dtype)

    @property
    def by_chebyshev(self) -> bool:
        return bool(self.options.solver == "chebyshev")

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare_systems`, and `solve_systems` and `systems_back` in Gluon, take the place of other launches."""
        return self.K in (64, 128) and self.dtype in (torch.bfloat16, torch.float16) and runs_gluon(self.device)

    @property
    def answers_at_once(self) -> bool:
        """Whether `solve_systems` asks the memory what it has found. Conjugate gradients would spill for it."""
        return self.is_prepared and self.V == self.K and self.by_chebyshev

    def prepared(self) -> tuple[TensorSpec | None, TensorSpec | None, TensorSpec | None]:
        """Places for what `prepare_systems` leaves."""
        if not self.is_prepared:
            return None, None, None
        keys, weights = (self.empty(self.M, self.HV, CHUNK, n, dtype=torch.float16) for n in (self.K, CHUNK))
        return keys, weights, self.floats(self.M, self.HV, 2, CHUNK)

    def shapes(self, final: bool) -> tuple[Specs, Saved]:
        HV, kept, x = self.HV, self.placeholders(), self.x
        solved, (y, y_rest) = self.two_tensors(), (None, None) if x.mix is None else self.two_tensors()
        system = (
            None if x.beta is None else self.token_tensor(HV, self.K),
            self.gram(self.M, torch.float32 if self.dtype == torch.float32 else torch.float16),
            self.floats(self.M, HV),
            self.token_tensor(HV, dtype=torch.float32) if self.adaptive else None,
            *self.prepared(),
        )
        memory = kept.G, kept.starts, kept.transitions, kept.chunk_table, kept.segment_table
        states = (self.gram(self.N), self.state(self.N)) if final else (None, None)
        saved = Saved(*solved, y, y_rest, *system, *memory, super().chunk_states())
        return (self.token_tensor(HV, self.V), *states), saved

    def ask_memory(self, saved: Saved) -> SavedForBackward:
        """Let the memory have the solutions as its queries and beta k as its keys; what it saves."""
        keys = self.x.k if saved.writes is None else saved.writes
        self.memory = self.memory._replace(q=saved.asked[0], k=keys, write_key=keys)
        self.kept_states = saved.states
        shared = {name: getattr(saved, name) for name in ("G", "starts", "transitions", "chunk_table", "segment_table")}
        return SavedForBackward(**shared)

    def chunk_states(self) -> TensorSpec:
        return self.kept_states

    def pass_state_again(self, chunks: ChunkOperands, saved: SavedForBackward) -> TensorSpec:
        return self.kept_states

    def forward(self, final: bool) -> tuple[Specs, Saved]:
        (o, H_end, U_end), saved = self.shapes(final)
        kept = self.ask_memory(saved)
        self.record_tables(kept)
        chunks = self.transform_chunks(kept, 1.0, reuse_saved=False)._replace(q_rest=saved.asked[1])
        states, x = self.gram(self.M), self.x
        self.launch(
            gram_sums, (self.tiles * self.M, self.HV), x.k, x.beta, saved.G, states, saved.writes, saved.chunk_table, self.T,
            self.HV, **self.columns,
        )  # fmt: skip
        parts = 8 * (self.K * self.K // SCAN_BLOCK)
        squares = self.floats(self.M, self.HV, parts) if self.is_prepared else None
        self.scan(saved, x.H, states, states, H_end, back=False, squares=squares)
        if self.is_prepared:
            self.launch(
                prepare_systems, (self.M, self.HV), x.k, x.beta, saved.G, states, squares, saved.units, saved.outsides,
                saved.norms, saved.keys, saved.weights, saved.factors, saved.chunk_table, self.T, self.HV, SQUARES=parts,
                **PREPARE,
            )  # fmt: skip
        h = self.record_states(chunks, kept, U_end)
        self.solve(saved, states=states, memory=(self.memory.k, x.v, h, o) if self.answers_at_once else None)
        if not self.answers_at_once:
            self.answer(chunks, kept, 1.0, o, h)
        return (o, H_end, U_end), saved

    def scan(
        self, saved: Saved, begin: Any, sums: TensorSpec, states: TensorSpec, end: Any, back: bool, squares: Any = None
    ) -> None:
        """Turn what every chunk adds into H at the chunks' starts, `states` (back: into its gradient at their ends)."""
        self.launch(
            scan_states, (self.N, self.HV, -(-self.K * self.K // SCAN_BLOCK)), begin, sums, states, squares,
            saved.G, end, self.x.cu_seqlens,
            self.T, self.HV, BLOCK=SCAN_BLOCK, AHEAD=SCAN_AHEAD, BACK=back, num_warps=4,
        )  # fmt: skip

    def pause(self, back: bool) -> int:
        """Cycles of `begin_in_turn`: 0 where few programs follow those that begin together, or products take less of the time."""
        together = 2 * MULTIPROCESSORS
        pays = self.K == 128 and self.by_chebyshev and 3 * together <= self.M * self.HV
        return PAUSES[back] if pays else 0

    def solve(
        self, saved: Saved, states: Any = None, dy: Any = None, e: Any = None, slope: Any = None, crossed: Any = None,
        dq: Any = None, dmix: Any = None, sums: Any = None, memory: tuple[Any, Any, Any, Any] | None = None,
    ) -> None:  # fmt: skip
        """The solutions, from H at the chunks' starts; with dy, the gradient of what the memory is asked, the adjoint ones.
        memory: its keys, its values, its states at the chunks' starts, and where its outputs go."""
        x, options = self.x, self.options
        lowest = options.ridge if self.adaptive else TYPICAL_RIDGE
        stride = stride_between_roots(options.iterations + 1, lowest) if self.by_chebyshev else 0
        if self.is_prepared:
            from .solve_systems import solve_systems  # needs Gluon

            writes, v, h, o = (None, None, None, None) if memory is None else memory
            self.launch(
                solve_systems, (self.M, self.HV), x.q, saved.G, x.mix, x.ridge, saved.units, saved.outsides, saved.keys,
                saved.weights, saved.factors, dy, saved.x, saved.x_rest, e, saved.y, saved.y_rest, slope, crossed, dq, dmix, sums,
                writes, v, h, o, saved.chunk_table, self.T, options.scale, options.ridge, options.iterations, stride,
                self.pause(dy is not None), HV=self.HV, HEADS_W=self.group(writes), CHEBYSHEV=self.by_chebyshev,
                BACK=dy is not None, num_warps=4, maxnreg=SOLVE_REGISTERS[self.K],
            )  # fmt: skip
            return
        self.launch(
            solve_chunk, (self.M, self.HV), x.q, x.k, x.beta, saved.G, x.mix, x.ridge, states, saved.units, saved.outsides,
            saved.norms, dy, saved.x, saved.x_rest, e, saved.y, saved.y_rest, slope, dq, dmix, saved.chunk_table, self.T,
            options.scale, options.ridge, options.iterations, stride, self.HV, CHEBYSHEV=self.by_chebyshev, BACK=dy is not None,
            num_warps=4, num_stages=1,
        )  # fmt: skip

    def backward(self, saved: Saved, output_grads: Sequence[Any], state_grads: bool) -> RidgeInputs:
        x, (do, dH_end, dU_end), HV, K, M = self.x, output_grads, self.HV, self.K, self.M
        kept = self.ask_memory(saved)
        dy, d_writes, dv, dP, memory_gates, dU = self.memory_gradients(saved, kept, do, dU_end, state_grads)

        e, dq, dmix = self.token_tensor(HV, K), self.token_tensor(HV, K), self.gate_gradient(x.mix)
        slope = self.token_tensor(HV, dtype=torch.float32) if self.adaptive else None
        crossed = self.token_tensor(HV, dtype=torch.float32) if self.is_prepared else None
        place = saved.chunk_table, self.T
        if self.is_prepared:
            # Of the gradient of H products take 16 bits, which of a chunk's part bfloat16 keeps as well, and float16 does not.
            sums = self.gram(M, torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32)
            later = self.gram(M, self.dtype)
        else:
            sums = later = self.gram(M)
        self.solve(saved, e=e, dy=dy, slope=slope, crossed=crossed, dq=dq, dmix=dmix, sums=sums)
        if not self.is_prepared:
            self.launch(
                gram_sums_back, (self.tiles * M, HV), x.k, x.beta, saved.G, saved.x, e, slope, saved.units, saved.outsides, sums,
                *place, HV, **self.columns,
            )  # fmt: skip
        dH = self.gram(self.N) if state_grads else None
        self.scan(saved, dH_end, sums, later, dH, back=True)
        dk = self.token_tensor(HV, K)
        per_chunk = None if x.ridge is None else self.floats(M, HV, K)
        system_gates = self.floats(1 if self.is_prepared else self.tiles, *memory_gates.shape[1:])
        stride, memory_parts = prod(memory_gates.shape[1:]), memory_gates.shape[0]
        if self.is_prepared:
            from .systems_back import systems_back  # needs Gluon

            self.launch(
                systems_back, (M, HV), x.q, x.k, x.beta, saved.G, x.mix, dP, saved.x, saved.x_rest, e, crossed, slope,
                saved.norms, saved.units, saved.outsides, later, d_writes, memory_gates, system_gates, dk,
                per_chunk, *place, self.options.scale, stride, HV=HV, MEMORY_PARTS=memory_parts, num_warps=4,
            )  # fmt: skip
        else:
            self.launch(
                system_gradients, (self.tiles * M, HV), x.q, x.k, x.beta, saved.G, x.mix, dP, saved.x, saved.x_rest, e, slope,
                saved.norms, saved.units, saved.outsides, later, d_writes, memory_gates, system_gates, dk, per_chunk, *place,
                self.options.scale, stride, HV, BK=self.columns["BV"], MEMORY_PARTS=memory_parts, num_warps=4, num_stages=1,
            )  # fmt: skip
        dbeta, dg, _ = self.reduce_grads(kept, system_gates, x.beta, x.g)
        d_ridge = None
        if per_chunk is not None:
            d_ridge = self.empty(*x.ridge.shape, dtype=x.ridge.dtype)
            self.launch(sum_chunks, (HV,), per_chunk, d_ridge, saved.chunk_table, M, HV, ROWS=16, num_warps=4)
        dH, dU = None if x.H is None else dH, None if x.U is None else dU
        return RidgeInputs(dq, dk, dv, dg, dbeta, dmix, d_ridge, dH, dU)

    def memory_gradients(
        self, saved: Saved, kept: SavedForBackward, do: Any, dU_end: Any, state_grads: bool
    ) -> tuple[TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec, TensorSpec | None]:
        """The memory's gradients: of what it is asked, in float32, of its keys and values, of its scores, the partial sums of dg,
        and of its first state. Those of keys and dg lack what tokens of the chunk do to each other."""
        HV, K, v, keys = self.HV, self.K, self.x.v, self.memory.k
        chunks = ChunkOperands(saved.asked[0], keys, None, v, keys, q_rest=saved.asked[1])
        h = self.pass_state_again(chunks, kept)
        dh, dU = self.pass_state_back(chunks, kept, 1.0, do, None, dU_end, state_grads)
        dv, dP = self.token_tensor(HV, self.V), self.token_tensor(HV, CHUNK)
        # In float32, as what the systems add to dk cancels most of it: the better the memory, the more.
        dy, d_writes = (self.token_tensor(HV, K, dtype=torch.float32) for _ in range(2))
        if self.is_prepared and self.V == K:
            from .memory_back import memory_back  # needs Gluon

            gates = self.floats(1, 2, *self.rows, HV)
            self.launch(
                memory_back, (self.M, HV), *saved.asked, keys, v, do, kept.G, h, dh, dv, dP, dy, d_writes, gates,
                kept.chunk_table, self.T, prod(gates.shape[1:]), HV=HV, HEADS_W=self.group(keys), num_warps=4,
            )  # fmt: skip
            return dy, d_writes, dv, dP, gates, dU
        self.record_value_grads(chunks, kept, 1.0, do, dv, dP, dh)
        gates = self.partial_gates("chunk_gradients")
        inputs, grads = (chunks.q, keys, keys, None, None), (dy, None, d_writes, None, gates)
        self.record_chunk_gradients(chunks, kept, 1.0, inputs, v, None, do, dP, h, dh, grads, WRITE=True, PAIRS=False)
        return dy, d_writes, dv, dP, gates, dU


RIDGE = make_rule(Ridge)
