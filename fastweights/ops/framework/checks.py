"""Checks of what a caller passes to an op: each failure names the argument, the rule, the value and the remedy."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...checks import (
    FLOATS,
    LARGEST_HEAD,
    check_flag,
    check_number,
    check_tensor,
    constant,
    shape_of,
    values_can_be_read,
)

__all__ = [
    "FLOATS",
    "LARGEST_HEAD",
    "Shapes",
    "check_decay",
    "check_flag",
    "check_gate",
    "check_log_decay",
    "check_nonnegative",
    "check_number",
    "check_qkv",
    "check_same_shape",
    "check_scale",
    "check_states",
    "check_tensor",
    "check_tokens",
    "constant",
    "head_choices",
    "shape_of",
    "values_can_be_read",
]


@dataclass(frozen=True)
class Shapes:
    """Sizes of one call: batch, time, q/k heads, v heads, key channels, value channels."""

    batch: int
    time: int
    key_heads: int
    heads: int
    key: int
    value: int


def check_tokens(**tensors: Tensor) -> None:
    """Named [B, T, H, channels] tensors that must share one dtype, device, batch, length; channels in 1..256."""
    first_name, first = next(iter(tensors.items()))
    for name, x in tensors.items():
        check_tensor(name, x, first if isinstance(first, Tensor) else None)
        if x.ndim != 4:
            raise ValueError(f"{name} must have 4 dimensions [B, T, heads, channels], got shape {shape_of(x)}")
        if x.dtype != first.dtype:
            raise ValueError(
                f"{name} must have the dtype of {first_name}, {first.dtype}, got {x.dtype}; convert one to the other"
            )
        if x.shape[:2] != first.shape[:2]:
            raise ValueError(
                f"{name} must have the batch and length of {first_name}, {list(first.shape[:2])}, got {shape_of(x)}"
            )
        if not 1 <= x.shape[3] <= LARGEST_HEAD:
            raise ValueError(f"{name} must have 1 to {LARGEST_HEAD} channels a head, got {x.shape[3]}; use more heads")
        if x.shape[2] < 1:
            raise ValueError(f"{name} must have at least one head, got shape {shape_of(x)}")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, *, grouped: bool = True) -> Shapes:
    """q, k [B,T,H,K] and v [B,T,HV,V] with HV a multiple of H (equal to H where the rule is not grouped)."""
    check_tokens(q=q, k=k, v=v)
    check_same_shape("k", k, "q", q)
    key_heads, heads = k.shape[2], v.shape[2]
    if grouped and heads % key_heads:
        raise ValueError(
            f"v must have a multiple of the q/k heads, {key_heads}, got {heads} heads; choose head counts that divide"
        )
    if not grouped and heads != key_heads:
        raise ValueError(f"v must have as many heads as q and k, {key_heads}, got {heads}; repeat the q/k heads")
    return Shapes(v.shape[0], v.shape[1], key_heads, heads, k.shape[3], v.shape[3])


def check_same_shape(name: str, x: Tensor, other_name: str, other: Tensor) -> None:
    if x.shape != other.shape:
        raise ValueError(f"{name} must have the shape of {other_name}, {shape_of(other)}, got {shape_of(x)}")


def check_gate(name: str, x: Tensor, sizes: Shapes, like: Tensor, channels: int | None = None) -> None:
    """A gate [B,T,heads] (or [B,T,heads,channels]); heads may be those of q/k or those of v."""
    check_tensor(name, x, like)
    wanted = [[sizes.batch, sizes.time, h] + ([] if channels is None else [channels]) for h in head_choices(sizes)]
    if list(x.shape) not in wanted:
        raise ValueError(f"{name} must have shape {' or '.join(map(str, wanted))}, got {shape_of(x)}")


def head_choices(sizes: Shapes) -> list[int]:
    return sorted({sizes.heads, sizes.key_heads}, reverse=True)


def check_decay(name: str, g: Tensor | None, sizes: Shapes, like: Tensor, *, per_channel: bool = False) -> None:
    """A log decay, natural logarithm, <= 0 (-inf is decay 0): [B,T,heads], or [B,T,heads,K] where the rule has it."""
    if g is None:
        return
    check_tensor(name, g, like)
    channels = sizes.key if per_channel and g.ndim == 4 else None
    if per_channel and g.ndim not in (3, 4):
        raise ValueError(f"{name} must be [B, T, heads] or [B, T, heads, {sizes.key}], got shape {shape_of(g)}")
    check_gate(name, g, sizes, like, channels)
    check_log_decay(name, g)


def check_log_decay(name: str, g: Tensor) -> None:
    """No number above 0 where the name says that it is a log decay."""
    if name.endswith("g") and values_can_be_read(g) and g.numel() and (g > 0).any():
        raise ValueError(
            f"{name} must be a log decay, at most 0, got {g.max().item():.4g} at its largest; "
            "pass -exp(...) or logsigmoid(...)"
        )


def check_nonnegative(name: str, x: Tensor, remedy: str = "sigmoid(...)") -> None:
    """No number below 0, where the memory would otherwise stop being positive definite."""
    if values_can_be_read(x) and ((x < 0) & x.isfinite()).any():
        raise ValueError(
            f"{name} must be at least 0, got {x[x.isfinite()].min().item():.4g} at its smallest; pass {remedy}"
        )


def check_scale(scale: float | None, key: int) -> float:
    """The factor on q: key^-0.5 unless given."""
    if scale is None:
        return key**-0.5
    return check_number("scale", scale)


def check_states(
    initial_state: object,
    expected: Mapping[str, tuple[int, ...]],
    like: Tensor,
    dtype: torch.dtype,
    *,
    integers: Collection[str] = (),
    zeros: bool = True,
) -> dict[str, Tensor]:
    """The initial states by name in the dtype of the computation (int64 for the `integers`): zeros when None, or without
    `zeros` None again. One state comes as a tensor, several as a tuple in the order of `expected`."""
    dtypes = {name: torch.int64 if name in integers else dtype for name in expected}
    if initial_state is None and not zeros:
        return dict.fromkeys(expected)  # type: ignore[return-value]
    if initial_state is None:
        return {name: torch.zeros(shape, dtype=dtypes[name], device=like.device) for name, shape in expected.items()}
    given = initial_state if isinstance(initial_state, (tuple, list)) else (initial_state,)
    order = f"({', '.join(expected)})"
    if len(given) != len(expected):
        raise ValueError(
            f"initial_state must be {order}, {len(expected)} tensor(s), got {len(given)}; pass a call's final state"
        )
    for (name, shape), state in zip(expected.items(), given):
        label = f"initial_state {name}" if len(expected) > 1 else "initial_state"
        check_tensor(label, state, like, integer=name in integers)
        if tuple(state.shape) != shape:
            raise ValueError(f"{label} must have shape {list(shape)}, got {shape_of(state)}")
    return {name: state.to(dtypes[name]) for name, state in zip(expected, given)}
