"""Trainings of text that take a fraction of a second, and what to compare of them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training.language import LanguageRun

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills", "and", "rivers", "ran"]


def write_texts(folder: Path, files: int = 24) -> None:
    """Files of sentences, the same ones each time."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for number in range(files):
        lines = [" ".join(draw.choices(WORDS, k=7)) + "." for _ in range(draw.randint(1, 20))]
        (folder / f"{number}.txt").write_text("\n".join(lines))


def small_run(folder: Path, **changes: Any) -> LanguageRun:
    """A run on `folder`/texts, which are written if they are missing; output goes to `folder`/out."""
    if not (folder / "texts").exists():
        write_texts(folder / "texts")
    return LanguageRun(
        **{
            "output": str(folder / "out"),
            "cache": str(folder / "cache"),
            "corpus": TextCorpus(paths=(str(folder / "texts"),), held_out_fraction=0.2),
            "tokenizer": TextTokenizer(vocab_size=300),
            "model": {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "gdn"},
            "length": 32,
            "batch_size": 2,
            "max_steps": 8,
            "learning_rate": 1e-2,
            "log_every": 1,
            "evaluate_every": 4,
            "evaluation_rows": 7,
            "checkpoint_every": 3,
            "context_lengths": (16, 64),
            "context_texts": 2,
            **changes,
        }
    )


def log(run: LanguageRun) -> list[dict[str, Any]]:
    """The points of a run's log."""
    return [json.loads(line) for line in Path(run.output, "log.jsonl").read_text().splitlines()]


def losses(run: LanguageRun) -> list[float]:
    return [point["loss"] for point in log(run) if "loss" in point]


SHARD = "optimizer/shard-00001-of-00001.safetensors"  # the moments of a checkpoint that one process wrote


def moments(run: LanguageRun, step: int) -> dict[str, Any]:
    """Those of a checkpoint that one process wrote, by the names of parameters."""
    return load_file(Path(run.output, f"checkpoints/checkpoint-{step}", SHARD))


def assert_same_losses(result, expected):
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.held_out_losses, expected.held_out_losses, rtol=1e-5, atol=1e-5)
