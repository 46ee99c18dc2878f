"""Tasks of users: registered in a module of their own, and known to every command, to workers, to tables and plots."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from fastweights.cli import main
from fastweights.data import (
    MQAR,
    TASKS,
    Draws,
    Palindrome,
    RecallTask,
    VectorBatch,
    VectorTask,
    make_task,
    register_task,
    registry,
)
from fastweights.evaluation import MEASURES, EvaluationSettings, evaluate, word_recall
from fastweights.layers import import_mixers
from fastweights.models import FastWeightsConfig
from fastweights.training.recall.objectives import make_objective

from ..evaluation.small import model, tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_package" / "fading" / "look_back.py"
RUN = """
task = "look-behind"
task_options = {back = 3}
mixers = ["linear"]
pairs = [6]
vocab_size = 8
width = 8
heads = 2
layers = 1
steps = 3
batch_size = 2
test_examples = 4
learning_rates = [0.01]
output = "runs"
workers = 1
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = set(sys.modules)
    monkeypatch.setattr(registry._REGISTRY, "specs", {name: TASKS[name] for name in registry.ORDER})
    yield
    for name in set(sys.modules) - modules:
        if name.startswith("fastweights_import_"):
            del sys.modules[name]


@pytest.fixture
def look_behind(tmp_path: Path) -> str:
    """A file with the task of the example, under a name that no installed package has."""
    file = tmp_path / "look_behind.py"
    file.write_text(EXAMPLE.read_text().replace('"look-back"', '"look-behind"'))
    return str(file)


def test_a_task_is_its_file_and_its_registration(look_behind: str) -> None:
    with pytest.raises(ValueError, match="'look-bakc'.*; register a task of your own first .*--import MODULE"):
        make_task("look-bakc", pairs=4)
    import_mixers([look_behind])
    assert list(TASKS) == [*registry.ORDER, "look-behind"]
    task = make_task("look-behind", pairs=4, length=6, vocab_size=5, back=1)
    assert isinstance(task, RecallTask)
    ids, labels = task.batch("test", seed=0, index=0, batch_size=3)
    assert not ids[:, :2].any() and (labels[:, :3] == -100).all() and torch.equal(labels[:, 3:], ids[:, 2:5])
    with pytest.raises(ValueError, match="back must be from 1 to 3"):
        make_task("look-behind", pairs=4, back=4)
    with pytest.raises(ValueError, match=r"an option of task 'look-behind'.*did you mean 'back'"):
        make_task("look-behind", pairs=4, bakc=1)


@pytest.mark.slow
def test_commands_know_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], look_behind: str
) -> None:
    """A run file with the task trains in a worker process, and its results are a table and plots."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("run.toml").write_text(RUN)
    assert main(["recall", "run.toml"]) == 2
    assert "task must be one of 'mqar'" in capsys.readouterr().err
    given = ["--import", look_behind]
    assert main(["tasks", *given]) == 0 and main(["tasks", "look-behind", *given]) == 0
    shown = capsys.readouterr().out
    assert "look-behind accuracy tokens" in " ".join(shown.split())
    assert "how many places before a token" in shown and "back" in shown.rpartition("Options")[2]
    assert main(["recall", "run.toml", *given, "--quiet"]) == 0
    (run,) = json.loads(Path("runs", "results.json").read_text())["runs"]
    assert run["run"]["task"] == "look-behind" and run["run"]["task_options"] == {"back": 3} and run["queries"] == 4 * 3
    assert "6 tokens" in capsys.readouterr().out and Path("runs", "accuracy-by-pairs.png").exists()


@dataclass(frozen=True, kw_only=True)
class Doubled(VectorTask):
    """x_i is answered by 2 x_i."""

    name: ClassVar[str] = "doubled"
    summary: ClassVar[str] = "twice the input"
    by_token: ClassVar[bool] = False

    channels = 1
    chance = 4.0

    def shortest_length(self) -> int:
        return self.pairs

    def draw_associations(self, draws: Draws, split: str, rows: int) -> np.ndarray:
        return draws.below(2**30, (rows, 2, self.pairs))

    def lay_out(self, draws: Draws, associations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        x = (associations[:, 1, :, None] / 2**29 - 1).astype("float32")
        return x, 2 * x

    def predict(self, batch: VectorBatch) -> dict[str, torch.Tensor]:
        return {"exact": 2 * batch.inputs.double()}


def test_a_task_of_vectors_is_trained_beside_its_best_predictor() -> None:
    register_task(Doubled)
    task = make_task("doubled", pairs=5)
    objective = make_objective(task)
    torch.manual_seed(0)
    model = objective.build(
        FastWeightsConfig(vocab_size=1, hidden_size=8, num_hidden_layers=1, num_heads=1, mixer="linear")
    )
    loss = objective.loss(model, *objective.inputs(task.batch("train", seed=0, index=0, batch_size=4)))
    found = objective.measure(model, seed=0, examples=6, device="cpu")
    assert loss > 0 and found.value > found.best == 0.0 and found.by_token == {}


@dataclass(frozen=True, kw_only=True)
class Twice(Palindrome):
    """Asked in words, as `Palindrome` is."""

    name: ClassVar[str] = "twice"

    def _answers(self, tokens: np.ndarray) -> np.ndarray:
        return np.repeat(tokens[:, :1], self.pairs, 1)


def test_text_models_are_asked_a_task_in_words() -> None:
    with pytest.raises(ValueError, match="a measure must be one of 'perplexity'.*got 'twice'"):
        EvaluationSettings(measures=["twice"])
    register_task(Twice)
    settings = EvaluationSettings(measures=["twice"], lengths=(9,), pairs=3, symbols=16, recall_examples=4)
    assert "twice" in MEASURES and "mqar-ood" not in MEASURES and MEASURES[0] == "perplexity"
    ((measure, (row,)),) = evaluate(model(), tokenizer(), settings)
    assert (measure, row.task, row.length, row.chance) == ("twice", "twice", 9, 1 / 3)
    with pytest.raises(ValueError, match="must be one of 'mqar', 'mqar-shuffled', 'copy', 'palindrome', 'twice'"):
        word_recall(model(), tokenizer(), "mqar-ood")


class Undecorated(RecallTask):
    name: ClassVar[str] = "undecorated"
    summary: ClassVar[str] = "s"


@dataclass(frozen=True, kw_only=True)
class Unfinished(RecallTask):
    name: ClassVar[str] = "unfinished"
    summary: ClassVar[str] = "s"


@dataclass(frozen=True, kw_only=True)
class WithoutDefault(MQAR):
    depth: int
    name: ClassVar[str] = "without-default"


@dataclass(frozen=True, kw_only=True)
class Taken(MQAR):
    pass


@dataclass(frozen=True, kw_only=True)
class Spaced(MQAR):
    name: ClassVar[str] = "two words"


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (MQAR(pairs=4), TypeError, "task must be a subclass of fastweights.data.RecallTask or VectorTask"),
        (Undecorated, TypeError, "task must be a dataclass, Undecorated is none; put @dataclass"),
        (Unfinished, TypeError, "task Unfinished must define draw_associations, lay_out, shortest_length"),
        (WithoutDefault, TypeError, "options of task 'without-default' must have defaults, depth has none"),
        (Taken, ValueError, "task 'mqar' is taken by fastweights.data.mqar.MQAR; choose another name"),
        (Spaced, ValueError, "name must be of letters, digits.*got 'two words'"),
    ],
)
def test_wrong_registrations_are_refused(task: type[RecallTask], error: type[Exception], message: str) -> None:
    before = dict(registry._REGISTRY.specs)
    with pytest.raises(error, match=message):
        register_task(task)
    assert registry._REGISTRY.specs == before


def test_a_class_that_is_defined_again_takes_its_place() -> None:
    assert register_task(Doubled) is Doubled and register_task(Doubled) is Doubled and TASKS["doubled"] is Doubled
