"""torchtitan's trainer and validation, with the batches of our context parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.components.validate import Validator
from torchtitan.trainer import Trainer

from ...distributed import own_tokens

__all__ = ["FastWeightsTrainer", "FastWeightsValidator"]


def _divide(inputs: dict[str, Tensor], labels: Tensor, mesh: DeviceMesh) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The whole batch for the model, which takes its own part of it, and the labels of that part."""
    rest = {name: x for name, x in inputs.items() if name != "input"}
    return inputs["input"], own_tokens(labels, mesh, filling=IGNORE_INDEX), rest


class FastWeightsValidator(Validator):
    """torchtitan's validation, with the batches of our context parallelism."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if not self.parallel_dims.cp_enabled:
            return super().post_dataloading_process(input_dict, labels, model_parts)
        return _divide(input_dict, labels, self.parallel_dims.get_mesh("cp"))


class FastWeightsTrainer(Trainer):
    """torchtitan's trainer, with the batches of our context parallelism: all processes of a group get the same whole batch."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        validator: Validator.Config = field(default_factory=FastWeightsValidator.Config)

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        tokens, entries = self.tokenizer.get_vocab_size(), self.model_config.architecture.vocab_size
        if tokens > entries:
            raise ValueError(
                f"the model must have an entry for every token, but the tokenizer in {config.hf_assets_path} has {tokens} and "
                f"vocab_size is {entries}; use another tokenizer, or a configuration with a larger vocab_size"
            )

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        if not self.parallel_dims.cp_enabled:
            return super().post_dataloading_process(input_dict, labels)
        inputs, labels, rest = _divide(input_dict, labels, self.parallel_dims.get_mesh("cp"))
        self.ntokens_seen += labels.numel()
        return inputs, labels, rest
