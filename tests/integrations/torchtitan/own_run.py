"""A training of `fastweights train`, and what torchtitan's trainer needs to repeat it: the same rows and optimizer."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchtitan.components.optimizer import default_adamw

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights.data.text.packing import pack_rows
from fastweights.training.language import LanguageRun, train_language
from fastweights.training.language.rows import find_start, training_rows

from .configs import MadeUpRows

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills", "and", "rivers", "ran"]
STEPS, ROWS, RATE = 50, 4, 2e-3


def write_texts(folder: Path, count: int) -> None:
    (folder / "texts").mkdir()
    draw = random.Random(0)
    for number in range(count):
        lines = [" ".join(draw.choices(WORDS, k=7)) + "." for _ in range(draw.randint(5, 40))]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))


def own_run(folder: Path, model: dict[str, Any], length: int, **changes: Any) -> LanguageRun:
    """A run on the texts in the folder, of steps of `ROWS` rows. model: with its vocab_size."""
    fields = {
        "output": str(folder / "out"),
        "cache": str(folder / "cache"),
        "corpus": TextCorpus(paths=(str(folder / "texts"),), held_out_fraction=0.2),
        "tokenizer": TextTokenizer(vocab_size=model["vocab_size"]),
        "model": model,
        "length": length,
        "batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "schedule": "constant",
        "warmup_fraction": 0.0,
        "seed": 3,
        "log_every": 1,
        "evaluation_rows": 1,
        "context_lengths": (),
    }
    return LanguageRun(**{**fields, **changes})


def own_losses(run: LanguageRun) -> list[float]:
    """The losses of our own trainer."""
    train_language(run)
    points = [json.loads(line) for line in Path(run.output, "log.jsonl").read_text().splitlines()]
    return [point["loss"] for point in points if "loss" in point]


def settings_of(run: LanguageRun, readers: int = 1) -> dict[str, Any]:
    """torchtitan's settings, for `jobs.train`. readers: processes, or groups of them, that share the rows of a step."""
    return {
        "dataloader": RowsOfRun.Config(run=run),
        "optimizer": default_adamw(lr=run.learning_rate, weight_decay=run.weight_decay),
        "lr_scheduler.min_lr_factor": 1.0,
        "training.seq_len": run.length,
        "training.local_batch_size": ROWS // readers,
        "training.global_batch_size": ROWS,
    }


class RowsOfRun(MadeUpRows):
    """The rows that the training of a run reads."""

    @dataclass(kw_only=True, slots=True)
    class Config(MadeUpRows.Config):
        run: Any = None

    def __init__(self, config: Config, **sizes: Any) -> None:
        super().__init__(config, **sizes)
        run = config.run
        text = prepare_text(run.corpus, run.tokenizer, run.cache)
        self.rows = training_rows(run, text, find_start(run, text), count=STEPS * ROWS)

    def batch_of(self, numbers: range) -> tuple[dict[str, Tensor], Tensor]:
        packed = pack_rows([self.rows[row] for row in numbers])
        tokens, edges = packed["input_ids"][0], packed["cu_seqlens"].long()
        labels = torch.cat([packed["labels"][0, 1:], torch.tensor([-100])])  # of the next token
        positions = torch.arange(len(tokens)) - torch.repeat_interleave(edges[:-1], edges.diff())
        shape = (len(numbers), -1)
        return {"input": tokens.view(shape), "positions": positions.view(shape)}, labels.view(shape)
