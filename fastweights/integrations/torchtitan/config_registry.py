"""Configurations of torchtitan's trainer, a function for each: every preset by its name with "_" for "-" (`gdn_340m`), and `debug`,
a small model. torchtitan finds them by `--config`. `trainer_config` makes one of a configuration of your own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from ...models import FastWeightsConfig
from ...models.presets import PRESETS
from .checkpoints import CheckpointsWithConfig
from .spec import model_registry
from .trainer import FastWeightsTrainer

__all__ = ["debug", "trainer_config"]

NAMES = {name.replace("-", "_"): name for name in PRESETS}


def trainer_config(flavor: str | Path | FastWeightsConfig) -> FastWeightsTrainer.Config:
    """The configuration of a training of the papers' kind: AdamW with a cosine schedule, 2,048 tokens per row, bfloat16.

    Args:
        flavor: as for `fastweights.integrations.torchtitan.model_registry`.
    """
    spec = model_registry(flavor)
    vocabulary = spec.model.architecture.vocab_size
    return FastWeightsTrainer.Config(
        model_spec=spec,
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocabulary)),
        optimizer=default_adamw(lr=4e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=2048,
            steps=10_000,
            disable_cuda_graphs=True,  # the number of documents in a batch changes from step to step
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor", enable_sequence_parallel=False),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        compile=CompileConfig(enable=True),
        checkpoint=CheckpointsWithConfig.Config(enable=True),
        activation_checkpoint=None,
    )


def debug() -> FastWeightsTrainer.Config:
    """Ten steps of a model of two layers, on the tokenizer and the text of torchtitan's own tests, in a checkout of it."""
    small = FastWeightsConfig(vocab_size=2048, hidden_size=256, num_hidden_layers=2, num_heads=4)
    config = trainer_config(small)
    config.training.steps, config.training.seq_len = 10, 512
    config.dataloader.dataset, config.lr_scheduler.warmup_steps = "c4_test", 2
    config.compile.enable = config.checkpoint.enable = False
    config.metrics.log_freq = 1
    return config


def __getattr__(name: str) -> Callable[[], FastWeightsTrainer.Config]:
    """The presets, of which `--config` names one."""
    if name not in NAMES:
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return partial(trainer_config, NAMES[name])


def __dir__() -> list[str]:
    return [*__all__, *NAMES]
