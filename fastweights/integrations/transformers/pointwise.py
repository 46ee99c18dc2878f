"""Norms, gated products and the loss of models of transformers, under the signatures that it calls them by: on a GPU each is one
kernel in each direction, which computes in float32 and rounds once. Elsewhere, and in a graph that torch.compile traces, whose
compiler joins such steps itself, the code of transformers runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import ACT2FN

from ...kernels.availability import takes_kernels, takes_rows
from ...ops.cross_entropy import cross_entropy_errors, cross_entropy_rows
from ...ops.residual_norm import residual_norm
from ...ops.silu_product import silu_product

__all__ = ["causal_loss", "multiply_gated", "normalise", "runs_eagerly"]

SILU = nn.SiLU, type(ACT2FN["silu"])


def runs_eagerly(*tensors: Tensor) -> bool:
    """Whether these are plain tensors of one dtype in a call that nothing traces."""
    plain = all(type(x) in (Tensor, nn.Parameter) and x.dtype == tensors[0].dtype for x in tensors)
    return plain and not torch.compiler.is_compiling()


def normalise(original: Callable, layer: Any, x: Tensor) -> Tensor:
    """x / rms(x) times the weight, or times 1 + the weight in the classes that name their eps so, as Gemma's norm does."""
    weight = getattr(layer, "weight", None)
    if (
        weight is None
        or getattr(layer, "group_size", None) is not None
        or not (runs_eagerly(x, weight) and takes_rows("auto", x))
    ):
        return original(layer, x)
    around_zero = hasattr(layer, "eps")
    eps = layer.eps if around_zero else layer.variance_epsilon
    return residual_norm(x, None, weight, eps=eps, offset=float(around_zero))[1]


def multiply_gated(original: Callable, layer: Any, x: Tensor) -> Tensor:
    """The MLP with a gate. Its projections are called as modules, whatever stands in their place."""
    if not isinstance(layer.act_fn, SILU):
        return original(layer, x)
    z, u = layer.gate_proj(x), layer.up_proj(x)
    ours = runs_eagerly(z, u) and takes_kernels("auto", u)
    return layer.down_proj(silu_product(z, u) if ours else layer.act_fn(z) * u)


def causal_loss(
    original: Callable,
    logits: Tensor,
    labels: Tensor,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """The cross-entropy of the next tokens, without a copy of the logits in float32."""
    if not (runs_eagerly(logits) and takes_kernels("auto", logits)):
        return original(logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **rest)
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    target = shift_labels.reshape(-1).to(logits.device)
    count = (target != ignore_index).sum() if num_items_in_batch is None else num_items_in_batch
    if isinstance(count, Tensor):
        count = count.to(logits.device)
    return _SummedCrossEntropy.apply(logits.view(-1, vocab_size), target, ignore_index) / count


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, ignored: int) -> Tensor:
        log_sums, losses = cross_entropy_rows(logits, target, ignored)
        ctx.ignored = ignored
        ctx.save_for_backward(logits, target, log_sums)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        logits, target, log_sums = ctx.saved_tensors
        return cross_entropy_errors(logits, target, log_sums, gradient, ctx.ignored), None, None
