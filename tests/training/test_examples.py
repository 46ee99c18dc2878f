"""The files of examples/recall: each builds at its own size, and trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from fastweights.training import RecallExperiment, load_recall_file, train_run
from fastweights.training.recall import check_models

FOLDER = Path(__file__).parents[2] / "examples" / "recall"
FILES = sorted(FOLDER.glob("*.toml"))


def shortened(experiment: RecallExperiment) -> RecallExperiment:
    """The experiment at one rate and seed, for two steps of two sequences in each stage."""
    stages = tuple(dataclasses.replace(stage, steps=2, batch_size=2) for stage in experiment.curriculum)
    steps = {"curriculum": stages, "steps": sum(stage.steps for stage in stages)} if stages else {"steps": 2}
    small = {"batch_size": 2, "test_examples": 2, "evaluations": 1, "seeds": experiment.seeds[:1]}
    return dataclasses.replace(experiment, learning_rates=experiment.learning_rates[:1], **small, **steps)


def test_every_experiment_has_a_small_form():
    names = {file.stem for file in FILES}
    assert len(names) >= 8
    assert names == {name.removesuffix("-small") + end for name in names for end in ("", "-small")}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_an_example_builds(file):
    read = load_recall_file(file, device="cpu")
    for experiment in read.parts.values():
        check_models(experiment.runs())
    assert read.output == f"runs/{file.stem}"
    small = file.stem.endswith("-small")
    assert (load_text(file, "device = ") == "") == small  # the full size needs a GPU
    tokens = sum(run.tokens for experiment in read.parts.values() for run in experiment.runs())
    assert tokens < 2e7 if small else tokens > 1e9


def load_text(file: Path, start: str) -> str:
    return "".join(line for line in file.read_text().splitlines() if line.startswith(start))


@pytest.mark.parametrize("file", [file for file in FILES if file.stem.endswith("-small")], ids=lambda file: file.stem)
def test_a_small_example_trains(file, tmp_path):
    for name, experiment in load_recall_file(file).parts.items():
        for run in shortened(experiment).runs():
            result = train_run(run, tmp_path / "run.checkpoint")
            assert result.status == "finished", (name, run.name)
            assert len(result.stage_values) == len(experiment.curriculum)
            (tmp_path / "run.checkpoint").unlink(missing_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if not file.stem.endswith("-small")], ids=lambda file: file.stem
)
def test_an_example_trains_at_its_own_size(file, tmp_path):
    parts = load_recall_file(file, device="cpu").parts
    experiment = shortened(next(iter(parts.values())))  # the others differ in length and pairs
    if experiment.curriculum:
        first = experiment.curriculum[:1]
        experiment = dataclasses.replace(
            experiment, curriculum=first, pairs=(first[0].pairs,), length=first[0].length, steps=first[0].steps
        )
    runs = experiment.runs()
    for run in {run.choice.label: run for run in runs}.values():
        assert train_run(run, tmp_path / f"{run.name}.checkpoint").status == "finished"
