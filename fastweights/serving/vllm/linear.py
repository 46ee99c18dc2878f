"""Projections of our layers as vLLM's own linear layers, which adapters (LoRA) and quantised weights need."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.lora.layers import ReplicatedLinearWithLoRA
from vllm.model_executor.layers.linear import ReplicatedLinear

from ...models.parts import Division
from .versions import adapter_slots, register_adapted

__all__ = ["Rows", "replace_projections"]

SMALLEST = 64  # channels: narrower projections are those of gates and decays, which quantised weights would change most


class Rows:
    """Which tokens of a step the layers of a model read. Memory layers read a step in several calls, drafted tokens repeatedly.

    Attributes:
        tokens: the place in the step of each token of a call; None where a call reads the step as it is.
    """

    tokens: Tensor | slice | None = None

    @contextmanager
    def read(self, tokens: Tensor | slice) -> Iterator[None]:
        before, self.tokens = self.tokens, tokens
        try:
            yield
        finally:
            self.tokens = before


class ServedLinear(ReplicatedLinear):
    """A projection with the heads of this process, whole for vLLM.

    Args:
        given: the projection in its place until now.
        config: of the engine.
        name: of the projection in vLLM.
        rows: shared by the projections of a model.
        division: how the processes divide its weight.
    """

    def __init__(self, given: nn.Linear, config: VllmConfig, name: str, rows: Rows, division: Division) -> None:
        super().__init__(
            given.in_features,
            given.out_features,
            bias=given.bias is not None,
            quant_config=config.quant_config if is_quantized(given, config) else None,
            prefix=name,
            return_bias=False,
            disable_tp=True,
        )
        self.rows, self.division = rows, division

    def forward(self, x: Tensor) -> Tensor:
        """x [..., D]. Kernels for quantised weights take rows only."""
        return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


class AdaptedLinear(ReplicatedLinearWithLoRA):
    r"""$y = W x + B_a A_a x$ with the adapter a of each token, or none. vLLM's own kernels know the tokens of a whole step only.

    The adapters' matrices are multiplied as one, with zeros between for the adapters that are not the token's.
    """

    lora_b_stacked: tuple[Tensor, ...]

    def create_lora_weights(self, max_loras: int, lora_config: Any, model_config: Any = None) -> None:
        super().create_lora_weights(max_loras, lora_config, model_config)
        (b_L1ER,) = self.lora_b_stacked
        self.lora_b_stacked = (b_L1ER.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),)  # [E, L R] in memory

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """lora_a [R, D] and lora_b [E, R], of which a process with some of the heads takes its part."""
        division, rank = self.base_layer.division, get_tensor_model_parallel_rank()
        if division.dim == 1 and lora_a.shape[1] != self.input_size:
            lora_a = division.take(lora_a, rank)
        if division.dim == 0 and lora_b.shape[0] != self.output_size:
            lora_b = division.take(lora_b, rank)
        super().set_lora(index, lora_a, lora_b)

    def apply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        y = self.base_layer(x)
        (a_L1RD,), (b_L1ER,) = self.lora_a_stacked, self.lora_b_stacked
        x_TD, rows = x.flatten(0, -2).to(a_L1RD.dtype), self.base_layer.rows.tokens
        slot_T = adapter_slots(self.punica_wrapper)
        slot_T = slot_T[: len(x_TD)] if rows is None else slot_T[rows]
        is_own_TL1 = (slot_T[:, None] == torch.arange(len(a_L1RD), device=x.device))[..., None]
        h_TLR = F.linear(x_TD, a_L1RD.flatten(0, 2)).unflatten(1, (len(a_L1RD), -1)) * is_own_TL1
        return y + F.linear(h_TLR.flatten(1), b_L1ER.squeeze(1).permute(1, 0, 2).flatten(1)).to(y.dtype).view_as(y)

    @classmethod
    def can_replace_layer(cls, source_layer: nn.Module, *given: Any, **named: Any) -> bool:
        return isinstance(source_layer, ServedLinear)


def is_quantized(given: nn.Linear, config: VllmConfig) -> bool:
    """Whether the layer's weight is quantised: in a file as the file says, by vLLM itself where the weight is large."""
    if getattr(config.model_config.hf_config, "quantization_config", None) is not None:
        return True
    sizes = given.in_features, given.out_features
    return min(sizes) >= SMALLEST and all(size % 16 == 0 for size in sizes)


def replace_projections(
    block: nn.Module, config: VllmConfig, name: str, rows: Rows, divisions: Mapping[str, Division]
) -> None:
    """Make vLLM's linear layers of all linear layers in a block of the model, whose weights are loaded later."""
    register_adapted(AdaptedLinear)
    for place, module in list(block.named_modules()):
        if isinstance(module, nn.Linear):
            full = f"{name}.{place}"
            block.set_submodule(place, ServedLinear(module, config, full, rows, divisions[f"{full}.weight"]))
