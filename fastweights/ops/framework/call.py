"""An op as an object, and the one way into it: check the arguments by its declaration, choose a backend, run it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from ...checks import check_flag, check_size
from ...kernels.availability import takes_kernels
from ..context_parallel.agreement import check_on_all_ranks
from ..context_parallel.ways import Divided, choose_way, divide, run_divided
from . import checks
from .checks import Sizes, as_tuple, compute_dtype, first_state, is_short, unwrap
from .few_tokens import defer_decode, needs_gradient, recurrent
from .in_place import InPlace, update_state
from .in_place_form import OF_STATE, make_in_place
from .in_torch import Arguments, Results, chunkwise, composed, expand_heads, first_input, sequential, stack_time
from .kernel_backend import defer_family, kernels
from .sequences import check_cu_seqlens
from .spec import BACKENDS, OpSpec, count_numbers

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from ..context_parallel.group import ContextParallel

__all__ = [
    "Arguments",
    "InPlace",
    "Op",
    "Results",
    "call",
    "choose_backend",
    "chunkwise",
    "composed",
    "defer_decode",
    "defer_family",
    "expand_heads",
    "kernels",
    "op",
    "recurrent",
    "run",
    "sequential",
    "stack_time",
]

MAX_REMEMBERED = 1024
P = ParamSpec("P")
R = TypeVar("R")
# What `call` gets after the declaration, in its order.
Given = tuple[Sequence[Any], Mapping[str, Any], Any, bool, Tensor | None, str]


class Checked(NamedTuple):
    """What the checks of a call find out. It depends on shapes, dtypes, devices and options alone."""

    implementation: Any
    recurrent: bool  # whether the recurrent kernel runs in its place if no gradient is needed
    sizes: Sizes
    options: Mapping[str, Any]
    dtype: torch.dtype
    way: str | None  # by which it runs on tokens that are divided over processes


# Calls of kernels that passed the checks, by `call_key`. Their numbers are not read, so the next one would pass as well.
_passed: dict[Any, Checked] = {}


class Op(Generic[P, R]):
    """A memory rule. It is called as the function that it is made of, and has the name, the signature and the docstring of that,
    with one more keyword, `cp_group`.

    Attributes:
        spec: the declaration.
        in_place: the op for decoding. It takes the same inputs and options, and in the place of `initial_state` a `state` that
            it overwrites. Its docstring says more.
    """

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], spec: OpSpec) -> None:
        functools.update_wrapper(self, function)
        self.__signature__ = add_group(inspect.signature(function))
        self.__doc__ = describe_group(function.__doc__)
        self.function = function
        self.spec = spec
        self.in_place = make_in_place(self)

    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...

    @overload
    def __call__(self, *args: Any, cp_group: ContextParallel | ProcessGroup, **kwargs: Any) -> R: ...

    def __call__(self, *args: Any, cp_group: Any = None, **kwargs: Any) -> Any:
        if cp_group is not None:
            kwargs["initial_state"] = divide(kwargs.get("initial_state"), cp_group)
        return self.function(*args, **kwargs)

    def state_size(self, heads: int, key: int, value: int) -> int:
        """Numbers that the state of one sequence holds.

        Args:
            heads: number of value heads.
            key, value: key and value channels per head.
        """
        for name, size in {"heads": heads, "key": key, "value": value}.items():
            check_size(name, size)
        return count_numbers(self.spec.states.values(), heads, key, value)

    def __get__(self, instance: object, owner: type | None = None) -> Op[P, R]:
        return self  # unlike a function, an op that is an attribute of a class does not become a method of it

    def __reduce__(self) -> str:
        return self.__qualname__  # pickled by its name, as a function is

    def __repr__(self) -> str:
        return f"<op {self.__module__}.{self.__qualname__}>"


OF_GROUP = """\
    cp_group: where one sequence is divided over several processes, all of which make this call: the
        `torch.distributed.ProcessGroup` or the `ContextParallel` that they form. In order of their ranks they hold parts of
        equal length, and get theirs of the output. cu_seqlens and the states are those of whole sequences, the same on every
        rank."""


def add_group(signature: inspect.Signature) -> inspect.Signature:
    """The signature of an op, of which the function takes all but the group."""
    parameters = list(signature.parameters.values())
    group = inspect.Parameter(
        "cp_group", inspect.Parameter.KEYWORD_ONLY, default=None, annotation="ProcessGroup | ContextParallel | None"
    )
    last = next((i for i, p in enumerate(parameters) if p.kind == p.VAR_KEYWORD), len(parameters))
    return signature.replace(parameters=[*parameters[:last], group, *parameters[last:]])


def describe_group(doc: str | None) -> str | None:
    """A docstring with the group as the last argument, where it has a section of arguments."""
    before, returns, rest = inspect.cleandoc(doc or "").partition("\n\nReturns:\n")
    return f"{before}\n{OF_GROUP}{returns}{rest}" if returns and "\nArgs:\n" in before else doc


def op(spec: OpSpec) -> Callable[[Callable[P, R]], Op[P, R]]:
    """Make an op of a function: the decorator of a rule's public function, with the rule's declaration.

    Raises:
        TypeError: spec is no `OpSpec`.
        ValueError: the function lacks an input or an option of the declaration, or one of initial_state, output_final_state,
            cu_seqlens and backend.
    """
    if not isinstance(spec, OpSpec):
        raise TypeError(
            f"spec must be the OpSpec of the rule, got {type(spec).__name__}; write @op(SPEC) over the function"
        )

    def decorate(function: Callable[P, R]) -> Op[P, R]:
        parameters = inspect.signature(function).parameters
        missing = [name for name in (*spec.inputs, *spec.options, *OF_STATE) if name not in parameters]
        if missing:
            raise ValueError(
                f"{function.__name__} must take {', '.join(missing)}, as the declaration of {spec.name!r} and every op has it"
            )
        return Op(function, spec)

    return decorate


def call(
    spec: OpSpec,
    inputs: Sequence[Any],
    options: Mapping[str, Any],
    initial_state: Any,
    output_final_state: bool,
    cu_seqlens: Tensor | None,
    backend: str,
) -> tuple[Any, Any]:
    """Run an op: (o, final state or None). Several outputs are a tuple, and so are several states. With `InPlace` as the initial
    state the final state overwrites the one that it holds, and the second result is None."""
    if initial_state.__class__ is InPlace:
        return unwrap(update_state(call, spec, inputs, options, initial_state, cu_seqlens, backend)), None
    if initial_state.__class__ is Divided:
        initial_state, cp = initial_state
        return call_divided(spec, cp, (inputs, options, initial_state, output_final_state, cu_seqlens, backend))
    checked = check_once(spec, (inputs, options, initial_state, output_final_state, cu_seqlens, backend))
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
            named[name] = checks.expand_parameter(named[name], role, checked.sizes, inputs[0])
    arguments = Arguments(named, states, checked.options, cu_seqlens, output_final_state, backend)
    if recurs:
        outputs, final = spec.recurrent.run(arguments, checked.sizes)
    else:
        outputs, final = checked.implementation.run(arguments)
    return unwrap(outputs), unwrap(final) if output_final_state else None


def call_divided(spec: OpSpec, cp: ContextParallel, given: Given) -> tuple[Any, Any]:
    """As `call` on this process's part of the tokens; the states are those of whole sequences."""
    inputs, options, initial_state, final, cu_seqlens, backend = given
    named = {**dict(zip(spec.inputs, inputs)), **options, "initial_state": initial_state, "output_final_state": final}
    named |= {"op": spec.name, "cu_seqlens": cu_seqlens, "backend": backend, "way": cp.way}
    checked = check_on_all_ranks(cp, lambda: check_once(spec, given, cp), named)
    assert checked.way is not None
    outputs, states = run_divided(checked.way, call, spec, cp, checked.sizes, given)
    return unwrap(outputs), None if states is None else unwrap(states)


def check_once(spec: OpSpec, given: Given, cp: ContextParallel | None = None) -> Checked:
    """What `check_call` finds out, from an earlier call where that is the same."""
    inputs, *_, cu_seqlens, _ = given
    key = None if torch.compiler.is_compiling() else call_key(spec, given)
    checked = None
    if key is not None:
        key = (cp, *key)
        try:
            checked = _passed.get(key)
        except TypeError:  # some argument cannot be hashed
            key = None
    if checked is None:
        checked = check_call(spec, given, cp)
        by_kernels = checked.recurrent or isinstance(checked.implementation, kernels)
        if key is not None and by_kernels and not checks.values_can_be_read(inputs[0]):
            if len(_passed) >= MAX_REMEMBERED:
                _passed.clear()
            _passed[key] = checked
    elif cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, checked.sizes.B, (1 if cp is None else cp.size) * checked.sizes.T)
    return checked


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


def check_call(spec: OpSpec, given: Given, cp: ContextParallel | None = None) -> Checked:
    """cp: the processes that a sequence is divided over."""
    inputs, options, initial_state, final, cu_seqlens, backend = given
    sizes = checks.check_inputs(spec, inputs)
    values = checks.check_options(spec, options, sizes)
    check_flag("output_final_state", final)
    like, whole = inputs[0], sizes.T if cp is None else cp.size * sizes.T
    count = sizes.B if cu_seqlens is None else check_cu_seqlens(cu_seqlens, sizes.B, whole, like=like).count
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
    way = None if cp is None else choose_way(spec, cp, sizes, given)
    return Checked(implementation, recurs, sizes, values, compute_dtype(like), way)


def run(spec: OpSpec, x: Arguments) -> tuple[Sequence[Any], Sequence[Any]]:
    """The outputs and the final states for checked arguments."""
    return spec.backends[choose_backend(spec, x.backend, first_input(x.inputs), x.options)].run(x)


def choose_backend(spec: OpSpec, backend: str, x: Tensor, options: Mapping[str, Any], width: int = 0) -> str:
    """The name of the backend that runs: an explicit one, or for "auto" the kernels where they take x, these options and `width`
    key or value channels, else the chunkwise form."""
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
