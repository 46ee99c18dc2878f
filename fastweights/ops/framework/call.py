"""The one way into an op: check the arguments by its declaration, choose a backend, run it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import check_flag
from ...kernels.availability import takes_kernels
from . import checks
from .checks import Sizes, as_tuple, compute_dtype, first_state, is_short, unwrap
from .few_tokens import needs_gradient, recurrent
from .in_place import InPlace, update_state
from .in_torch import Arguments, Results, chunkwise, composed, expand_heads, first_input, sequential, stack_time
from .kernel_backend import kernels
from .sequences import check_cu_seqlens
from .spec import BACKENDS, OpSpec

__all__ = [
    "Arguments",
    "InPlace",
    "Results",
    "call",
    "choose_backend",
    "chunkwise",
    "composed",
    "expand_heads",
    "kernels",
    "recurrent",
    "run",
    "sequential",
    "stack_time",
]

MAX_REMEMBERED = 1024
# What `call` gets after the declaration, in its order.
Given = tuple[Sequence[Any], Mapping[str, Any], Any, bool, Tensor | None, str]


class Checked(NamedTuple):
    """What the checks of a call find out, which depends on shapes, dtypes, devices and options alone."""

    implementation: Any
    recurrent: bool  # whether the recurrent kernel runs in its place if no gradient is needed
    sizes: Sizes
    options: Mapping[str, Any]
    dtype: torch.dtype


# Calls of kernels that passed the checks, by `call_key`. Their numbers are not read, so the next one would pass as well.
_passed: dict[Any, Checked] = {}


def call(
    spec: OpSpec,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Any, Any]:
    """(o, final state or None). o is a tuple where the op has several outputs, and so is the state. With `InPlace` as the
    initial state the final state takes the place of the one that it holds, and None is returned for it."""
    if initial_state.__class__ is InPlace:
        return update_state(call, spec, inputs, options, initial_state, cu_seqlens, backend), None
    given = (inputs, options, initial_state, output_final_state, cu_seqlens, backend)
    key = None if torch.compiler.is_compiling() else call_key(spec, given)
    checked = None
    if key is not None:
        try:
            checked = _passed.get(key)
        except TypeError:  # some argument cannot be hashed
            key = None
    if checked is None:
        checked = check_call(spec, given)
        by_kernels = checked.recurrent or isinstance(checked.implementation, kernels)
        if key is not None and by_kernels and not checks.values_can_be_read(inputs[0]):
            if len(_passed) >= MAX_REMEMBERED:
                _passed.clear()
            _passed[key] = checked
    elif cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, checked.sizes.B, checked.sizes.T)
    named = dict(zip(spec.inputs, inputs))
    if initial_state is None:
        states = dict.fromkeys(spec.states)
    else:
        states = {
            name: x if x.dtype == checked.dtype or spec.states[name].counts else x.to(checked.dtype)
            for name, x in zip(spec.states, as_tuple(initial_state))
        }
    recurs = checked.recurrent and not needs_gradient(named, states)
    for name, role in spec.parameters.items():
        if recurs:
            named[name] = spec.recurrent.parameter(name, named[name], checked.sizes, inputs[0])
        else:
            named[name] = checks.full_parameter(named[name], role, checked.sizes, inputs[0])
    arguments = Arguments(named, states, checked.options, cu_seqlens, output_final_state, backend)
    if recurs:
        outputs, final = spec.recurrent.run(arguments, checked.sizes)
    else:
        outputs, final = checked.implementation.run(arguments)
    return unwrap(outputs), unwrap(final) if output_final_state else None


def call_key(spec: OpSpec, given: Given) -> Any:
    """All that the checks look at when they read no numbers; None where a tensor has no shape."""
    inputs, options, initial_state, final, cu_seqlens, backend = given
    states = initial_state if isinstance(initial_state, tuple) else (initial_state,)
    try:
        tensors = [
            (x.shape, x.dtype, x.device, x.layout) if isinstance(x, Tensor) else (x.__class__, x)
            for x in (*inputs, *states, cu_seqlens)
        ]
    except RuntimeError:  # a nested tensor has no shape
        return None
    plain = [(x.__class__, x) for x in (*options.values(), final, backend)]
    return spec, isinstance(initial_state, tuple), *tensors, *plain


def check_call(spec: OpSpec, given: Given) -> Checked:
    inputs, options, initial_state, final, cu_seqlens, backend = given
    sizes = checks.check_inputs(spec, inputs)
    values = checks.check_options(spec, options, sizes)
    check_flag("output_final_state", final)
    count = sizes.B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, sizes.B, sizes.T, like=inputs[0]).count
    like = inputs[0]
    implementation = spec.backends[choose_backend(spec, backend, like, values, max(sizes.K, sizes.V))]
    recurs = (
        spec.recurrent is not None
        and not torch.compiler.is_compiling()  # whose graphs must not depend on whether sequences are short
        and is_short(like, cu_seqlens)
        and spec.recurrent.serves(backend, dict(zip(spec.inputs, inputs)), values, sizes.K, initial_state is not None)
    )
    checks.check_states(spec, initial_state, sizes, count, like)
    if initial_state is None and isinstance(implementation, kernels):  # these make a first state themselves
        for name in spec.states:
            first_state(spec, name, sizes, 0, like)  # refuses sizes that have none
    return Checked(implementation, recurs, sizes, values, compute_dtype(like))


def run(spec: OpSpec, x: Arguments) -> tuple[Sequence[Any], Sequence[Any]]:
    """The outputs and the final states for checked arguments."""
    return spec.backends[choose_backend(spec, x.backend, first_input(x.inputs), x.options)].run(x)


def choose_backend(spec: OpSpec, backend: str, x: Tensor, options: Mapping[str, Any], width: int = 0) -> str:
    """An explicit backend, or for "auto" the kernels where they serve x, the options and so many key or value channels, else the
    chunkwise form."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    available = spec.backends
    form = available.get("triton")
    only, widest = ({}, None) if form is None else (form.only, form.most_channels(x.dtype))
    # By ==: under torch.compile(dynamic=True) a number may be a symbol, which is in no tuple.
    other = next((name for name, served in only.items() if not any(options[name] == x for x in served)), None)
    too_wide = widest is not None and width > widest
    if backend == "auto":
        serves = form is not None and other is None and not too_wide
        return "triton" if serves and takes_kernels("auto", x) else "torch"
    if backend not in available:
        raise ValueError(
            f"backend {backend!r} is missing for {spec.name}: it has {', '.join(available)}; use one of them or 'auto'"
        )
    if backend == "triton":
        if other is not None:
            raise ValueError(
                f"{other} must be {' or '.join(map(repr, only[other]))} with backend 'triton', whose kernels of {spec.name} have "
                f"no other, got {options[other]!r}; use backend 'torch' or 'auto'"
            )
        if too_wide:
            raise ValueError(
                f"q, k and v must have at most {widest} channels with backend 'triton' of {spec.name} in {x.dtype}, got {width}; "
                "use backend 'torch' or 'auto'"
            )
        takes_kernels("triton", x)
    return backend
