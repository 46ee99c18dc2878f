"""Cross-entropy of rows of logits, and its gradient, without autograd, for a loss that is computed piece by piece."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.availability import takes_kernels
from ..framework.checks import compute_dtype

__all__ = ["cross_entropy_errors", "cross_entropy_gradients", "cross_entropy_rows"]


def takes_row_kernels(logits: Tensor, backend: str) -> bool:
    return takes_kernels(backend, logits) and not torch.compiler.is_compiling()


def cross_entropy_rows(logits: Tensor, target: Tensor, ignored: int, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """log sum_v exp(z_v), and the loss log sum_v exp(z_v) - z_target, for logits [rows, V] and int64 targets [rows].

    Both are [rows], in float32 or better. The loss is 0 where the target is `ignored`. On CUDA with triton installed one kernel
    reads the logits once."""
    if takes_row_kernels(logits, backend):
        from ...kernels.pointwise.cross_entropy import forward

        return forward(logits, target, ignored)
    logits = logits.to(compute_dtype(logits))
    log_sums = logits.logsumexp(1)
    losses = log_sums - logits.gather(1, target.masked_fill(target == ignored, 0)[:, None])[:, 0]
    return log_sums, losses.masked_fill(target == ignored, 0)


def cross_entropy_errors(
    logits: Tensor, target: Tensor, log_sums: Tensor, gradient: Tensor, ignored: int, backend: str = "auto"
) -> Tensor:
    """The gradient of the logits [rows, V], in their dtype, from `gradient` [], that of every row's loss."""
    if takes_row_kernels(logits, backend):
        from ...kernels.pointwise.cross_entropy import backward

        return backward(logits, target, log_sums, gradient, ignored)
    error = logits.to(compute_dtype(logits)).sub(log_sums[:, None]).exp_()  # softmax, then minus one at the target
    error.scatter_add_(1, target.masked_fill(target == ignored, 0)[:, None], error.new_full((len(error), 1), -1))
    return error.mul_(gradient).masked_fill_(target[:, None] == ignored, 0).to(logits.dtype)


def cross_entropy_gradients(
    logits: Tensor, target: Tensor, ignored: int, backend: str = "auto", *, classes: int | None = None
) -> tuple[Tensor, Tensor]:
    """The losses of `cross_entropy_rows`, and the gradient of each with respect to its row of logits, in their dtype.

    classes: how many columns of the logits are classes, all when None. The others count in no sum and have the gradient 0.

    The logits may be overwritten: on CUDA with triton installed one kernel reads them once and writes the gradients in their
    place."""
    columns = logits.shape[1]
    classes = columns if classes is None else classes
    if takes_row_kernels(logits, backend):
        from ...kernels.pointwise.cross_entropy import both

        logits = logits.contiguous()
        return both(logits, target, ignored, classes), logits
    logits = logits[:, :classes]
    log_sums, losses = cross_entropy_rows(logits, target, ignored, backend)
    errors = cross_entropy_errors(logits, target, log_sums, log_sums.new_ones(()), ignored, backend)
    return losses, F.pad(errors, (0, columns - classes)) if columns > classes else errors
