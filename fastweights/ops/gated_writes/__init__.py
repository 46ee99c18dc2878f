"""Palimpsa's gates: the values that a token writes, and its gain in the importance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_rows
from ..framework.checks import check_same_shape, check_tensor, shape_of
from ..framework.few_tokens import needs_gradient
from ..framework.node import KernelRule, Node, Tensors

__all__ = ["divide_answers", "gate_both", "gated_writes", "importance_writes"]


def torch_form(v: Tensor, s: Tensor, z: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor | None]:
    write = (v * s[..., None]).to(v.dtype)
    if z is None or c is None:
        return write, None
    share = torch.sigmoid(z.to(torch.promote_types(z.dtype, torch.float32)))
    return write, (share * c[..., None]).to(v.dtype)


class GatedWrites(KernelRule):
    """The kernels as a node: (v, s, z, c) -> w, beta."""

    def fake(self, tensors: Tensors, options: Sequence[Any]) -> tuple[Tensors, Tensors]:
        v, _, z, _ = tensors
        assert v is not None
        return (v.new_empty(v.shape), None if z is None else v.new_empty(v.shape)), ()

    def backward(
        self, tensors: Tensors, options: Sequence[Any], saved: Tensors, output_grads: Tensors, needed: Sequence[bool]
    ) -> Tensors:
        v, _, z, _ = tensors
        assert v is not None
        # An output that nothing reads has no gradient.
        dwrite, dbeta = (
            None if missing else v.new_zeros(v.shape) if g is None or not g.numel() else g
            for g, missing in zip(output_grads, (False, z is None), strict=True)
        )
        return self.load().backward(dwrite, dbeta, *tensors)


RULE = GatedWrites("gated_writes")
NODE = Node("gated_writes", {"v": False, "s": False, "z": True, "c": True}, {}, outputs=2, rule=RULE)


def check_per_head(name: str, x: Tensor, v: Tensor) -> None:
    if check_tensor(name, x, v).shape != v.shape[:-1]:
        raise ValueError(f"{name} must be {list(v.shape[:-1])}, one number per head of v, got shape {shape_of(x)}")


def gated_writes(
    v: Tensor, s: Tensor, z: Tensor | None = None, c: Tensor | None = None, *, backend: str = "auto"
) -> tuple[Tensor, Tensor | None]:
    r"""Values times one gate per head, and the gain of each value channel in the importance.

    $$w = s\, v, \qquad \beta = c\, \mathrm{sigmoid}(z)$$

    Palimpsa, section 2.4 and appendix A.1. On CUDA with triton installed one kernel computes both in float32, and another all
    gradients from the inputs alone; a second derivative needs backend "torch".

    Args:
        v: values [..., G, V], float16, bfloat16, float32 or float64.
        s: gate, one number per head [..., G], any float dtype.
        z: of the shape of v and any float dtype; no gain when None.
        c: scale of the gain, one number per head [..., G], any float dtype; with z only.
        backend: "torch", "triton" (not in float64; V up to 4096) or "auto": "triton" on CUDA where it serves, else "torch".

    Returns:
        w and beta (None without z), of the shape and dtype of v.

    Raises:
        ValueError: a shape, dtype, device or backend that does not fit; the message says which.
        TypeError: an argument of the wrong kind.
    """
    check_tensor("v", v)
    if v.ndim < 2 or v.shape[-1] < 1:
        raise ValueError(f"v must be [..., G, V] with V >= 1, got shape {shape_of(v)}")
    if (z is None) != (c is None):
        raise ValueError("z and c must be given together: c scales the gain that z gives; pass both or neither")
    check_per_head("s", s, v)
    if z is not None and c is not None:
        check_same_shape("z", check_tensor("z", z, v), "v", v)
        check_per_head("c", c, v)
    if takes_rows(backend, v):
        write, beta = NODE((v, s, z, c), ())
        return write, beta
    return torch_form(v, s, z, c)


def importance_writes(v: Tensor, s: Tensor, z: Tensor, b: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    r"""`gated_writes` with c = softplus(b) s, for b [G]: one launch where no gradient is needed."""
    if _takes_forward(backend, v, s, z, b):
        write, beta = RULE.load().forward(v, s, z, None, b)
    else:
        scale = F.softplus(b.to(torch.promote_types(b.dtype, torch.float32)))
        write, beta = gated_writes(v, s, z, scale * s, backend=backend)
    assert beta is not None
    return write, beta


def gate_both(u: Tensor, v: Tensor, s: Tensor, *, backend: str = "auto") -> tuple[Tensor, Tensor]:
    r"""s u and s v for one gate per head, s [..., G]: one launch where no gradient is needed and u has the shape of v."""
    if u.shape == v.shape and u.dtype == v.dtype and _takes_forward(backend, u, v, s):
        first, second = RULE.load().forward(u, s, v, None)
        return first, second
    return gated_writes(u, s, backend=backend)[0], gated_writes(v, s, backend=backend)[0]


def divide_answers(o: Tensor, s: Tensor, least: float, *, backend: str = "auto") -> Tensor:
    r"""o / max(s, least) for answers o [..., G, V] and one divisor per head, s [..., G]: one launch where no gradient is
    needed."""
    if _takes_forward(backend, o, s):
        return RULE.load().forward(o, s, None, None, None, least)[0]
    return o / s[..., None].clamp_min(least)


def _takes_forward(backend: str, v: Tensor, *others: Tensor) -> bool:
    """Whether the kernel of the forward may run outside the node."""
    given = {str(place): x for place, x in enumerate((v, *others))}
    return takes_rows(backend, v) and not torch.compiler.is_compiling() and not needs_gradient(given)
