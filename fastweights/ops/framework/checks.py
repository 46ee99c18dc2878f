"""Checks of what a caller passes to an op: each failure names the argument, the rule, the value and the remedy."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LARGEST_HEAD = 256


def values_can_be_read(x: Tensor) -> bool:
    """Whether looking at numbers costs nothing but a pass: on a GPU it would wait for the device, in a traced graph it
    would break the graph, so there the numbers are taken as they are."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def shape_of(x: Tensor) -> str:
    return str(list(x.shape))


def check_tensor(name: str, x: object, like: Tensor | None = None, *, integer: bool = False) -> Tensor:
    """A floating-point tensor (or one of 64-bit integers), on the device of `like`."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}; convert it with torch.as_tensor")
    if integer and x.dtype != torch.int64:
        raise ValueError(f"{name} must be int64, got {x.dtype}; convert it with {name}.long()")
    if not integer and x.dtype not in FLOATS:
        raise ValueError(
            f"{name} must be float16, bfloat16, float32 or float64, got {x.dtype}; convert it with {name}.float()"
        )
    if like is not None and x.device != like.device:
        raise ValueError(
            f"{name} must be on the device of the other inputs, {like.device}, got {x.device}; move it there"
        )
    return x


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


def constant(x: Any) -> Any:
    """x, where torch.compile would make a symbol of a number that differs from call to call: what is in a set is not one."""
    return list({x})[0] if isinstance(x, (int, float)) else x


def check_number(name: str, x: float, *, low: float, high: float = math.inf, open_low: bool = False) -> float:
    """A finite plain number in [low, high], or (low, high] where `open_low`."""
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(x).__name__}")
    x = constant(x)
    below = x <= low if open_low else x < low
    if not math.isfinite(x) or below or x > high:
        bounds = f"{'more than' if open_low else 'at least'} {low:g}" + (
            f" and at most {high:g}" if high < math.inf else ""
        )
        raise ValueError(f"{name} must be a finite number, {bounds}, got {x}")
    return float(x)


def check_scale(scale: float | None, key: int) -> float:
    """The factor on q: key^-0.5 unless given."""
    if scale is None:
        return key**-0.5
    return check_number("scale", scale, low=-math.inf)


def check_flag(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name} must be True or False, got {type(x).__name__}")


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
