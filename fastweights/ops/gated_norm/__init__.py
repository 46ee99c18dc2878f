"""RMSNorm of each head or group, with a gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_rows
from ..framework.checks import check_flag, check_number, check_same_shape, check_tensor, shape_of
from ..framework.node import KernelRule, Node

__all__ = ["GATES", "gated_rms_norm"]

GATES = {"silu": F.silu, "sigmoid": F.sigmoid, "gelu": F.gelu}


NODE = Node(
    "gated_norm",
    {"x": False, "weight": False, "gate": True, "value": True, "skip": True},
    {"activation": "str", "eps": "float", "gate_first": "bool"},
    outputs=1,
    rule=KernelRule("gated_norm"),
)


def torch_form(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None,
    value: Tensor | None,
    skip: Tensor | None,
    activation: str,
    eps: float,
    gate_first: bool,
) -> Tensor:
    dtype, scale = x.dtype, weight.to(x.dtype)
    if value is not None and skip is not None:
        x = torch.addcmul(x, skip[:, None].to(value.dtype), value)
    if gate is not None and gate_first:
        x = x * GATES[activation](gate)
    y = F.rms_norm(x, x.shape[-1:], scale, eps) if weight.ndim == 1 else F.rms_norm(x, x.shape[-1:], eps=eps) * scale
    if gate is not None and not gate_first:
        y = y * GATES[activation](gate)
    return y.to(dtype)


def gated_rms_norm(
    x: Tensor,
    weight: Tensor,
    gate: Tensor | None = None,
    *,
    activation: str = "silu",
    eps: float = 1e-6,
    gate_first: bool = False,
    value: Tensor | None = None,
    skip: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    r"""RMSNorm over the last dimension, with weight and gate.

    $$y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}}\, w\, a(z) \qquad \text{or, with the gate first,} \qquad
      y = \frac{u}{\sqrt{\mathrm{mean}(u^2) + \mathrm{eps}}}\, w, \quad u = x\, a(z)$$

    With `value` and `skip` the sum x + D v takes the place of x. RMSNorm: Zhang and Sennrich 2019. The gate comes after it in
    gated linear attention (Yang et al. 2024), before it in Mamba-2 (Dao and Gu 2024). On CUDA with triton installed one kernel
    computes all of it in float32, and another its gradients from the inputs alone; a second derivative needs backend "torch".

    Args:
        x: [..., V] or, with a weight of its own for every group, [..., G, V]; float16, bfloat16, float32 or float64. V is the
            width that is normalised: a head, or a group of channels.
        weight: w, [V] or [G, V]. Any float dtype.
        gate: z, of the shape of x and any float dtype; no gate when None.
        activation: a, "silu", "sigmoid" or "gelu" (the exact one).
        eps: at least 0.
        gate_first: whether the gate comes before the norm.
        value: v, of the shape and dtype of x, which is then [..., G, V].
        skip: D, one number per group [G], any float dtype; with `value` only.
        backend: "torch", "triton" (not in float64; V up to 4096) or "auto": "triton" on CUDA where it serves, else "torch".

    Returns:
        y, of the shape and dtype of x.

    Raises:
        ValueError: a shape, dtype, device, option or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    check_tensor("x", x)
    check_tensor("weight", weight, x)
    if x.ndim < 1 or x.shape[-1] < 1:
        raise ValueError(f"x must be [..., V] with V >= 1, got shape {shape_of(x)}")
    if weight.shape not in (x.shape[-1:], x.shape[-2:]):
        raise ValueError(f"weight must be {list(x.shape[-1:])} or {list(x.shape[-2:])}, got shape {shape_of(weight)}")
    if gate is not None:
        check_same_shape("gate", check_tensor("gate", gate, x), "x", x)
    if (value is None) != (skip is None):
        raise ValueError(
            "value and skip must be given together: skip says how much of value is added; pass both or neither"
        )
    if value is not None and skip is not None:
        check_same_shape("value", check_tensor("value", value, x), "x", x)
        if value.dtype != x.dtype:
            raise ValueError(f"value must have the dtype of x, {x.dtype}, got {value.dtype}; convert it")
        if x.ndim < 2 or check_tensor("skip", skip, x).shape != x.shape[-2:-1]:
            raise ValueError(
                f"skip must be [G], one number per group of x [..., G, V], got shape {shape_of(skip)} for x {shape_of(x)}"
            )
    if activation not in GATES:
        raise ValueError(f"activation must be one of {', '.join(map(repr, GATES))}, got {activation!r}")
    check_number("eps", eps, low=0.0)
    check_flag("gate_first", gate_first)
    if takes_rows(backend, x):
        return NODE((x, weight, gate, value, skip), (activation, eps, gate_first))[0]
    return torch_form(x, weight, gate, value, skip, activation, eps, gate_first)
