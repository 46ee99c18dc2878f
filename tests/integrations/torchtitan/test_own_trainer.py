"""torchtitan and `fastweights train` give one loss curve for the same weights, rows and optimizer."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import default_adamw

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights.data.text.packing import pack_rows
from fastweights.training.language import LanguageRun, train_language
from fastweights.training.language.rows import find_start, training_rows

from .jobs import started, train

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills", "and", "rivers", "ran"]
STEPS, ROWS, LENGTH, RATE = 50, 4, 32, 2e-3


class RowsOfRun(BaseDataLoader):
    """The rows that the training of a run reads, on one process."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        run: Any = None

    def __init__(
        self, config: Config, *, local_batch_size: int, dp_rank: int, dp_world_size: int, **kwargs: Any
    ) -> None:
        run = config.run
        text = prepare_text(run.corpus, run.tokenizer, run.cache)
        self.rows = training_rows(run, text, find_start(run, text), count=STEPS * ROWS)
        self.batches = range(dp_rank * local_batch_size, STEPS * ROWS, dp_world_size * local_batch_size)
        self.size = local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        for first in self.batches:
            packed = pack_rows([self.rows[row] for row in range(first, first + self.size)])
            tokens, edges = packed["input_ids"][0], packed["cu_seqlens"].long()
            labels = torch.cat([packed["labels"][0, 1:], torch.tensor([-100])])  # of the next token
            positions = torch.arange(len(tokens)) - torch.repeat_interleave(edges[:-1], edges.diff())
            shape = (self.size, -1)
            yield {"input": tokens.view(shape), "positions": positions.view(shape)}, labels.view(shape)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> LanguageRun:
    folder = tmp_path_factory.mktemp("run")
    (folder / "texts").mkdir()
    draw = random.Random(0)
    for number in range(24):
        lines = [" ".join(draw.choices(WORDS, k=7)) + "." for _ in range(draw.randint(5, 40))]
        (folder / "texts" / f"{number}.txt").write_text("\n".join(lines))
    return LanguageRun(
        output=str(folder / "out"),
        cache=str(folder / "cache"),
        corpus=TextCorpus(paths=(str(folder / "texts"),), held_out_fraction=0.2),
        tokenizer=TextTokenizer(vocab_size=300),
        model={"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 4, "mixer": "gdn"},
        length=LENGTH,
        batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=RATE,
        schedule="constant",
        warmup_fraction=0.0,
        seed=3,
        log_every=1,
        evaluation_rows=1,
        context_lengths=(),
    )


@pytest.fixture(scope="module")
def own(run: LanguageRun) -> list[float]:
    """The losses of our own trainer."""
    train_language(run)
    points = [json.loads(line) for line in Path(run.output, "log.jsonl").read_text().splitlines()]
    return [point["loss"] for point in points if "loss" in point]


@pytest.mark.parametrize(
    ("count", "settings"),
    [(1, {"training.local_batch_size": ROWS}), (2, {"parallelism.tensor_parallel_degree": 2})],
    ids=["alone", "tensor"],
)
def test_the_loss_curve_is_that_of_our_own_trainer(
    count: int, settings: dict[str, Any], run: LanguageRun, own: list[float]
) -> None:
    settings = {
        "dataloader": RowsOfRun.Config(run=run),
        "optimizer": default_adamw(lr=RATE, weight_decay=run.weight_decay),
        "lr_scheduler.min_lr_factor": 1.0,
        "training.local_batch_size": ROWS,
        "training.global_batch_size": ROWS,
        **settings,
    }
    found = started(count).run(train, settings, STEPS, False, {"vocab_size": 300})
    losses = list(found[0]["losses"].values())
    assert len(own) == len(losses) == STEPS and own[-1] < 0.8 * own[0]
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(own), rtol=1e-5, atol=0)
