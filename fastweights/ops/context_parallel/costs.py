"""What the two ways cost in which an op works on a sequence that is divided over processes.

What a process sends in a forward, and again in a backward, for T local tokens, N processes, and H key heads, G value heads of K
and V channels:
    heads   (N - 1) / N of its inputs and outputs: of linear attention and the delta rules, in 16 bits, about
            2 T (2 H K + 2 G V) (N - 1) / N bytes, plus the gates
    state   (N - 1) times the map of its part, whatever T is: 4 G K (V + K) bytes of a delta rule, 4 G K (V + 1) of linear
            attention, 4 G K (V + K + 1) of gated_kalmanet and mesa
Way "state" computes more, see `extra_macs`. Kernels of the delta rules (`PartKernels`) find their map on the way, for nearly
nothing. Elsewhere a delta rule carries K columns besides its V, and adds K V per token and head for what the state before the
part answers. A sum is formed once more, by a product of K V per token and head in float32.

With the rates below, which are those of H100, 8 per host, at 8 heads, K = V = 128, four processes and 32,768 tokens of each,
"state" is the shorter way for every rule that has kernels for its map or passes a sum. To exchange the heads of a delta rule
takes about 1.4 ms for a forward and backward, its states .02 ms. For rows of a few hundred tokens, and for many packed documents,
whose states are read and written one by one, "heads" is shorter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ...checks import LARGEST_HEAD
from ..framework.checks import Sizes, compute_dtype
from ..framework.in_torch import first_input
from ..framework.passing import Transition
from ..framework.spec import OpSpec
from .by_kernels import part_kernels
from .heads import choose_units

__all__ = [
    "H100_LINK",
    "estimate_seconds",
    "exchanged_bytes",
    "extra_macs",
    "link_speed",
    "most_columns",
    "summed_bytes",
]

Named = Mapping[str, Any]
HOST = 8  # GPUs that one host usually has
NETWORK = 50e9  # bytes per second that a GPU sends to other hosts: 400 Gb/s
LINK_UTILISATION = 2 / 3  # part of a link's speed that an all-to-all reaches: 300 of 450 GB/s on H100
# Of one H100: bytes per second that it sends to another one of its host, from the data sheet; bytes of its memory; and
# multiply-adds that the kernels of the delta rules reach in 16 bits. With wider numbers they reach as many bytes of operands.
H100_LINK = 450e9
MEMORY_PER_SECOND = 2.5e12
MACS_PER_SECOND = 2.6e13
BACKWARD = 1.7  # operations, per operation of the forward


def estimate_seconds(
    spec: OpSpec, inputs: Named, sizes: Sizes, ranks: int, count: int | None, backend: str
) -> dict[str, float]:
    """What each way adds to a forward and backward of one process, for a rule that has both ways.

    Args:
        inputs: by name; tensors of the process, or of their shapes on the device "meta".
        sizes: of the process.
        ranks: number of processes.
        count: number of packed sequences; None where none are packed.
        backend: of the op. Inputs without numbers are taken to be those of a GPU.
    """
    sent = {way: exchanged_bytes(spec, inputs, sizes, ranks, way, count is not None) for way in ("heads", "state")}
    seconds = {way: 2 * found / link_speed(H100_LINK, ranks) for way, found in sent.items()}
    x = first_input(inputs)
    seconds["state"] += (1 + BACKWARD) * extra_macs(spec, sizes, x, backend) / (MACS_PER_SECOND * 2 / x.itemsize)
    if count is not None:  # the states of all sequences are written and read, forward and backward
        states = count * sum(math.prod(sizes.shape(state.dims)) for state in spec.states.values())
        seconds["state"] += 4 * states * 2 * compute_dtype(x).itemsize / MEMORY_PER_SECOND
    return seconds


def link_speed(link: float, processes: int) -> float:
    """Bytes per second that each of so many neighbouring processes sends. link: of a GPU within a host, from its data sheet."""
    return LINK_UTILISATION * (link if processes <= HOST else min(link, NETWORK))


def most_columns(spec: OpSpec, x: Tensor, backend: str) -> int:
    """The value columns that one call takes by its kernels; those of PyTorch's form where it has none."""
    form = spec.backends.get("triton") if backend in ("auto", "triton") else None
    return (None if form is None else form.most_channels(x.dtype)) or LARGEST_HEAD


def exchanged_bytes(spec: OpSpec, inputs: Named, sizes: Sizes, ranks: int, way: str, packed: bool) -> float:
    """What each of so many processes sends for one call, in the forward, and as much in the backward.

    Args:
        inputs, sizes: as for `estimate_seconds`.
        way: "heads" or "state".
        packed: whether the row holds several sequences, of which one at most goes on at a border.
    """
    tokens = {name: x for name, x in inputs.items() if name not in spec.parameters and x is not None}
    first = first_input(tokens)
    if way == "heads":
        units = choose_units((sizes.H, sizes.G), ranks)
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
            g = None if passed.decay is None else inputs[passed.decay]
            kept = sizes.G * (sizes.K if g is not None and g.ndim == 4 else 1)
            sent += (numbers + kept) * (passed.dtype or compute_dtype(first)).itemsize
    return (ranks - 1) * (1 if packed else sizes.B) * sent


def summed_bytes(spec: OpSpec, inputs: Named, sizes: Sizes) -> float:
    """What a process holds in the backward of one call in way "state" to form the sums again: weighted x and y of each, and
    their gradients."""
    assert spec.passing is not None
    operands = {}
    for passed in spec.passing.sums.values():
        itemsize = (passed.dtype or compute_dtype(first_input(inputs))).itemsize
        for operand in ((passed.x, passed.gain, passed.decay), (passed.y,)):
            operands[operand] = sizes.G * math.prod(inputs[operand[0]].shape[3:]) * itemsize
    return 2 * sizes.B * sizes.T * sum(operands.values())


def extra_macs(spec: OpSpec, sizes: Sizes, x: Tensor, backend: str) -> float:
    """The multiply-adds by which the forward of one process grows in way "state". x: an input."""
    assert spec.passing is not None
    K, V = sizes.K, sizes.V
    macs = spec.macs or (lambda K, V: sizes.R * (3 * K * V + 64 * (K + V)))
    per_token = 0.0
    for name, passed in spec.passing.states.items():
        again = math.prod(sizes.shape(spec.states[name].dims)) / sizes.G
        if not isinstance(passed, Transition):
            per_token += again
        elif part_kernels(spec, x, backend) is None:
            wider = macs(K, K) if most_columns(spec, x, backend) < V + K else macs(K, V + K) - macs(K, V)
            per_token += again + wider
    return sizes.B * sizes.T * sizes.G * per_token
