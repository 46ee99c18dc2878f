"""The kernels of linear attention and the delta rules, which are one family."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..framework.kernel_backend import KernelFamily

__all__ = ["memory_kernels"]


def memory_kernels() -> KernelFamily:
    from ...kernels.chunk.memory import MEMORY
    from ...kernels.chunk.sizes import KernelInputs

    return KernelFamily(MEMORY, KernelInputs, {"scale": 1.0, "bound": 1.5, "eps": 1e-6}, recurrent)


def recurrent(
    inputs: Mapping[str, Any], states: Mapping[str, Tensor], new_states: Mapping[str, Tensor] | None,
    options: Mapping[str, Any], cu_seqlens: Tensor | None,
) -> Tensor:  # fmt: skip
    """A few tokens by one kernel, which writes the states after them into `new_states`, or where they are when None."""
    from ...kernels.recurrent.decode import Preconditioner, decode

    x, new, preconditioner = dict(inputs), new_states or {}, None
    if "A" in states:
        g, beta, center = (x.pop(name) for name in ("precond_g", "precond_beta", "center"))
        bound, eps = options["bound"], options["eps"]
        preconditioner = Preconditioner(states["A"], new.get("A"), g, beta, center, bound, eps)
    return decode(
        **x, state=states["S"], new_state=new.get("S"), preconditioner=preconditioner, scale=options["scale"],
        cu_seqlens=cu_seqlens,
    )  # fmt: skip
