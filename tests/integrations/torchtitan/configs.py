"""Configurations of the tests for `--config`: small models in float32 on text that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.tokenizer import BaseTokenizer

from fastweights.integrations.torchtitan.config_registry import trainer_config
from fastweights.models import FastWeightsConfig

VOCABULARY, LENGTH = 64, 32


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **kwargs: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError

    def get_vocab_size(self) -> int:
        return VOCABULARY


class MadeUpRows(BaseDataLoader):
    """Rows of a counting rule with noise, drawn from their number: row i of a step is the same however steps are divided."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        documents: bool = False
        infinite: bool = True  # set by torchtitan's validation

    def __init__(
        self, config: Config, *, dp_world_size: int, dp_rank: int, seq_len: int, local_batch_size: int, **kwargs: Any
    ) -> None:
        self.config, self.rank, self.size = config, dp_rank, dp_world_size
        self.length, self.batch, self.read = seq_len, local_batch_size, 0

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while True:
            first = (self.read * self.size + self.rank) * self.batch
            batch = self.batch_of(range(first, first + self.batch))
            self.read += 1
            yield batch

    def batch_of(self, numbers: range) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tokens, labels, positions = (torch.stack(x) for x in zip(*(made_up_row(row, self.length) for row in numbers)))
        return {"input": tokens, **({"positions": positions} if self.config.documents else {})}, labels

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.read * self.size * self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.read = state_dict["rows"] // (self.size * self.batch)


def made_up_row(number: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels and positions of two documents."""
    draw = np.random.default_rng(number)
    step, border = draw.integers(1, 4), draw.integers(5, length - 5)
    tokens = (draw.integers(VOCABULARY) + step * np.arange(length + 1) + (draw.random(length + 1) < 0.2)) % VOCABULARY
    positions = np.concatenate([np.arange(border), np.arange(length - border)])
    return torch.from_numpy(tokens[:-1]), torch.from_numpy(tokens[1:]), torch.from_numpy(positions)


def architecture(**changes: Any) -> FastWeightsConfig:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4}
    return FastWeightsConfig(**{**sizes, **changes})


def made_up(flavor: str | FastWeightsConfig) -> Any:
    """The usual configuration, on rows that are made up."""
    config = trainer_config(flavor)
    config.tokenizer, config.dataloader = NoTokenizer.Config(), MadeUpRows.Config(documents=True)
    return config


def gdn_340m() -> Any:
    """For a GPU."""
    return made_up("gdn-340m")


def small(**model: Any) -> Any:
    """One step reads four rows. model: changes to the architecture."""
    config = made_up(architecture(**model))
    config.optimizer = default_adamw(lr=1e-2)
    config.lr_scheduler.warmup_steps = 0
    config.training.seq_len, config.training.local_batch_size, config.training.global_batch_size = LENGTH, 1, 4
    config.training.mixed_precision_param = "float32"
    config.compile.enable = config.checkpoint.enable = False
    config.metrics.log_freq, config.debug.seed = 1, 3
    return config
