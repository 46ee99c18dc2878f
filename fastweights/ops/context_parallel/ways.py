"""The two ways in which an op works on a sequence that is divided over processes, and which of them a call takes.

What a process sends in a forward, and again in a backward, for T local tokens, N processes, and H key heads, G value heads of K
and V channels:
    heads   (N - 1) / N of its inputs and outputs: of linear attention and the delta rules, in 16 bits, about
            2 T (2 H K + 2 G V) (N - 1) / N bytes, plus the gates
    state   (N - 1) times the map of its part, whatever T is: 4 G K (V + K) bytes of a delta rule, 4 G K (V + 1) of linear
            attention, 4 G K (V + K + 1) of gated_kalmanet and mesa
Way "state" computes more, see `extra_macs`: a delta rule carries K columns besides its V, and adds K V per token and head for
what the state before the part answers; a sum is formed once more, by one product of K V per token and head.

Both costs grow with T on one side only: way "heads" exchanges more, way "state" computes more. With the rates below, which are
those of H100 in one host, heads win for the delta rules (at K = V = 128, four processes and 32,768 tokens by about one half), and
states for linear attention and for solvers that read a sum, as they do wherever links are slower: between hosts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..framework.checks import Sizes, compute_dtype
from ..framework.passing import Transition
from ..framework.spec import OpSpec
from .group import ContextParallel
from .heads import Divided, choose_units, run_on_heads
from .states import run_by_state, widest

__all__ = ["choose_way", "exchanged_bytes", "extra_macs", "run_divided"]

Named = Mapping[str, Any]
# Of one H100: what an all-to-all over NVLink sends per second, bytes of memory, and multiply-adds that the kernels of the delta
# rules reach in 16 bits. With wider numbers they reach as many bytes of operands.
SENT_PER_SECOND = 3e11
MEMORY_PER_SECOND = 2.5e12
MACS_PER_SECOND = 3e13
BACKWARD = 2.5  # operations, per operation of the forward


def run_divided(
    call: Callable[..., tuple[Any, Any]], spec: OpSpec, inputs: Sequence[Any], options: Named, given: Divided, final: bool,
    cu_seqlens: Tensor | None, backend: str, checked: Any,
) -> tuple[Any, Any]:  # fmt: skip
    """What call(spec, inputs, options, initial state, final, cu_seqlens, backend) returns for the whole sequences: this rank's part
    of the outputs, and final states on every rank. checked: what the checks of these arguments found."""
    count = None if cu_seqlens is None else len(cu_seqlens) - 1
    named = dict(zip(spec.inputs, inputs))
    most = widest(checked.implementation, inputs[0].dtype)
    if choose_way(spec, named, checked.sizes, given.cp, count, most) == "heads":
        return run_on_heads(call, spec, inputs, options, given, final, cu_seqlens, backend, checked.sizes)
    return run_by_state(
        call, spec, inputs, options, given.initial_state, final, cu_seqlens, backend, given.cp, checked
    )  # fmt: skip


def choose_way(
    spec: OpSpec, inputs: Named, sizes: Sizes, cp: ContextParallel, count: int | None, most: int
) -> str:  # fmt: skip
    """ "heads" or "state": the one that is asked for, else the one that serves, else that of the shorter forward and backward.

    Args:
        inputs: by name; tensors of this process, or of its sizes on the device "meta".
        sizes: of the process.
        count: number of packed sequences; None where none are packed.
        most: value columns that one call of the backend takes.

    Raises:
        ValueError: way "state" is asked for, and the rule has none for these inputs.
    """
    passes = spec.passing is not None and spec.passing.serves(inputs)
    if cp.way == "state" and not passes:
        without = " and ".join(spec.passing.without) if spec.passing is not None else ""
        reason = f"passes states only without {without}" if without else "cannot pass states from part to part"
        raise ValueError(f"way must be 'heads' or 'auto' for {spec.name}, which {reason}, got 'state'")
    if cp.way != "auto":
        return cp.way
    if not passes or choose_units(spec, sizes, cp.size) < cp.size:
        return "state" if passes else "heads"
    sent = {way: exchanged_bytes(spec, inputs, sizes, cp.size, way, count is not None) for way in ("heads", "state")}
    seconds = {way: 2 * found / SENT_PER_SECOND for way, found in sent.items()}
    x = next(iter(inputs.values()))
    seconds["state"] += (1 + BACKWARD) * extra_macs(spec, sizes, most) / (MACS_PER_SECOND * 2 / x.itemsize)
    if count is not None:  # the states of all sequences are written and read, forward and backward
        states = count * sum(sizes.G * state.count_numbers(1, sizes.K, sizes.V) for state in spec.states.values())
        seconds["state"] += 4 * states * 2 * compute_dtype(x).itemsize / MEMORY_PER_SECOND
    return min(seconds, key=lambda way: seconds[way])


def exchanged_bytes(spec: OpSpec, inputs: Named, sizes: Sizes, ranks: int, way: str, packed: bool) -> float:
    """What each of so many processes sends for one call, in the forward, and as much in the backward.

    Args:
        inputs, sizes: as for `choose_way`.
        way: "heads" or "state".
        packed: whether the row holds several sequences, of which one at most goes on at a border.
    """
    tokens = {name: x for name, x in inputs.items() if name not in spec.parameters and x is not None}
    first = next(iter(tokens.values()))
    if way == "heads":
        units = choose_units(spec, sizes, ranks)
        widths = [max(x.shape[2], units) * math.prod(x.shape[3:]) * x.itemsize for x in tokens.values()]
        widths += [math.prod(sizes.shape(output.dims)) * first.itemsize for output in spec.outputs.values()]
        return sizes.B * sizes.T * sum(widths) * (ranks - 1) / ranks
    assert spec.passing is not None
    sent = 0
    for name, passed in spec.passing.states.items():
        numbers = math.prod(sizes.shape(spec.states[name].dims))
        if isinstance(passed, Transition):
            sent += (numbers + sizes.G * sizes.K**2) * compute_dtype(first).itemsize
        else:
            channels = passed.decay is not None and inputs[passed.decay].ndim == 4
            kept = sizes.G * (sizes.K if channels else 1)
            sent += (numbers + kept) * (passed.dtype or compute_dtype(first)).itemsize
    return (ranks - 1) * (1 if packed else sizes.B) * sent


def extra_macs(spec: OpSpec, sizes: Sizes, most: int) -> float:
    """The multiply-adds by which the forward of one process grows in way "state". most: value columns of one call."""
    assert spec.passing is not None
    K, V = sizes.K, sizes.V
    macs = spec.macs or (lambda K, V: sizes.R * (3 * K * V + 64 * (K + V)))
    per_token = 0.0
    for name, passed in spec.passing.states.items():
        per_token += math.prod(sizes.shape(spec.states[name].dims)) / sizes.G
        if isinstance(passed, Transition):
            per_token += macs(K, K) if V + K > most else macs(K, V + K) - macs(K, V)
    return sizes.B * sizes.T * sizes.G * per_token
