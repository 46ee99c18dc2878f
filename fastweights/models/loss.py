"""The loss of a language model without the logits of all tokens in memory at once, and the output layer that computes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..layers.norms import at_least_float32
from ..layers.wrapped import is_bare
from ..ops.authoring import add_product_, product_dtype
from ..ops.cross_entropy import cross_entropy_gradients, cross_entropy_rows
from ..private_torch import count_forward_hooks

__all__ = [
    "IGNORED",
    "OutputLayer",
    "causal_lm_loss",
    "chunk_size",
    "next_labels",
    "sum_gradients",
    "summed_cross_entropy",
]

IGNORED = -100
CHUNK_NUMBERS = {"cpu": 2**25, "other": 2**27}  # logits of a chunk: 128 MiB in float32, 256 MiB in 16 bits on a GPU
SMALLEST_CHUNK = 256  # tokens, below which the matrix products become too thin
ALIGNED, PADDED = 8, 64  # columns: what a GPU takes fast in 16 bits, and what others are filled up to a multiple of


def next_labels(labels_BT: Tensor) -> Tensor:
    """For each token the label of the next one, -100 for the last of a row."""
    return F.pad(labels_BT, (0, 1), value=IGNORED)[:, 1:]


def causal_lm_loss(
    hidden_BTD: Tensor,
    weight_VD: Tensor,
    labels_BT: Tensor,
    num_items_in_batch: int | Tensor | None = None,
    shift_labels: Tensor | None = None,
) -> Tensor:
    """Mean cross-entropy of the next token, the number transformers' `ForCausalLMLoss` gives for logits = hidden weight^T.

    Args:
        labels_BT: int64, the input ids, shifted here; -100 is left out.
        num_items_in_batch: what the sum is divided by; the number of labels that count when None.
        shift_labels: labels that are shifted already, in place of labels_BT.
    """
    target_BT = (next_labels(labels_BT) if shift_labels is None else shift_labels).to(hidden_BTD.device)
    total = summed_cross_entropy(hidden_BTD.flatten(0, 1), weight_VD, target_BT.flatten())
    count = (target_BT != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
    return total / (count.to(total.device) if isinstance(count, Tensor) else count)


def summed_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, chunk: int | None = None) -> Tensor:
    r"""$$\sum_t \log \sum_v e^{z_{tv}} - z_{t, y_t}, \qquad z = h W^\top$$ over the tokens whose target is not -100.

    The logits exist for one chunk of tokens at a time. Where gradients are needed the forward computes them from these logits,
    and the backward multiplies them by the gradient of the sum. Gradients are exact. Products are in the inputs' dtype, or
    autocast's; logits, sums and the weight's gradient in float32.

    Args:
        hidden_TD, weight_VD: hidden states and the output layer's weight.
        target_T: int64.
        chunk: tokens at a time; when None as many as have 2^25 logits on a CPU and 2^27 elsewhere, at least 256.
    """
    if chunk is None:
        chunk = chunk_size(hidden_TD.device, len(weight_VD))
    return _SummedCrossEntropy.apply(
        hidden_TD, weight_VD, target_T, chunk, product_dtype(hidden_TD), torch.is_grad_enabled()
    )


def chunk_size(device: torch.device, numbers: int) -> int:
    """How many tokens to take at a time where each has so many logits: those with 2^25 logits together on a CPU and 2^27
    elsewhere, at least 256."""
    return max(CHUNK_NUMBERS["cpu" if device.type == "cpu" else "other"] // numbers, SMALLEST_CHUNK)


def needs_padding(weight_VD: Tensor, dtype: torch.dtype) -> bool:
    """Whether rows of logits would not begin at multiples of 16 bytes on a GPU, as those of 50,257 tokens do not in 16 bits."""
    return weight_VD.is_cuda and dtype.itemsize == 2 and len(weight_VD) % ALIGNED != 0


def product_weight(weight_VD: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in the dtype of the products, with rows of zeros behind it where it needs them."""
    if not needs_padding(weight_VD, dtype):
        return weight_VD.to(dtype)
    rows = -(-len(weight_VD) // PADDED) * PADDED
    weight = weight_VD.new_zeros(rows, weight_VD.shape[1], dtype=dtype)
    weight[: len(weight_VD)] = weight_VD
    return weight


def sum_gradients(
    errors: Iterable[tuple[Tensor, Tensor]],
    hidden_TD: Tensor,
    weight_VD: Tensor,
    bias_V: Tensor | None = None,
    *,
    weight: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of hidden states, weight and bias of logits that exist for one chunk of tokens at a time.

    Those of weight and bias are summed in float32, or float64 where the products are.

    Args:
        errors: of each chunk of tokens, in order, its hidden states and the gradient of its logits.
        weight: the weight in the dtype of the products. It may have more rows than weight_VD, which get no gradient.
        needed: for which of hidden states, weight and bias a gradient is needed; the others are None.
    """
    sums = torch.promote_types(weight.dtype, torch.float32)
    hidden_gradients = []
    weight_gradient = torch.zeros_like(weight, dtype=sums) if needed[1] else None
    bias_gradient = torch.zeros_like(bias_V, dtype=sums) if bias_V is not None and needed[2] else None
    for hidden, error in errors:
        if needed[0]:
            hidden_gradients.append((error @ weight).to(hidden_TD.dtype))
        if weight_gradient is not None:
            add_product_(weight_gradient, error.mT, hidden)
        if bias_gradient is not None:
            bias_gradient += error.sum(0, dtype=sums)[: len(bias_gradient)]
    return (
        torch.cat(hidden_gradients) if needed[0] else None,
        None if weight_gradient is None else weight_gradient[: len(weight_VD)].to(weight_VD.dtype),
        None if bias_gradient is None or bias_V is None else bias_gradient.to(bias_V.dtype),
    )


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        target_T: Tensor,
        chunk: int,
        dtype: torch.dtype,
        grad_enabled: bool,
    ) -> Tensor:
        weight, classes = product_weight(weight_VD, dtype), len(weight_VD)
        # needs_input_grad says nothing of no_grad(), where no gradient is asked for
        needed = ctx.needs_input_grad if grad_enabled else (False,) * len(ctx.needs_input_grad)
        losses = []

        def errors() -> Iterator[tuple[Tensor, Tensor]]:
            for hidden, target in zip(hidden_TD.split(chunk), target_T.split(chunk), strict=True):
                hidden = hidden.to(dtype)
                logits = hidden @ weight.mT
                if any(needed):
                    loss, error = cross_entropy_gradients(logits, target, IGNORED, classes=classes)
                    yield hidden, error
                else:
                    _, loss = cross_entropy_rows(logits[:, :classes], target, IGNORED)
                losses.append(loss.sum())

        gradients = sum_gradients(errors(), hidden_TD, weight_VD, weight=weight, needed=needed)
        ctx.save_for_backward(*gradients[:2])
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found = [None if x is None else (at_least_float32(x) * gradient).to(x.dtype) for x in ctx.saved_tensors]
        return *found, None, None, None, None


class OutputLayer(nn.Linear):
    """`nn.Linear` that also computes the chunked loss, within its call: FSDP2 gathers the weight only during the call."""

    def forward(  # type: ignore[override]
        self,
        hidden_BTD: Tensor,
        labels: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        shift_labels: Tensor | None = None,
        kept_BPD: Tensor | None = None,
        measure: Callable[[Tensor, Tensor | None], Tensor] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor | None]:
        """Logits. With labels the loss (see `causal_lm_loss`), and the logits of the hidden states `kept`, None where it is
        None. With `measure` what that gives for weight and bias."""
        if measure is not None:
            return measure(self.weight, self.bias)
        if labels is None:
            return super().forward(hidden_BTD)
        loss = causal_lm_loss(hidden_BTD, self.weight, labels, num_items_in_batch, shift_labels)
        return loss, None if kept_BPD is None else super().forward(kept_BPD)

    @classmethod
    def from_linear(cls, linear: Any) -> nn.Module:
        """An output layer with the parameters of a plain `nn.Linear`; another module as it is."""
        if not is_bare(linear, nn.Linear):
            return linear
        with torch.device("meta"):
            layer = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        layer.weight, layer.bias = linear.weight, linear.bias
        return layer.train(linear.training)

    def is_unchanged(self) -> bool:
        """Whether nothing but FSDP2 has hooked or replaced its forward. Hooks of others expect logits. FSDP2 registers one hook
        before the forward and one after it."""
        hooks = count_forward_hooks(self)
        if hooks == 1:
            from torch.distributed.fsdp import FSDPModule

            hooks -= isinstance(self, FSDPModule)
        return self.bias is None and "forward" not in self.__dict__ and not hooks
