"""The run around an implementation: choice of backend, precision, heads, packed rows, bad numbers, results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from .checks import check_log_decay, constant
from .nonfinite import Quarantine, clean
from .sequences import Sequences, check_cu_seqlens
from .traced import computes, run_as_node

Chosen = TypeVar("Chosen")
BACKENDS = ("auto", "reference", "torch", "triton")


def compute_dtype(x: Tensor) -> torch.dtype:
    """States and sums are float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def select_backend(op: str, backend: str, available: Mapping[str, Chosen], x: Tensor) -> Chosen:
    """The implementation of an explicit backend, or for "auto" the kernels on CUDA and the chunkwise form elsewhere."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "auto":
        backend = "triton" if "triton" in available and takes_kernels("auto", x) else "torch"
    if backend not in available:
        raise ValueError(
            f"backend {backend!r} is missing for {op}: it has {', '.join(available)}; use one of them or 'auto'"
        )
    if backend == "triton":
        takes_kernels("triton", x)
    return available[backend]


class Implementation:
    """One backend of an op: f(tokens..., states..., options...) -> (o, final states) by name, found again by its module.
    A rule with several outputs returns a tuple of them for o."""

    by_name: ClassVar[dict[str, Implementation]] = {}

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.name = f"{function.__module__}.{function.__qualname__}"
        self.by_name[self.name] = self

    def __call__(
        self, sequences: Sequences, states: Mapping[str, Tensor], tokens: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        raise NotImplementedError


class per_sequence(Implementation):
    """A sequential implementation over [B, T, ...]; packed rows are served one sequence after the other."""

    def __call__(
        self, sequences: Sequences, states: Mapping[str, Tensor], tokens: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        if sequences.lengths is None:
            return self.function(**tokens, **states, **options)
        outputs, finals, start = [], [], 0
        for n, length in enumerate(sequences.lengths):
            part = {name: x if x is None else x[:, start : start + length] for name, x in tokens.items()}
            o, final = self.function(**part, **{name: s[n : n + 1] for name, s in states.items()}, **options)
            outputs.append(_as_tuple(o))
            finals.append(final)
            start += length
        joined = tuple(torch.cat(parts, 1) for parts in zip(*outputs))
        return _alone(joined), tuple(torch.cat(parts) for parts in zip(*finals))


class chunkwise(Implementation):
    """A chunkwise implementation, which takes the sequences as well."""

    def __call__(
        self, sequences: Sequences, states: Mapping[str, Tensor], tokens: Mapping[str, Any], options: Mapping[str, Any]
    ) -> tuple[Any, Sequence[Tensor]]:
        return self.function(**tokens, **states, sequences=sequences, **options)


class kernels(chunkwise):
    """Kernels, which take the inputs as they are: dtypes, heads and scale, None for an initial state of zeros. They keep bad
    numbers apart themselves, and are a node of a traced graph themselves."""


def run(
    implementation: Implementation,
    *,
    tokens: Mapping[str, Tensor | None],
    states: Mapping[str, Tensor],
    sequences: Sequences,
    heads: int,
    columns: Collection[str],
    local: Collection[str] = ("q",),
    outputs: Sequence[str] = ("o",),
    reach: Mapping[str, Collection[str]] | None = None,
    scale: float = 1.0,
    out_dtype: torch.dtype,
    output_final_state: bool,
    **options: Any,
) -> tuple[Any, Any]:
    """Run an implementation in the precision of the states and give back (o, final state or None), o being a tuple where
    the rule has several `outputs`.

    tokens: inputs [B, T, heads or fewer, ...] by name, None where absent; states: initial states by name, in the order
    of the result; columns, local: see Quarantine (a local input reaches only its own token's output); reach: for an output
    or a state, the names it depends on where these are not all but the local ones.
    """
    if isinstance(implementation, kernels):
        call = {**options, "scale": scale, "final": output_final_state}
        o, final = implementation(sequences, states, tokens, call)
        return o, _alone(tuple(final)) if output_final_state else None
    dtype = next(x.dtype for x in states.values() if x.is_floating_point())
    given = {name: expand_heads(x.to(dtype), heads) for name, x in tokens.items() if x is not None}
    plain = {
        "tokens": tuple(tokens),
        "states": tuple(states),
        "columns": tuple(columns),
        "local": tuple(local),
        "outputs": tuple(outputs),
        "reach": None if reach is None else tuple((name, tuple(names)) for name, names in reach.items()),
        "scale": constant(scale),
        "options": tuple((name, constant(x)) for name, x in options.items() if not isinstance(x, Tensor)),
    }
    tensors = {**given, **states, **{name: x for name, x in options.items() if isinstance(x, Tensor)}}
    if torch.compiler.is_compiling():
        if sequences.cu_seqlens is not None:
            tensors["cu_seqlens"] = sequences.cu_seqlens
        like_o = next((name for name in columns if name in tokens), "v")
        like = (like_o,) * len(outputs) + tuple(states)
        results = run_as_node(implementation.name, like=like, tensors=tensors, plain=plain)
    else:
        results = compute(implementation.name, tensors, plain, sequences)
    o = _alone(tuple(x.to(out_dtype) for x in results[: len(outputs)]))
    return o, _alone(tuple(results[len(outputs) :])) if output_final_state else None


def compute(
    implementation: str, tensors: Mapping[str, Tensor], plain: Mapping[str, Any], sequences: Sequences | None = None
) -> list[Tensor]:
    """The outputs and the final states in the precision of the states. Without `sequences`, these are read from the tensors."""
    given = {name: tensors[name] for name in plain["tokens"] if name in tensors}
    held = {name: tensors[name] for name in plain["states"]}
    options = {**dict(plain["options"]), **{n: x for n, x in tensors.items() if n not in (*given, *held, "cu_seqlens")}}
    if sequences is None:
        batch, time = next(iter(given.values())).shape[:2]
        sequences = check_cu_seqlens(tensors.get("cu_seqlens"), batch, time)
        for name, x in given.items():
            check_log_decay(name, x)
    quarantine = None
    if Quarantine.is_needed(given, held):
        quarantine = Quarantine(given, held, sequences, plain["columns"])
        given = {name: clean(name, x) for name, x in given.items()}
        held = {name: clean(name, x) for name, x in held.items()}
    if plain["scale"] != 1.0:
        given["q"] = given["q"] * plain["scale"]
    with without_autocast(next(iter(held.values())).device):
        tokens = {name: given.get(name) for name in plain["tokens"]}
        o, final = Implementation.by_name[implementation](sequences, held, tokens, options)
        results = dict(zip((*plain["outputs"], *held), (*_as_tuple(o), *final)))
        if quarantine is not None:
            everything = [name for name in (*given, *held) if name not in plain["local"]]
            reach = dict(plain["reach"] or ())
            for name, x in results.items():
                names = reach.get(name, everything)
                if name in held:
                    results[name] = quarantine.mark_state(name, x, names)
                else:
                    results[name] = quarantine.mark_output(x, names, plain["local"])
    return list(results.values())


computes(compute)


def without_autocast(device: torch.device) -> AbstractContextManager:
    """What is float32 stays float32 inside."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _as_tuple(x: Any) -> tuple[Any, ...]:
    return x if isinstance(x, tuple) else (x,)


def _alone(xs: tuple[Any, ...]) -> Any:
    """One result by itself, several as a tuple."""
    return xs[0] if len(xs) == 1 else xs


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, h, ...] -> [B, T, heads, ...]: each of h heads serves heads/h heads in a row."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def stack_time(outputs: Sequence[Tensor], like: Tensor) -> Tensor:
    """Outputs of a loop over tokens, [B, H, ...] each -> [B, T, H, ...]; without a token `like`, which is as empty."""
    return torch.stack(list(outputs), 1) if outputs else like
