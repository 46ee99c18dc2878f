"""Checks of an op's arguments by its declaration. A message names the argument, what it must be, what it was, what to do."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...checks import (
    LARGEST_HEAD,
    check_flag,
    check_number,
    check_tensor,
    constant,
    describe_value,
    shape_of,
    values_can_be_read,
)
from .spec import Choice, Flag, Integer, Number, OpSpec, Parameter, Role, Scale

Named = dict[str, Any]
VALUES = ("GV",), ("GRV",)  # the dims of values
FEW_TOKENS = 16  # per sequence: what a recurrent kernel reads, and the most that an op in place takes


class Sizes(NamedTuple):
    """Sizes of one call: batch, time, key heads, value heads, key channels, value channels, steps per token."""

    B: int
    T: int
    H: int
    G: int
    K: int
    V: int
    R: int = 1

    def shape(self, dims: str) -> tuple[int, ...]:
        return tuple(getattr(self, d) for d in dims)


def compute_dtype(x: Tensor) -> torch.dtype:
    """States and sums are float32, or float64 for float64 inputs."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def is_short(x: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Whether x [B, T, ...] has few tokens. Sizes decide it, never the lengths of packed sequences."""
    time = x.shape[1]
    return time <= FEW_TOKENS or (cu_seqlens is not None and time <= 2 * (len(cu_seqlens) - 1))


def check_inputs(spec: OpSpec, inputs: Sequence[Any]) -> Sizes:
    """Check shapes, dtypes, devices and, where they can be read, numbers. Returns the sizes of the call."""
    tokens: dict[str, Any] = {}
    parameters: dict[str, Any] = {}
    for (name, role), x in zip(spec.inputs.items(), inputs):
        if isinstance(role, Parameter):
            parameters[name] = x
        elif x is not None or not role.optional:
            tokens[name] = x
    # The first to be checked are those that the sizes are read from.
    main = [name for name in tokens if _role(spec, name).dims in (("HK",), *VALUES)]
    like = tokens[main[0]]
    for name in main:
        check_channels(name, tokens[name], _role(spec, name), main[0], like)
    key = [name for name in main if _role(spec, name).dims == ("HK",)]
    for name in key[1:]:
        check_same_shape(name, tokens[name], key[0], tokens[key[0]])
    sizes = _sizes(spec, tokens, key[0])
    for name, x in tokens.items():
        role = _role(spec, name)
        if name not in main:
            check_tensor(name, x, like)
            if role.dtype == "inputs":
                check_channels(name, x, role, key[-1], tokens[key[-1]])
            check_dims(name, x, role, sizes)
        check_limits(name, x, role)
    for name, x in parameters.items():
        check_parameter(name, x, spec.inputs[name], sizes, like)  # type: ignore[arg-type]
    return sizes


def _role(spec: OpSpec, name: str) -> Role:
    role = spec.inputs[name]
    assert isinstance(role, Role)
    return role


def _sizes(spec: OpSpec, tokens: Mapping[str, Tensor], key: str) -> Sizes:
    """The value heads are those of the values, or without values those of the gates."""
    B, T, H, K = tokens[key].shape
    values = [name for name in tokens if _role(spec, name).dims in VALUES and _role(spec, name).dtype == "inputs"]
    if values:
        G, *steps, V = tokens[values[0]].shape[2:]
        if G % H:
            raise ValueError(
                f"{values[0]} must have a multiple of the q/k heads, {H}, got {G} heads; choose head counts that divide"
            )
        return Sizes(B, T, H, G, K, V, *steps)
    gates = [name for name in tokens if name != key and _role(spec, name).dims == ("G", "H")]
    for name in gates:
        if check_tensor(name, tokens[name], tokens[key]).ndim != 3:
            raise ValueError(f"{name} must be [B, T, heads], got shape {shape_of(tokens[name])}")
    G = max([tokens[name].shape[2] for name in gates])
    if G % H:
        raise ValueError(
            f"{' and '.join(gates)} must have a multiple of {key}'s heads, {H}, got {G}; choose counts that divide"
        )
    return Sizes(B, T, H, G, K, K)


def check_channels(name: str, x: Any, role: Role, first_name: str, first: Tensor) -> None:
    """[B, T, heads, channels], or with steps before the channels, with the dtype, device, batch and length of the first,
    channels in 1..256."""
    check_tensor(name, x, first if isinstance(first, Tensor) else None)
    dimensions = ["B", "T", "heads", *["steps"] * ("R" in role.dims[0]), "channels"]
    if x.ndim != len(dimensions):
        raise ValueError(
            f"{name} must have {len(dimensions)} dimensions [{', '.join(dimensions)}], got shape {shape_of(x)}"
        )
    if x.dtype != first.dtype:
        raise ValueError(
            f"{name} must have the dtype of {first_name}, {first.dtype}, got {x.dtype}; convert one to the other"
        )
    if x.shape[:2] != first.shape[:2]:
        raise ValueError(
            f"{name} must have the batch and length of {first_name}, {list(first.shape[:2])}, got {shape_of(x)}"
        )
    if not 1 <= x.shape[-1] <= LARGEST_HEAD:
        raise ValueError(f"{name} must have 1 to {LARGEST_HEAD} channels per head, got {x.shape[-1]}; use more heads")
    if min(x.shape[2:]) < 1:
        raise ValueError(
            f"{name} must have at least one {' and '.join(d[:-1] for d in dimensions[2:-1])}, got shape {shape_of(x)}"
        )


def check_same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {shape_of(other)}, got {shape_of(x)}")


def check_dims(name: str, x: Tensor, role: Role, sizes: Sizes) -> None:
    """One of the shapes of the role; of those with as many dimensions as x, where there are any."""
    like_x = [dims for dims in role.dims if len(dims) + 2 == x.ndim]
    allowed = [[sizes.B, sizes.T, *sizes.shape(dims)] for dims in like_x or role.dims]
    if list(x.shape) not in allowed:
        different = [shape for place, shape in enumerate(allowed) if shape not in allowed[:place]]
        raise ValueError(f"{name} must have shape {' or '.join(map(str, different))}, got {shape_of(x)}")


def check_limits(name: str, x: Tensor, role: Role) -> None:
    """Refuse numbers outside the limits of the role. NaN passes, and so does infinity unless -inf is a legal number: both show in
    the output."""
    if not role.must_be or not values_can_be_read(x):
        return
    outside = (x < role.low) | (x > role.high)
    if not role.minus_inf:
        outside &= x.isfinite()
    if outside.any():
        legible = x[~x.isnan()] if role.minus_inf else x[x.isfinite()]
        low, high = legible.min().item(), legible.max().item()
        found = f"{low:.4g} to {high:.4g}" if role.low > -float("inf") and role.high < float("inf") else (
            f"{low:.4g} at its smallest" if role.low > -float("inf") else f"{high:.4g} at its largest"
        )  # fmt: skip
        raise ValueError(f"{name} must be {role.must_be}, got {found}; pass {role.remedy}")


def check_parameter(name: str, x: Any, role: Parameter, sizes: Sizes, like: Tensor) -> None:
    """A number, or a tensor of one of the shapes of the role."""
    if not isinstance(x, Tensor):
        check_number(name, x, above=None if role.above == -float("inf") else role.above)
        return
    check_tensor(name, x, like)
    if x.ndim and list(x.shape) not in [list(sizes.shape(dims)) for dims in role.dims]:
        shapes = [str(list(sizes.shape(dims))) for dims in role.dims if dims[0] == "G"]
        raise ValueError(
            f"{name} must be a number{', ' if shapes[1:] else ' or of shape '}{' or '.join(shapes)}, got shape {shape_of(x)}"
        )
    if role.must_be and values_can_be_read(x):
        outside = ~((x > role.above) & x.isfinite()) if role.finite else x <= role.above
        if outside.any():
            raise ValueError(f"{name} must be {role.must_be}, got {x[outside][0].item():.4g}; pass {role.remedy}")


def expand_parameter(x: Any, role: Parameter, sizes: Sizes, like: Tensor, converts: bool = True) -> Tensor:
    """The parameter as the op receives it: a tensor of the last of the role's shapes, in the dtype of the computation; a tensor
    keeps its own unless the op `converts`."""
    shape, dtype = sizes.shape(role.dims[-1]), compute_dtype(like)
    if not isinstance(x, Tensor):
        return like.new_full(shape, constant(x), dtype=dtype)
    if converts:
        x = x.to(dtype)
    if x.shape == shape:
        return x
    if x.ndim and x.shape[0] != sizes.G:
        x = x.repeat_interleave(sizes.G // x.shape[0], 0)
    if x.ndim == 1 and len(shape) == 2:
        x = x[:, None]
    return x if x.shape == shape else x.expand(shape)  # each view costs autograd a node


def check_options(spec: OpSpec, options: Mapping[str, Any], sizes: Sizes) -> Named:
    return {name: CHECKS[type(option)](name, options[name], option, sizes) for name, option in spec.options.items()}


def _check_number(name: str, x: Any, option: Number, sizes: Sizes) -> float:
    return check_number(name, x, above=option.above, low=option.low, high=option.high)


def _check_scale(name: str, x: Any, option: Scale, sizes: Sizes) -> float:
    return sizes.K**-0.5 if x is None else check_number(name, x)


def _check_integer(name: str, x: Any, option: Integer, sizes: Sizes) -> int | None:
    if x is None and option.optional:
        return None
    if isinstance(x, bool) or not isinstance(x, int):
        raise TypeError(f"{name} must be an integer{' or None' * option.optional}, got {type(x).__name__}")
    x = constant(x)
    if x < option.least:
        remedy = "; pass None for none" if option.optional else ""
        raise ValueError(f"{name} must be at least {option.least}, got {x}{remedy}")
    if x > option.most:
        raise ValueError(f"{name} must be at most {option.most:,}, got {reprlib.repr(x)}; pass a smaller one")
    return x


def _check_choice(name: str, x: Any, option: Choice, sizes: Sizes) -> str:
    if not isinstance(x, str):
        raise TypeError(f"{name} must be one of {', '.join(option.values)}, got {describe_value(x)}")
    if x not in option.values:
        raise ValueError(f"{name} must be one of {', '.join(option.values)}, got {x!r}")
    return x


def _check_flag(name: str, x: Any, option: Flag, sizes: Sizes) -> bool:
    return check_flag(name, x)


CHECKS: dict[type, Callable[[str, Any, Any, Sizes], Any]] = {
    Number: _check_number, Scale: _check_scale, Integer: _check_integer, Choice: _check_choice, Flag: _check_flag,
}  # fmt: skip


def as_tuple(x: Any) -> tuple[Any, ...]:
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def unwrap(results: Sequence[Any]) -> Any:
    """One result by itself, several as a tuple."""
    return results[0] if len(results) == 1 else tuple(results)


def first_state(spec: OpSpec, name: str, sizes: Sizes, count: int, like: Tensor) -> Tensor:
    """The state before the first token of `count` sequences."""
    state = spec.states[name]
    if state.first is not None:
        return state.first(sizes, count, compute_dtype(like), like.device)
    return torch.zeros(count, *sizes.shape(state.dims), dtype=compute_dtype(like), device=like.device)


def check_states(spec: OpSpec, initial_state: Any, sizes: Sizes, count: int, like: Tensor) -> Named:
    """The initial states by name in the dtype of the computation; None where none are given. One state comes as a tensor,
    several as a tuple in the order of the declaration."""
    if initial_state is None:
        return dict.fromkeys(spec.states)
    given, dtype = as_tuple(initial_state), compute_dtype(like)
    if len(given) != len(spec.states):
        raise ValueError(
            f"initial_state must be ({', '.join(spec.states)}), {len(spec.states)} tensor(s), got {len(given)}; "
            "pass a call's final state"
        )
    found = {}
    for (name, state), x in zip(spec.states.items(), given):
        label = f"initial_state {name}" if len(given) > 1 else "initial_state"
        shape = (count, *sizes.shape(state.dims))
        check_tensor(label, x, like, integer=state.counts)
        if tuple(x.shape) != shape:
            raise ValueError(f"{label} must have shape {list(shape)}, got {shape_of(x)}")
        if state.counts and values_can_be_read(x) and (x < 0).any():
            raise ValueError(f"{label} must be at least 0, got {x.min().item()}; pass a call's final state")
        found[name] = x if state.counts else x.to(dtype)
    return found
