"""Step sizes and log decays of Mamba-2 where no gradient is needed, by one kernel."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.few_tokens import needs_gradient

__all__ = ["LARGEST_LOG_RATE", "exp_rate", "gain_decay", "softplus_above", "step_decay", "takes_step_decay"]

# float32 holds exp(88.7), but not its product with a gradient. With exp(44), 1e19, every step above 1e-17 forgets all.
LARGEST_LOG_RATE = 44.0


def exp_rate(log_rate: Tensor) -> Tensor:
    """exp(log_rate) in float32 or better. A log_rate above `LARGEST_LOG_RATE` counts as that."""
    return log_rate.to(torch.promote_types(log_rate.dtype, torch.float32)).clamp_max(LARGEST_LOG_RATE).exp()


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
    r"""dt and g [B, T, heads] in float32, for tensors that `takes_step_decay` allows. smallest, largest: limits of dt, None for
    no upper one.

    $$dt = \mathrm{softplus}(\mathrm{step} + \mathrm{bias}) \text{ within the limits}, \qquad g = -e^{\min(A, 44)} dt$$
    """
    from ...kernels.pointwise.step_decay import step_decay

    return step_decay(step, bias, A_log, smallest, math.inf if largest is None else largest)


def gain_decay(gain: Tensor, step: Tensor, bias: Tensor, A_log: Tensor, largest: float = 1.0) -> tuple[Tensor, Tensor]:
    r"""beta and g [B, T, heads] of a gated delta rule in float32, for tensors that `takes_step_decay` allows. The gain has the
    shape of the steps and is not in float64.

    $$\beta = \mathrm{largest} \; \sigma(\mathrm{gain}), \qquad
      g = -e^{\min(A, 44)} \mathrm{softplus}(\mathrm{step} + \mathrm{bias})$$
    """
    from ...kernels.pointwise.step_decay import step_decay

    return step_decay(step, bias, A_log, 0.0, math.inf, gain, largest)


def softplus_above(x: Tensor, least: float, *, backend: str = "auto") -> Tensor:
    """least + softplus(x), in float32 or better: in one launch where no gradient is needed."""
    if torch.compiler.is_compiling() or needs_gradient({"x": x}) or not takes_kernels(backend, x):
        return least + F.softplus(x.to(torch.promote_types(x.dtype, torch.float32)))
    from ...kernels.pointwise.step_decay import softplus_above

    return softplus_above(x, least)
