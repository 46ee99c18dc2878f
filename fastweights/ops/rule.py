"""An op as an object: a function of a memory rule that carries its declaration, the size of its state, and the form of it that
updates the state in place."""

from __future__ import annotations

import functools
import inspect
import textwrap
from collections.abc import Callable
from typing import Any, Generic, ParamSpec, TypeVar

from torch import Tensor

from ..checks import check_size
from .framework.checks import FEW_TOKENS, unwrap
from .framework.in_place import InPlace
from .framework.spec import OpSpec, count_numbers

__all__ = ["Op", "op"]

P = ParamSpec("P")
R = TypeVar("R")
OF_STATE = ("initial_state", "output_final_state", "cu_seqlens", "backend")


class Op(Generic[P, R]):
    """A memory rule. It is called as the function that it is made of, and has the name, the signature and the docstring of that.

    Attributes:
        spec: the declaration.
        in_place: the op for decoding. It takes the same inputs and options, and in the place of `initial_state` a `state` that
            it overwrites. Its docstring says more.
    """

    __name__: str
    __qualname__: str

    def __init__(self, function: Callable[P, R], spec: OpSpec) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.spec = spec
        self.in_place = make_in_place(self)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
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


def make_in_place(op: Op[..., Any]) -> Callable[..., Any]:
    function = op.function

    def in_place(
        *inputs: Any,
        state: Any,
        state_indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> Any:
        *outputs, _ = function(
            *inputs,
            **options,
            initial_state=InPlace(state, state_indices),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
        return unwrap(outputs)

    own = inspect.signature(in_place)
    in_place.__module__, in_place.__name__ = op.__module__, f"{op.__name__}_"
    in_place.__qualname__ = f"{op.__qualname__}.in_place"
    in_place.__signature__ = sign_in_place(op, own)  # type: ignore[attr-defined]
    in_place.__doc__ = describe_in_place(op)
    return in_place


def sign_in_place(op: Op[..., Any], own: inspect.Signature) -> inspect.Signature:
    """The parameters of an op, and those that its form in place has in the place of the last ones."""
    whole = inspect.signature(op.function)
    given = [parameter for name, parameter in whole.parameters.items() if name not in OF_STATE]
    added = [own.parameters[name] for name in ("state", "state_indices", "cu_seqlens", "backend")]
    annotation = whole.parameters["initial_state"].annotation
    if isinstance(annotation, str):
        added[0] = added[0].replace(annotation=annotation.removesuffix(" | None"))
    count = len(op.spec.outputs)
    returned = "Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
    return whole.replace(parameters=[*given, *added], return_annotation=returned)


def describe_in_place(op: Op[..., Any]) -> str:
    """The docstring of the form in place: the formulas of the op's own docstring, and the rest from its declaration."""
    name, spec = op.__name__, op.spec
    formulas = [part for part in inspect.cleandoc(op.__doc__ or "").split("\n\n") if part.startswith("$$")]
    inputs = ", ".join(x for x in inspect.signature(op.function).parameters if x not in OF_STATE)
    states = [f"{x} {_shape('N', s.dims)}{' in int64' if s.counts else ''}" for x, s in spec.states.items()]
    arguments = {
        inputs: f"as for `{name}`: [B, T, ...] with T at most {FEW_TOKENS}.",
        "state": f"{_listed(states)}, float32 (float64 for float64 inputs). After the call it holds the state after the last "
        "token; that of a sequence of length 0 does not change. "
        f"Begin with {_listed([s.begins for s in spec.states.values()])}. With state_indices a pool [P, ...].",
        "state_indices": "int32 or int64 [N], the row of the pool that each sequence reads and overwrites. They must not repeat. "
        "With a negative index a sequence has no state: its output is 0, and nothing is written. On a GPU the values are checked "
        "only with FASTWEIGHTS_CHECK_VALUES=1, because that waits for the device.",
        "cu_seqlens": f"int32 or int64 [N+1], cumulative lengths, at most {FEW_TOKENS} each, of sequences packed into one row "
        "(B = 1). Its values are checked as those of state_indices.",
        "backend": describe_backends(spec),
    }
    outputs = {x: _shape("B, T", declared.dims) for x, declared in spec.outputs.items()}
    raises = {
        "ValueError": f"more than {FEW_TOKENS} tokens; an input or a state that requires a gradient outside torch.no_grad(); an "
        f"argument that `{name}` refuses; a state, state_indices, cu_seqlens or backend that does not fit.",
        "TypeError": "an argument of the wrong kind.",
    }
    sections = [
        f"Read at most {FEW_TOKENS} tokens with `{name}` and update its state in place, without gradients.",
        *(formulas or [f"    {spec.equation}"]),
        "Args:\n" + _filled(arguments),
        f"Returns:\n    {', '.join(f'{x} {shape}' for x, shape in outputs.items())} in the dtype of the inputs.",
        "Raises:\n" + _filled(raises),
    ]
    return "\n\n".join(sections)


def describe_backends(spec: OpSpec) -> str:
    others, kernel = f'"torch" or "reference" (those of `{spec.name}`)', spec.recurrent
    if kernel is None:
        return f'{others}, or "auto", which is "torch".'
    limits = [f"{name} {' or '.join(map(repr, served))}" for name, served in kernel.only.items()]
    limits += [f"no {name}" for name in kernel.without]
    limits += [] if kernel.widest is None else [f"at most {kernel.widest} key channels"]
    taken = f" The kernel takes {', '.join(limits)}; other calls run as those of `{spec.name}`." if limits else ""
    return f'"triton" (a kernel), {others}, or "auto": the kernel on CUDA except in float64, else "torch".{taken}'


def _shape(lead: str, dims: str) -> str:
    """Sizes in the letters of docstrings, in which HV is the number of value heads."""
    return f"[{', '.join([lead, *({'G': 'HV'}.get(size, size) for size in dims)])}]"


def _listed(texts: list[str]) -> str:
    """One by itself, several as a tuple."""
    joined = ", ".join(texts)
    return f"({joined})" if len(texts) > 1 else joined


def _filled(entries: dict[str, str]) -> str:
    """A section of a docstring, in lines."""
    return "\n".join(
        textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in entries.items()
    )
