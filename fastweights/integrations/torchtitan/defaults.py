"""Settings of torchtitan's trainer for these models."""

from __future__ import annotations

from pathlib import Path

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

from ...models import FastWeightsConfig
from .checkpoints import CheckpointsWithConfig
from .spec import build_spec
from .trainer import FastWeightsTrainer

__all__ = ["build_config"]


def build_config(flavor: str | Path | FastWeightsConfig) -> FastWeightsTrainer.Config:
    """See `fastweights.integrations.torchtitan.config_registry.trainer_config`."""
    spec = build_spec(flavor)
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
