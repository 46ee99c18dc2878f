"""The form of an op that updates its state in place, with the signature and the docstring that follow from the op."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any

from torch import Tensor

from .checks import FEW_TOKENS
from .in_place import InPlace
from .spec import OpSpec

__all__ = ["OF_STATE", "make_in_place"]

OF_STATE = ("initial_state", "output_final_state", "cu_seqlens", "backend")


def make_in_place(op: Any) -> Callable[..., Any]:
    function = op.function

    def in_place(
        *inputs: Any,
        state: Any,
        state_indices: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        backend: str = "auto",
        **options: Any,
    ) -> Any:
        if options.pop("cp_group", None) is not None:
            raise ValueError(
                f"cp_group must be None for {op.__name__}_, whose few tokens are not divided over processes, got one; use "
                f"{op.__name__} for long sequences"
            )
        *outputs, _ = function(
            *inputs,
            **options,
            initial_state=InPlace(state, state_indices),
            output_final_state=True,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    own = inspect.signature(in_place)
    in_place.__module__, in_place.__name__ = op.__module__, f"{op.__name__}_"
    in_place.__qualname__ = f"{op.__qualname__}.in_place"
    in_place.__signature__ = sign_in_place(op, own)  # type: ignore[attr-defined]
    in_place.__doc__ = describe_in_place(op)
    return in_place


def sign_in_place(op: Any, own: inspect.Signature) -> inspect.Signature:
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


def describe_in_place(op: Any) -> str:
    """The docstring of the form in place: the formulas of the op's own docstring, and the rest from its declaration."""
    name, spec = op.__name__, op.spec
    formulas = [part for part in inspect.cleandoc(op.__doc__ or "").split("\n\n") if part.startswith("$$")]
    inputs = ", ".join(x for x in inspect.signature(op.function).parameters if x not in OF_STATE)
    states = [f"{x} {_shape('N', s.dims)}{' in int64' if s.counts else ''}" for x, s in spec.states.items()]
    arguments = {
        inputs: f"as for `{name}`: [B, T, ...] with T at most {FEW_TOKENS}.",
        "state": f"{_list_texts(states)}, float32 (float64 for float64 inputs). After the call it holds the state after the last "
        "token; that of a sequence of length 0 does not change. "
        f"Begin with {_list_texts([s.begins for s in spec.states.values()])}. With state_indices a pool [P, ...].",
        "state_indices": "int32 or int64 [N], the row of the pool that each sequence reads and overwrites. They must not repeat. "
        "With a negative index a sequence has no state: its output is 0, and nothing is written. Or [N, 1 + S], for sequences of "
        "at most S tokens: the row that a sequence reads, then the rows that the states after its tokens go to, so that drafted "
        "tokens can be taken back. A state with a negative index is not kept. A row must not be written twice, nor be read by a "
        "sequence and written by another. On a GPU the values are checked only with FASTWEIGHTS_CHECK_VALUES=1, because that "
        "waits for the device.",
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
        "Args:\n" + _fill_lines(arguments),
        f"Returns:\n    {', '.join(f'{x} {shape}' for x, shape in outputs.items())} in the dtype of the inputs.",
        "Raises:\n" + _fill_lines(raises),
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


def _list_texts(texts: list[str]) -> str:
    """One by itself, several as a tuple."""
    joined = ", ".join(texts)
    return f"({joined})" if len(texts) > 1 else joined


def _fill_lines(entries: dict[str, str]) -> str:
    """A section of a docstring, in lines."""
    return "\n".join(
        textwrap.fill(f"{name}: {text}", 120, initial_indent=" " * 4, subsequent_indent=" " * 8)
        for name, text in entries.items()
    )
