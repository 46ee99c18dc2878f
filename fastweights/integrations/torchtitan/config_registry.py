"""Configurations of torchtitan's trainer, one function each, which torchtitan finds by `--config`: every preset by its name with
"_" for "-" (`gdn_340m`), and `debug`, a small model. `trainer_config` makes one for a configuration of your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...models import FastWeightsConfig
from ...models.presets import PRESETS
from . import check_version

if TYPE_CHECKING:
    from .trainer import FastWeightsTrainer

__all__ = ["debug", "trainer_config"]

NAMES = {name.replace("-", "_"): name for name in PRESETS}


def trainer_config(flavor: str | Path | FastWeightsConfig) -> FastWeightsTrainer.Config:
    """The configuration of a training of the papers' kind: AdamW with a cosine schedule, rows of 2,048 tokens, bfloat16.

    Args:
        flavor: as for `fastweights.integrations.torchtitan.model_registry`.

    Raises:
        ValueError: no such preset or folder, or torchtitan is missing or of another version.
    """
    check_version()  # by a ValueError, because torchtitan hides an ImportError of a module that --module names
    from .defaults import build_config

    return build_config(flavor)


def debug() -> FastWeightsTrainer.Config:
    """Ten steps of a model of two layers, with the tokenizer and the text of torchtitan's own tests, in a checkout of it."""
    config = trainer_config(FastWeightsConfig(vocab_size=2048, hidden_size=256, num_hidden_layers=2, num_heads=4))
    config.training.steps, config.training.seq_len = 10, 512
    config.dataloader.dataset, config.lr_scheduler.warmup_steps = "c4_test", 2
    config.compile.enable = config.checkpoint.enable = False
    config.metrics.log_freq = 1
    return config


def __getattr__(name: str) -> Callable[[], FastWeightsTrainer.Config]:
    """The function of a preset."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return partial(trainer_config, NAMES[name])


def __dir__() -> list[str]:
    return [*__all__, *NAMES]
