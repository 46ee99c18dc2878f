"""Palimpsa by kernels: the launches of a forward and of a backward."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ..chunk.sizes import CallSizes
from ..chunk.state import combine_segments
from ..chunk.tiles import padded
from ..packing import record_tables
from ..runtime.launch_plan import Recorder, Rule
from ..runtime.workspace import TensorSpec
from .gradients import posterior_gradients, sum_tiles
from .read import read_posterior, segment_gradients
from .sizes import MOST_LOADED_AHEAD, PosteriorInputs, PosteriorSizes, programs_at_once, registers
from .state import posterior_state

__all__ = ["POSTERIOR", "PosteriorInputs", "add_tiles"]

SUM_BLOCK = 1024

Options = tuple[float, bool]  # scale of q, whether the variance is an output


class Segments(NamedTuple):
    """Where sequences are cut: a state per segment, M and J [P, HV, K, V], and the segments' log decays [P, HV, K]; the table
    of segments. None where there is none."""

    states: tuple[TensorSpec, ...] = ()
    transition: TensorSpec | None = None
    table: TensorSpec | None = None


def shapes(
    x: PosteriorInputs, device: torch.device, options: Options, final: bool
) -> tuple[tuple[TensorSpec | None, ...], tuple[()]]:
    """o, the variance where it is asked for, the final M and J (None unless `final`). A backward needs the inputs alone."""
    sizes, (_, variance) = CallSizes(x), options
    outputs = [sizes.per_token(sizes.HV, sizes.V, dtype=x.v.dtype) for _ in range(2 if variance else 1)]
    states = [sizes.state(sizes.N) if final else None for _ in range(2)]
    return (*outputs, *states), ()


def record_segments(recorder: Recorder, x: PosteriorInputs, sizes: PosteriorSizes) -> Segments:
    """The tables, and the states that segments start from: in parallel what each adds, then one sum over the segments."""
    found = Segments()
    if sizes.packed or sizes.segment is not None:
        chunks = sizes.empty(sizes.M, 2, dtype=torch.int32) if sizes.packed else None
        table = sizes.empty(sizes.P, 5, dtype=torch.int32)
        record_tables(recorder, x.cu_seqlens, chunks, table, sizes.T, sizes.segment_tokens)
        found = Segments(table=table)
    if sizes.segment is not None:
        transition = sizes.empty(sizes.P, sizes.HV, sizes.K, dtype=torch.float32)
        found = found._replace(states=(sizes.state(sizes.P), sizes.state(sizes.P)), transition=transition)
        record_states(recorder, x, sizes, found, (None, None), found.states, summary=True)
        for added, begin in zip(found.states, (x.M, x.J)):
            join_segments(recorder, x, sizes, found, added, begin, back=False)
    return found


def forward(
    recorder: Recorder, x: PosteriorInputs, device: torch.device, options: Options, final: bool
) -> tuple[tuple[TensorSpec | None, ...], tuple[()]]:  # fmt: skip
    scale, variance = options
    sizes = PosteriorSizes(x)
    outputs, saved = shapes(x, device, options, final)
    segments = record_segments(recorder, x, sizes)
    start = segments.states or (x.M, x.J)
    started = start[0] is not None
    key_parts = sizes.read_parts
    recorder.launch(
        read_posterior, (-(-sizes.V // (16 * sizes.read_blocks)) * sizes.P, sizes.HV),
        x.q, x.k, x.v, x.beta, x.g, x.prior, *(start if started else (x.prior, x.prior)), outputs[0],
        outputs[1] if variance else None, *outputs[-2:], segments.table, sizes.T, int(started), scale, sizes.HV,
        **sizes.heads(x), PARTS=key_parts, ENDED=final, VARIANCE=variance, PRECISION=sizes.precision,
        LOADS_AHEAD=key_parts <= MOST_LOADED_AHEAD, BLOCKS=sizes.read_blocks,
        num_warps=1, maxnreg=registers(programs_at_once(key_parts * sizes.read_blocks)),
    )  # fmt: skip
    return outputs, saved


def record_states(
    recorder: Recorder, x: PosteriorInputs, sizes: PosteriorSizes, segments: Segments, start: Sequence[Any],
    out: Sequence[TensorSpec], summary: bool,
) -> None:  # fmt: skip
    """The states at the chunks' ends from those at the segments' starts; with `summary` what every segment adds to them."""
    width = min(32 if sizes.dtype == torch.bfloat16 else 16, padded(sizes.V))
    recorder.launch(
        posterior_state, (-(-sizes.V // width) * sizes.P, sizes.HV),
        x.k, x.v, x.beta, x.g, *start, *out, segments.transition, segments.table, sizes.T, sizes.HV,
        **sizes.heads(x), PK=padded(sizes.K), BV=width, STARTED=start[0] is not None, SUMMARY=summary,
        PRECISION=sizes.precision, num_warps=4,
    )  # fmt: skip


def join_segments(
    recorder: Recorder, x: PosteriorInputs, sizes: PosteriorSizes, segments: Segments, added: TensorSpec,
    begin: TensorSpec | None, back: bool,
) -> None:  # fmt: skip
    """Turn `added` into the state that each segment starts from (back: into the gradient of that at its end)."""
    width = min(32, padded(sizes.V))
    recorder.launch(
        combine_segments, (-(-sizes.V // width) * sizes.N, sizes.HV),
        begin, added, segments.transition, x.cu_seqlens, sizes.T, sizes.segment_tokens, sizes.HV, K=sizes.K,
        PK=padded(sizes.K), BK=padded(sizes.K), V=sizes.V, BV=width, DELTA=False, BACK=back, BEGUN=begin is not None,
        PRECISION=sizes.precision, num_warps=4,
    )  # fmt: skip


def backward(
    recorder: Recorder, x: PosteriorInputs, device: torch.device, options: Options,
    saved: tuple[()], output_grads: Sequence[Any], state_grads: bool,
) -> PosteriorInputs:  # fmt: skip
    scale, variance = options
    sizes = PosteriorSizes(x, back=True)
    segments = record_segments(recorder, x, sizes)
    do, *rest = output_grads
    dw, d_end = rest[0] if variance else None, tuple(rest[-2:])
    heads, float32 = sizes.heads(x), torch.float32
    start = segments.states or (x.M, x.J)
    chunk_states = [sizes.state(sizes.M, dtype=sizes.state_dtype) for _ in range(2)]
    record_states(recorder, x, sizes, segments, start, chunk_states, summary=False)
    key_parts = sizes.grad_parts
    v_tiles, k_tiles = -(-sizes.V // 16), -(-sizes.K // (8 * key_parts))
    programs = v_tiles * k_tiles * sizes.P
    if sizes.segment is not None:
        added = [sizes.state(sizes.P) for _ in range(2)]
        recorder.launch(
            segment_gradients, (programs, sizes.HV),
            x.q, x.k, x.v, x.beta, x.g, x.prior, *start, do, dw, *added, segments.table, sizes.T, scale,
            sizes.HV, **heads, PARTS=key_parts, VARIANCE=dw is not None, PRECISION=sizes.precision, num_warps=1,
        )  # fmt: skip
        for d_state, begin in zip(added, d_end):
            join_segments(recorder, x, sizes, segments, d_state, begin, back=True)
        d_end = tuple(added)

    scratch = [sizes.empty(programs * sizes.HV, 128 * key_parts, dtype=float32) for _ in range(2)]
    per_token = sizes.B * sizes.T * sizes.HV
    dq, dk = (sizes.per_token(sizes.HV, sizes.K) for _ in range(2))
    dv, dbeta = (sizes.per_token(sizes.HV, sizes.V, dtype=y.dtype) for y in (x.v, x.beta))
    dg, dprior = sizes.per_token(sizes.HV, dtype=x.g.dtype), sizes.empty(sizes.HV, dtype=x.prior.dtype)
    parts = {
        **dict(zip(("dq", "dk"), of_tiles(sizes, v_tiles, dq, dk))),
        **dict(zip(("dv", "dbeta"), of_tiles(sizes, k_tiles, dv, dbeta))),
        "dg": sizes.empty(v_tiles * k_tiles, per_token, dtype=float32),
        "dprior": sizes.empty(programs, sizes.HV, dtype=float32),
    }  # fmt: skip
    wanted = state_grads and x.M is not None
    d_start = [sizes.state(sizes.N) if wanted else None for _ in range(2)]
    given = [x.prior if y is None else y for y in d_end]  # a pointer in the place of what is not read
    recorder.launch(
        posterior_gradients, (programs, sizes.HV),
        x.q, x.k, x.v, x.beta, x.g, x.prior, *chunk_states, do, dw, *given, *scratch, *parts.values(), *d_start,
        segments.table, sizes.T, sizes.B * sizes.T, scale, sizes.HV, **heads, PARTS=key_parts,
        GIVEN_M=d_end[0] is not None, GIVEN_J=d_end[1] is not None, ENDED=wanted,
        VARIANCE=dw is not None, PRECISION=sizes.precision, num_warps=1,
        maxnreg=registers(programs_at_once(key_parts, back=True)),
    )  # fmt: skip
    grads = {"dq": dq, "dk": dk, "dv": dv, "dbeta": dbeta, "dg": dg, "dprior": dprior}
    for name, out in grads.items():
        if parts[name] is not out:
            add_tiles(recorder, parts[name], out)
    return PosteriorInputs(dq, dk, dv, dbeta, dg, dprior, *d_start)


def add_tiles(recorder: Recorder, parts: TensorSpec, out: TensorSpec) -> None:
    """A gradient from what the tiles of a head left of it, one after the other in `parts`."""
    count, every = prod(out.shape), prod(parts.shape)
    unit = 8 if out.shape[-1] % 8 == 0 else 1
    recorder.launch(
        sum_tiles, (-(-count // SUM_BLOCK),), parts, out, count // unit, every // max(1, count), UNIT=unit, AT_ONCE=4,
        BLOCK=SUM_BLOCK, num_warps=4,
    )  # fmt: skip


def of_tiles(sizes: PosteriorSizes, tiles: int, *outs: TensorSpec) -> list[TensorSpec]:
    """Where every tile leaves its parts of two gradients, of one dtype: in the gradients themselves where there is one tile."""
    if tiles == 1 and len({out.dtype for out in outs}) == 1:
        return list(outs)
    return [TensorSpec((tiles, *out.shape), sizes.state_dtype) for out in outs]


# Inputs: PosteriorInputs. Outputs: o, (the variance,) M, J.
POSTERIOR = Rule(shapes, forward, backward)
