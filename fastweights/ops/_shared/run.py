"""The run around an implementation: choice of backend, precision, heads, packed rows, bad numbers, results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .nonfinite import Quarantine, clean
from .sequences import Sequences

Implementation = Callable[..., Any]

BACKENDS = ("auto", "reference", "torch", "triton")


def compute_dtype(x: Tensor) -> torch.dtype:
    """States and sums are float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def select_backend(op: str, backend: str, available: Mapping[str, Implementation], x: Tensor) -> Implementation:
    """The implementation of an explicit backend, or for "auto" the kernels on CUDA and the chunkwise form elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = "triton" if "triton" in available and x.is_cuda else "torch"
    if backend not in available:
        raise ValueError(
            f"backend {backend!r} is missing for {op}: it has {', '.join(available)}; use one of them or 'auto'"
        )
    return available[backend]


def per_sequence(loop: Implementation) -> Implementation:
    """A sequential implementation over [B, T, ...] made to serve packed rows, one sequence after the other."""

    def implementation(
        *, sequences: Sequences, states: Mapping[str, Tensor], tokens: Mapping[str, Any], **options: Any
    ):
        if sequences.lengths is None:
            return loop(**tokens, **states, **options)
        outputs, finals, start = [], [], 0
        for n, length in enumerate(sequences.lengths):
            part = {name: x if x is None else x[:, start : start + length] for name, x in tokens.items()}
            o, final = loop(**part, **{name: s[n : n + 1] for name, s in states.items()}, **options)
            outputs.append(o)
            finals.append(final)
            start += length
        return torch.cat(outputs, 1), tuple(torch.cat(parts) for parts in zip(*finals))

    return implementation


def chunkwise(implementation: Implementation) -> Implementation:
    """A chunkwise implementation, called as f(*, tokens..., states..., sequences, options...)."""

    def run_chunks(*, sequences: Sequences, states: Mapping[str, Tensor], tokens: Mapping[str, Any], **options: Any):
        return implementation(**tokens, **states, sequences=sequences, **options)

    return run_chunks


def run(
    implementation: Implementation,
    *,
    tokens: Mapping[str, Tensor | None],
    states: Mapping[str, Tensor],
    sequences: Sequences,
    heads: int,
    columns: Collection[str],
    local: Collection[str] = ("q",),
    reach: Mapping[str, Collection[str]] | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype,
    output_final_state: bool,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Run an implementation in the precision of the states and give back (o, final state or None).

    tokens: inputs [B, T, heads or fewer, ...] by name, None where absent; states: initial states by name, in the order
    of the result; columns, local: see Quarantine (a local input reaches only its own token's output); reach: for "o" or
    a state, the names it depends on where these are not all but the local ones.
    """
    dtype = next(iter(states.values())).dtype
    device = next(iter(states.values())).device
    given = {name: expand_heads(x.to(dtype), heads) for name, x in tokens.items() if x is not None}
    held = dict(states)
    quarantine = None
    if Quarantine.is_needed(given, held):
        quarantine = Quarantine(given, held, sequences, columns)
        given = {name: clean(name, x) for name, x in given.items()}
        held = {name: clean(name, x) for name, x in held.items()}
    if scale != 1.0:
        given["q"] = given["q"] * scale
    with torch.autocast(device.type, enabled=False):
        o, final = implementation(
            sequences=sequences, states=held, tokens={name: given.get(name) for name in tokens}, **options
        )
        if quarantine is not None:
            everything = [name for name in (*given, *held) if name not in local]
            reach = reach or {}
            o = quarantine.mark_output(o, reach.get("o", everything), local)
            final = tuple(quarantine.mark_state(n, s, reach.get(n, everything)) for n, s in zip(held, final))
    o = o.to(out_dtype)
    if not output_final_state:
        return o, None
    return o, final[0] if len(final) == 1 else tuple(final)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, h, ...] -> [B, T, heads, ...]: each of h heads serves heads/h heads in a row."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def stack_time(outputs: Sequence[Tensor], like: Tensor) -> Tensor:
    """Outputs of a loop over tokens, [B, H, ...] each -> [B, T, H, ...]; without a token `like`, which is as empty."""
    return torch.stack(list(outputs), 1) if outputs else like
