"""Tiny models, texts and trainings for TRL's trainers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trl.trainer.base_config import _BaseConfig

from fastweights.models import FastWeightsForCausalLM

from ..evaluation.small import TEXT, model, tokenizer

HYBRID = ["pgdn", {"name": "softmax", "window": 7}, "kda"]

__all__ = ["HYBRID", "lm", "passages", "settings", "tokenizer"]


def lm(mixer: Any = HYBRID, **options: Any) -> FastWeightsForCausalLM:
    return model(mixer, **options)


def passages(count: int) -> list[str]:
    """Texts of different lengths."""
    words = TEXT.split()
    return [" ".join(words[20 * n : 20 * n + 3 + n % 7]) for n in range(count)]


def settings(kind: type[_BaseConfig], folder: Path, **options: Any) -> Any:
    """Of a short training on the CPU, in float32."""
    plain = {
        "max_steps": 3, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "logging_steps": 1,
        "lr_scheduler_type": "constant", "report_to": [], "use_cpu": True, "bf16": False, "disable_tqdm": True,
        "save_strategy": "no", "seed": 0,
    }  # fmt: skip
    return kind(output_dir=str(folder), **{**plain, **options})
