"""The backends in PyTorch: a loop over tokens, a form over chunks, a composition of other ops. They share the work around an
implementation: dtypes, heads, first states, the scale, numbers that are not finite, and nodes of traced graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .checks import Sizes, as_tuple, check_limits, compute_dtype, first_state
from .node import Tensors, declare_node
from .nonfinite import Quarantine, quarantine_is_needed, zero_nonfinite
from .sequences import Groups, Sequences, check_cu_seqlens
from .spec import OpSpec, Parameter, Role, Scale

__all__ = [
    "Arguments",
    "InPyTorch",
    "Results",
    "chunkwise",
    "composed",
    "expand_heads",
    "first_input",
    "sequential",
    "stack_time",
]

Named = Mapping[str, Any]  # tensors, or options
Results = tuple[Any, Sequence[Any]]  # the outputs, one or a tuple, and the final states


class Arguments(NamedTuple):
    """The checked arguments of one call, by name. Parameters are tensors of their full shape; a state that is not given is
    None."""

    inputs: Named
    states: Named
    options: Named
    cu_seqlens: Tensor | None
    final: bool
    backend: str


def first_input(inputs: Named) -> Tensor:
    return next(iter(inputs.values()))


@dataclass(eq=False)
class composed:
    """A composition of other ops, which torch.compile traces through. As backend "triton" it makes these ops use their
    kernels.

    Args:
        function: takes inputs, states (None where not given), options, output_final_state, cu_seqlens and backend by name. It
            returns the outputs and a tuple of the final states.
        only, widest: as for `kernels`.
    """

    function: Callable[..., Results]
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    widest: int | None = None

    def most_channels(self, dtype: torch.dtype) -> int | None:
        return self.widest

    def bind(self, spec: OpSpec, backend: str) -> None:
        self.backend = backend

    def run(self, x: Arguments) -> tuple[Sequence[Any], Sequence[Any]]:
        o, final = self.function(
            **x.inputs, **x.states, **x.options, output_final_state=x.final, cu_seqlens=x.cu_seqlens,
            backend="triton" if self.backend == "triton" else x.backend,
        )  # fmt: skip
        return as_tuple(o), final


class InPyTorch:
    """A backend in PyTorch: plain autograd when called eagerly, one node of a traced graph. Inside, all tensors have the dtype
    of the computation and as many heads as the values, and no number is infinite or NaN."""

    def __init__(self, function: Callable[..., tuple[Any, Sequence[Tensor]]]) -> None:
        self.function = function

    def bind(self, spec: OpSpec, backend: str) -> None:
        self.spec = spec
        self.node = declare_node(spec, backend, self)

    def run(self, x: Arguments) -> tuple[Sequence[Any], Sequence[Any]]:
        tensors = (*x.inputs.values(), *x.states.values(), x.cu_seqlens)
        if torch.compiler.is_compiling():
            results = self.node(tensors, tuple(x.options.values()))
        elif first_input(x.inputs).is_meta:  # no numbers to compute with
            results = list(self.fake(tensors, tuple(x.options.values()))[0])
        else:
            sequences = check_cu_seqlens(x.cu_seqlens, *first_input(x.inputs).shape[:2], read=True)
            results = self.compute(x.inputs, x.states, x.options, sequences, x.final)
        return results[: len(self.spec.outputs)], results[len(self.spec.outputs) :]

    def compute(
        self, inputs: Named, states: Named, options: Named, sequences: Sequences, wanted: bool = True
    ) -> list[Any]:
        """The outputs in the dtype of the inputs and, where they are wanted, the final states in that of the computation."""
        spec = self.spec
        roles, like = spec.inputs, first_input(inputs)
        sizes, dtype = read_sizes(spec, inputs, states), compute_dtype(like)
        tokens = {
            name: expand_heads(x.to(dtype), sizes.G)
            for name, x in inputs.items()
            if x is not None and isinstance(roles[name], Role)
        }
        parameters = {name: x for name, x in inputs.items() if isinstance(roles[name], Parameter)}
        held = {name: x for name, x in states.items() if x is not None}
        needs_quarantine = quarantine_is_needed(spec, tokens, held)
        for name, state in spec.states.items():
            if name not in held:  # the same for all sequences, in memory once
                first = first_state(spec, name, sizes, 1 if state.first is None else sequences.count, like)
                held[name] = first.expand(sequences.count, *first.shape[1:])
            elif state.symmetric:  # every solver then reads the same matrix and has the same gradient
                held[name] = 0.5 * (held[name] + held[name].mT)
        quarantine = None
        if needs_quarantine:
            quarantine = Quarantine(spec, tokens, held, sequences)
            tokens, held = zero_nonfinite(spec, tokens), zero_nonfinite(spec, held)
        plain = dict(options)
        for name, option in spec.options.items():
            if isinstance(option, Scale):
                scale = plain.pop(name)
                scaled = [x for x, role in roles.items() if isinstance(role, Role) and role.scaled]
                tokens |= {x: tokens[x] * scale for x in scaled if scale != 1.0}
        absent = {name: None for name, x in inputs.items() if x is None}
        with disable_autocast(like.device):
            o, final = self.run_sequences(sequences, {**tokens, **absent}, held, {**parameters, **plain}, wanted)
            results = dict(zip((*spec.outputs, *spec.states), (*as_tuple(o), *(final if wanted else ()))))
            if quarantine is not None:
                results = {name: quarantine.mark(name, x) for name, x in results.items()}
        outputs = [results[name].to(like.dtype) for name in spec.outputs]
        return outputs + [results[name].contiguous() if wanted else None for name in spec.states]

    def run_sequences(self, sequences: Sequences, tokens: Named, states: Named, rest: Named, wanted: bool) -> Results:
        raise NotImplementedError

    # As the rule of a node: see `NodeRule`.

    def _named(self, tensors: Tensors) -> tuple[dict[str, Any], dict[str, Any], Tensor | None]:
        *given, cu_seqlens = tensors
        return (
            dict(zip(self.spec.inputs, given)),
            dict(zip(self.spec.states, given[len(self.spec.inputs) :])),
            cu_seqlens,
        )

    def forward(self, tensors: Tensors, options: Sequence[Any], save: bool) -> tuple[Tensors, Tensors]:
        inputs, states, cu_seqlens = self._named(tensors)
        for name, role in self.spec.inputs.items():
            if isinstance(role, Role) and inputs[name] is not None:
                check_limits(name, inputs[name], role)  # no numbers could be read while the graph was traced
        sequences = check_cu_seqlens(cu_seqlens, *first_input(inputs).shape[:2], read=True)
        return self.compute(inputs, states, dict(zip(self.spec.options, options)), sequences), ()

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        spec, (inputs, states, cu_seqlens) = self.spec, self._named(tensors)
        sizes, like = read_sizes(spec, inputs, states), first_input(inputs)
        count = sizes.B if cu_seqlens is None else cu_seqlens.shape[0] - 1
        outputs = [like.new_empty((sizes.B, sizes.T, *sizes.shape(x.dims))) for x in spec.outputs.values()]
        dtype = compute_dtype(like)
        return [
            *outputs,
            *(like.new_empty((count, *sizes.shape(x.dims)), dtype=dtype) for x in spec.states.values()),
        ], ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        """By running the forward once more."""
        leaves = [x if x is None else x.detach().requires_grad_(needs) for x, needs in zip(tensors, needed)]
        with torch.enable_grad():
            results, _ = self.forward(leaves, options, False)
        reached = [(x, g) for x, g in zip(results, output_grads) if g is not None and x is not None and x.requires_grad]
        wanted = [x for x in leaves if x is not None and x.requires_grad]
        if not reached:
            return [None] * len(leaves)
        values, grads = zip(*reached)
        found = iter(torch.autograd.grad(values, wanted, grads, allow_unused=True))
        return [next(found) if x is not None and x.requires_grad else None for x in leaves]


class sequential(InPyTorch):
    """A loop over the tokens of [B, T, ...]; packed sequences are served one after the other."""

    def run_sequences(self, sequences: Sequences, tokens: Named, states: Named, rest: Named, wanted: bool) -> Results:
        if sequences.lengths is None:
            return self.function(**tokens, **states, **rest)
        given: dict[str, Sequence[Any]] = {
            # One split, whose gradient is one concatenation: that of a slice is as long as the row, for every sequence.
            name: [None] * sequences.count if x is None else x.split(list(sequences.lengths), 1)
            for name, x in tokens.items()
        }
        given |= {name: s.split(1) for name, s in states.items()}
        outputs, finals = [], []
        for n in range(sequences.count):
            o, final = self.function(**{name: parts[n] for name, parts in given.items()}, **rest)
            outputs.append(as_tuple(o))
            finals.append(final)
        return tuple(torch.cat(parts, 1) for parts in zip(*outputs)), tuple(torch.cat(parts) for parts in zip(*finals))


class chunkwise(InPyTorch):
    """A form over chunks of tokens, which takes the sequences. It gets packed sequences in `Groups` of about the same length."""

    def run_sequences(self, sequences: Sequences, tokens: Named, states: Named, rest: Named, wanted: bool) -> Results:
        if sequences.lengths is None:
            return self.function(**tokens, **states, sequences=sequences, **rest)
        groups = Groups(sequences, list(states.values()))
        if len(groups.sequences) == 1:
            return self.function(**tokens, **states, sequences=sequences, **rest)
        given = {name: groups.split_tokens(x) for name, x in tokens.items() if x is not None}
        given |= {name: groups.split_rows(s) for name, s in states.items()}
        outputs, finals = [], []
        for n, group in enumerate(groups.sequences):
            of_group = {name: parts[n] for name, parts in given.items()}
            o, final = self.function(**{**tokens, **of_group}, sequences=group, **rest)
            outputs.append(as_tuple(o))
            finals.append(final)
        o = tuple(map(groups.merge_tokens, zip(*outputs)))
        return o, tuple(map(groups.merge_rows, zip(*finals))) if wanted else ()


def read_sizes(spec: OpSpec, inputs: Named, states: Named) -> Sizes:
    """The sizes of checked arguments."""
    sizes: dict[str, int] = {}
    heads = [x.shape[1] for x in states.values() if x is not None]
    for name, role in spec.inputs.items():
        x = inputs[name]
        if x is None or not isinstance(role, Role):
            continue
        sizes |= {"B": x.shape[0], "T": x.shape[1]}
        heads.append(x.shape[2])
        sizes |= dict(zip(role.dims[-1][1:], x.shape[3:]))
        if role.dims == ("HK",):
            sizes["H"] = x.shape[2]
    return Sizes(**{"H": 0, "V": sizes["K"], **sizes}, G=max(heads))


def disable_autocast(device: torch.device) -> AbstractContextManager:
    """Under autocast, too, float32 tensors stay float32 inside."""
    # Asked of rare devices alone: torch.compile cannot trace the question.
    if device.type not in ("cpu", "cuda") and not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """[B, T, h, ...] -> [B, T, heads, ...]: each of h heads serves heads/h heads in a row."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], 2)


def stack_time(outputs: Sequence[Tensor], like: Tensor) -> Tensor:
    """Outputs of a loop over tokens, [B, H, ...] each -> [B, T, H, ...]; without a token `like`, which is as empty."""
    return torch.stack(list(outputs), 1) if outputs else like
