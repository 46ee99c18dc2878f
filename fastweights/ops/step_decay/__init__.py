"""Step sizes and log decays of Mamba-2 where no gradient is needed, by one kernel."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient

__all__ = ["step_decay", "takes_step_decay"]


def takes_step_decay(step: Tensor, bias: Tensor, A_log: Tensor, backend: str = "auto") -> bool:
    """Whether the kernel serves steps [B, T, heads] and parameters [heads]: no gradients, no graph that is traced, not in
    float64."""
    return (
        not torch.compiler.is_compiling()
        and takes_kernels(backend, step)
        and torch.float64 not in (bias.dtype, A_log.dtype)
        and not needs_gradient({"step": step, "bias": bias, "A_log": A_log})
    )


def step_decay(
    step: Tensor, bias: Tensor, A_log: Tensor, smallest: float = 0.0, largest: float | None = None
) -> tuple[Tensor, Tensor]:
    r"""dt and g [B, T, heads] in float32, as `takes_step_decay` allows them. largest: None for no upper limit.

    $$dt = \mathrm{softplus}(\mathrm{step} + \mathrm{bias}) \text{ within limits}, \qquad g = -e^{A} dt$$
    """
    from ...kernels.pointwise.step_decay import step_decay

    return step_decay(step, bias, A_log, smallest, math.inf if largest is None else largest)
