"""Every op in every form that its declaration lists. The contract tests run over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from .. import ops
from ..ops.framework.call import composed, kernels
from ..ops.framework.spec import Case, OpSpec, Parameter, Role, spec_of
from .draws import draw

__all__ = ["CASES", "OpCase", "OpInputs", "accepts", "cases_of"]


def accepts(spec: OpSpec, options: Mapping[str, Any]) -> bool:
    """Whether backend "triton" of an op takes these options."""
    backend = spec.backends.get("triton")
    if not isinstance(backend, (kernels, composed)):
        return False
    return all(options.get(name, served[0]) in served for name, served in backend.only.items())


@dataclass(frozen=True)
class OpInputs:
    """Arguments of one call: tensors with a time dimension, tensors without, and plain keywords."""

    tokens: Mapping[str, Tensor]
    parameters: Mapping[str, Tensor] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self) -> dict[str, Any]:
        return {**self.tokens, **self.parameters, **self.options}

    def map(self, f: Callable[[Tensor], Tensor]) -> OpInputs:
        """f applied to every tensor."""
        return replace(
            self,
            tokens={name: f(x) for name, x in self.tokens.items()},
            parameters={name: f(x) for name, x in self.parameters.items()},
        )

    def at(self, index: Any) -> OpInputs:
        """The same call on some of the batch rows and tokens: every token tensor indexed."""
        return replace(self, tokens={name: x[index] for name, x in self.tokens.items()})


@dataclass(frozen=True)
class OpCase:
    """An op in one of the forms that its declaration lists."""

    op: Callable[..., Any]
    spec: OpSpec
    case: Case

    @property
    def dims(self) -> dict[str, str]:
        """The inputs that are given, each with its dims: after [B, T] for tokens."""
        needed = {
            name: role.dims[-1] if isinstance(role, Parameter) else role.dims[0]
            for name, role in self.spec.inputs.items()
            if not (name in self.case.options or isinstance(role, Role) and role.optional)
        }
        given = {**needed, **self.case.given}
        return {name: given[name] for name in self.spec.inputs if name in given}

    def _kinds(self, of: type) -> dict[str, str]:
        roles = self.spec.inputs
        return {name: roles[name].kind for name in self.dims if isinstance(roles[name], of)}

    @property
    def tokens(self) -> dict[str, str]:
        """The inputs with a time dimension, each with its kind (see draws.py)."""
        return self._kinds(Role)

    @property
    def parameters(self) -> dict[str, str]:
        """The inputs without."""
        return self._kinds(Parameter)

    @property
    def states(self) -> tuple[str, ...]:
        return tuple(self.spec.states)

    @property
    def exact_gradient(self) -> bool:
        return self.case.exact_gradient

    @property
    def has_kernels(self) -> bool:
        """Whether backend "triton" takes the options of this form: of some the kernels have a few values only."""
        return accepts(self.spec, self.case.options)

    @property
    def measured(self) -> Mapping[str, Any]:
        return self.case.measured

    def draw(
        self,
        *,
        batch: int = 2,
        time: int = 40,
        heads: int = 2,
        value_heads: int | None = None,
        key: int = 8,
        value: int = 6,
        steps: int = 3,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> OpInputs:
        """Random inputs of these sizes, the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        value = max(key, value) if self.case.wide_values else value
        sizes = {"H": heads, "G": heads if value_heads is None else value_heads, "K": key, "V": value, "R": steps}

        def draw_all(kinds: Mapping[str, str], lead: tuple[int, ...]) -> dict[str, Tensor]:
            drawn: dict[str, Tensor] = {}
            for name, kind in kinds.items():
                drawn[name] = draw(kind, (*lead, *(sizes[d] for d in self.dims[name])), generator, drawn)
            return {name: x.to(dtype) for name, x in drawn.items()}

        tokens = draw_all(self.tokens, (batch, time))
        return OpInputs(tokens, draw_all(self.parameters, ()), self.case.options)

    def __call__(self, inputs: OpInputs, **keywords: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        """o and the final states, always as a tuple."""
        o, state = self.op(**{**inputs.arguments(), "output_final_state": True, **keywords})
        return o, () if state is None else state if isinstance(state, tuple) else (state,)

    def initial_state(self, states: tuple[Tensor, ...]) -> Any:
        """States as the op takes them: a tensor where there is one, a tuple where there are several."""
        return states[0] if len(self.states) == 1 else tuple(states)


@wraps(ops.palimpsa_posterior)
def _mean_and_deviation(*arguments: Any, **keywords: Any) -> tuple[Tensor, Any]:
    """The posterior's two results as one output, the variance as a deviation: both then grow with the scale. A root
    has no derivative at 0, where the query is zero: there the gradient is 0."""
    o, variance, state = ops.palimpsa_posterior(*arguments, **keywords)
    is_zero = variance == 0
    return torch.cat([o, variance.masked_fill(is_zero, 1.0).sqrt().masked_fill(is_zero, 0.0)], -1), state


IN_ONE_OUTPUT: dict[Any, Callable[..., Any]] = {ops.palimpsa_posterior: _mean_and_deviation}


@cache
def cases_of(op: Callable[..., Any]) -> dict[str, OpCase]:
    """The forms that the declaration of an op lists, by its name and theirs."""
    spec = spec_of(op)
    return {
        f"{spec.name}-{form}".removesuffix("-"): OpCase(IN_ONE_OUTPUT.get(op, op), spec, case)
        for form, case in spec.cases.items()
    }


class _Cases(Mapping[str, OpCase]):
    """The cases of every op in `fastweights.ops.OPS`, those of plug-ins too, by name."""

    def __getitem__(self, name: str) -> OpCase:
        return next(forms[name] for forms in map(cases_of, ops.OPS.values()) if name in forms)

    def __iter__(self) -> Iterator[str]:
        return (name for op in ops.OPS.values() for name in cases_of(op))

    def __len__(self) -> int:
        return sum(len(cases_of(op)) for op in ops.OPS.values())


CASES: Mapping[str, OpCase] = _Cases()
