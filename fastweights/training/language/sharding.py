"""FSDP2 in a training: which modules gather their parameters, in which precision, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .run import LanguageRun

__all__ = ["ForwardPrefetch", "autocast_policy", "fsdp_config", "cast_to_float32"]


def fsdp_config(run: LanguageRun, blocks: Iterable[torch.nn.Module]) -> dict[str, Any]:
    """TrainingArguments.fsdp_config. Besides `blocks`, accelerate gathers the embedding alone, and the last norm with the output
    layer, whose parameters it always keeps for the backward."""
    return {
        "version": 2,
        "transformer_layer_cls_to_wrap": sorted({type(block).__name__ for block in blocks}),
        "reshard_after_forward": run.reshard_after_forward,
    }


class ForwardPrefetch(TrainerCallback):
    """Every module starts to gather the parameters of the next `ahead` modules before it computes. By default FSDP2 starts when
    the host reaches these modules: where kernels run faster than the host launches them, the GPU then waits for parameters."""

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        assert sharded, "FSDP2 has sharded no module"
        for number, module in enumerate(sharded, 1):
            module.set_modules_to_forward_prefetch(sharded[number : number + self._ahead])


def autocast_policy(reduce_dtype: str) -> Any:
    """FSDP2's precision for what autocast computes in bfloat16: parameters are gathered in it. The residual stream and the loss
    stay in float32, as without sharding, and gradients are added up in `reduce_dtype`. accelerate's own policy has all of them
    in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=getattr(torch, reduce_dtype),
        output_dtype=torch.float32,
        cast_forward_inputs=False,
    )


def cast_to_float32(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor:
    """Forward hook: the output in float32."""
    return output.float()
