"""Linear attention and the delta rules by kernels: the launches of a forward, most of which a backward repeats.

Tensors [BT, HV, ...] count the tokens of all rows through, [M, HV, ...] the chunks, [P, HV, ...] the segments (see packing.py).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..packing import CHUNK
from ..runtime.launch_plan import Recorder
from ..runtime.workspace import TensorSpec
from .channel_decay import wy_transform_channel
from .cumsum import chunk_cumsum
from .key_energy import record_key_energy
from .output import chunk_output
from .precondition import Form, record_precondition
from .sizes import ChunkSizes, KernelInputs, SavedForBackward
from .state import chunk_state, combine_segments
from .tiles import padded
from .wy import wy_transform

Options = tuple[float, ...]  # scale of q, bound and eps of the preconditioner


def shapes(
    x: KernelInputs, device: torch.device, options: Options, final: bool
) -> tuple[tuple[TensorSpec | None, ...], SavedForBackward]:
    """o and the final S and A (None unless `final`), and what a backward needs."""
    sizes = ChunkSizes(x, device)
    return (sizes.per_token(sizes.HV, sizes.V), *sizes.final_states(final)), sizes.saved()


def forward(
    recorder: Recorder, x: KernelInputs, device: torch.device, options: Options, final: bool
) -> tuple[tuple[TensorSpec | None, ...], SavedForBackward]:  # fmt: skip
    scale, bound, eps = options
    sizes = ChunkSizes(x, device)
    (o, S_end, A_end), saved = shapes(x, device, options, final)
    sizes.record_tables(recorder, x, saved)
    if sizes.precond:
        record_key_energy(recorder, x, sizes, saved, A_end)
        record_precondition(recorder, x, sizes, saved, saved.write_keys, Form("softsign", bound, eps))
    chunks = transform_chunks(recorder, x, sizes, saved, scale, reuse_saved=False)
    record_outputs(recorder, x, sizes, chunks, saved, scale, o, S_end)
    return (o, S_end, A_end), saved


class ChunkOperands(NamedTuple):
    """What the state pass and the outputs take: queries and write keys, W, u (before the state pass U), and the write keys as
    they are; with a decay per channel q and write_key come decayed, with P [BT, HV, 64] and G at the chunks' ends [M, HV, K].
    q_rest, write_key_rest: what these lack, where they are sums of two tensors."""

    q: TensorSpec
    write_key: TensorSpec
    W: TensorSpec | None
    u: TensorSpec
    plain_write_key: TensorSpec
    P: TensorSpec | None = None
    last_gate: TensorSpec | None = None
    q_rest: TensorSpec | None = None
    write_key_rest: TensorSpec | None = None


def record_outputs(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, chunks: ChunkOperands, saved: SavedForBackward, scale: float,
    o: TensorSpec | None, S_end: TensorSpec | None,
) -> None:  # fmt: skip
    """The states of all chunks, then their outputs."""
    HV, K, V = sizes.HV, sizes.K, sizes.V
    if sizes.segment is not None:
        pass_state(recorder, sizes, chunks, saved, None, None, summary=True)
        join_segments(recorder, x, sizes, saved.starts, saved.transitions, x.S, back=False)
    h = pass_state(recorder, sizes, chunks, saved, saved.starts if sizes.segment else x.S, S_end)
    grid = (-(-V // sizes.tile["chunk_output"].BV) * sizes.M, HV)
    recorder.launch(
        chunk_output, grid,
        chunks.q, chunks.write_key, chunks.u, saved.G, chunks.P, h, o, chunks.q_rest, x.divisor, saved.chunk_table, sizes.T,
        scale, sizes.H, HV,
        K=K, V=V, HEADS_Q=sizes.group(chunks.q), HEADS_K=sizes.group(chunks.write_key), DECAY=sizes.decay,
        FINER=sizes.finer, PRECISION=sizes.precision, **sizes.tile_options("chunk_output", "BK", "BV"),
    )  # fmt: skip


def transform_chunks(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, saved: SavedForBackward, scale: float, reuse_saved: bool
) -> ChunkOperands:  # fmt: skip
    """What depends on one chunk alone. reuse_saved: `saved` is filled already, u included."""
    HV, K, V, grid = sizes.HV, sizes.K, sizes.V, (sizes.M, sizes.HV)
    keys = saved.write_keys if sizes.precond else x.k if x.write_key is None else x.write_key
    gates = {"HEADS_G": sizes.group(x.g), "HEADS_BETA": sizes.group(x.beta), "HEADS_W": sizes.group(keys)}
    place = saved.chunk_table, sizes.T
    # A backward with finer write keys does without W.
    W = sizes.per_token(HV, K) if sizes.delta and not (reuse_saved and sizes.finer) else None
    u = x.v if saved.u is None else saved.u
    if sizes.decay == 2:
        Qd, Ke = (sizes.per_token(HV, K) for _ in range(2))
        P, last_gate = sizes.per_token(HV, CHUNK), sizes.empty(sizes.M, HV, K, dtype=torch.float32)
        recorder.launch(
            wy_transform_channel, grid, x.q, x.k, keys, x.v, x.beta, x.g, saved.T, Qd, Ke, P, W, u, last_gate, *place, scale,
            sizes.H, HV, K=K, V=V, **gates, WRITE=sizes.writes, DELTA=sizes.delta, REUSE_SAVED=reuse_saved,
            PRECISION=sizes.precision, **sizes.tile_options("wy_transform_channel", "BK", "BV"),
        )  # fmt: skip
        return ChunkOperands(Qd, Ke, W, u, keys, P, last_gate)
    if sizes.delta and W is not None:
        recorder.launch(
            wy_transform, grid, x.k, keys, x.v, x.beta, x.g, saved.T, W, u, saved.G, *place,
            sizes.H, HV, K=K, V=V, **gates, WRITE=sizes.writes, DECAY=sizes.decay == 1, REUSE_SAVED=reuse_saved,
            PRECISION=sizes.precision,
            **sizes.tile_options("wy_transform_again" if reuse_saved else "wy_transform", "BK", "BV"),
        )  # fmt: skip
    elif sizes.decay == 1 and not reuse_saved:
        width = min(32, padded(HV))
        recorder.launch(
            chunk_cumsum, (sizes.M, -(-HV // width)), x.g, saved.G, *place, HV, PH=width, HEADS_G=sizes.group(x.g)
        )
    return ChunkOperands(x.q, keys, W, u, keys, write_key_rest=x.write_key_rest)


def pass_state(
    recorder: Recorder, sizes: ChunkSizes, chunks: ChunkOperands, saved: SavedForBackward, start: TensorSpec | None,
    end: TensorSpec | None, summary: bool = False, reuse_saved: bool = False,
) -> TensorSpec:  # fmt: skip
    """The states at the chunks' starts [M, HV, K, V]; U becomes u, unless reuse_saved says that it is u already. With `summary`
    instead what each segment adds, and its transition."""
    HV, K, V = sizes.HV, sizes.K, sizes.V
    tile = sizes.tile["chunk_state" if sizes.segment is None else "segment_states"]
    h = sizes.empty(0 if summary else sizes.M, HV, K, V)
    parts = -(-V // tile.BV) + (-(-K // tile.BV) if summary and sizes.delta else 0)
    recorder.launch(
        chunk_state, (parts * sizes.P, HV), chunks.write_key, chunks.write_key_rest, chunks.W, chunks.u, saved.G,
        chunks.last_gate, start, h,
        saved.starts if summary else end, saved.transitions if sizes.cut else None, sizes.segment_table(saved), sizes.T,
        sizes.H, HV,
        K=K, PK=tile.BK, V=V, BV=tile.BV, HEADS_K=sizes.group(chunks.write_key), DELTA=sizes.delta and not reuse_saved,
        DECAY=sizes.decay, STARTED=start is not None, ENDED=end is not None, SUMMARY=summary, STAGES=tile.num_stages,
        PRECISION=sizes.precision, num_warps=tile.num_warps,
    )  # fmt: skip
    return h


def join_segments(
    recorder: Recorder, x: KernelInputs, sizes: ChunkSizes, added: TensorSpec, transitions: TensorSpec,
    begin: TensorSpec | None, back: bool,
) -> None:  # fmt: skip
    """Turn `added` into the state that each segment starts from."""
    tile = sizes.tile["combine_segments"]
    recorder.launch(
        combine_segments, (-(-sizes.V // tile.BV) * sizes.N, sizes.HV),
        begin, added, transitions, x.cu_seqlens, sizes.T, sizes.segment_tokens, sizes.HV, K=sizes.K, PK=padded(sizes.K),
        V=sizes.V, DELTA=sizes.delta, BACK=back, BEGUN=begin is not None,
        PRECISION="tf32x3" if sizes.lasting else sizes.precision, **sizes.tile_options("combine_segments", "BK", "BV"),
    )  # fmt: skip
