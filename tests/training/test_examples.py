"""The files of examples/recall: each builds at its own size, and trains."""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fastweights.training import RecallExperiment, RecallFile, Stage, load_recall_file, train_run
from fastweights.training.recall.run import check_models
from tests.fast_set import fast_where

FOLDER = Path(__file__).parents[2] / "examples" / "recall"
DIVERGE = ("vla without unit keys",)  # its NaN is a row of the paper's table 4
FILES = sorted(FOLDER.glob("*.toml"))


@cache
def loaded(file: Path) -> RecallFile:
    """What a file says, for a machine without a GPU."""
    return load_recall_file(file, device="cpu")


def shortened(experiment: RecallExperiment) -> RecallExperiment:
    """The experiment at one rate and seed, for two steps of two sequences in each stage."""
    stages = tuple(dataclasses.replace(stage, steps=2, batch_size=2) for stage in experiment.curriculum)
    steps = {"curriculum": stages, "steps": sum(stage.steps for stage in stages)} if stages else {"steps": 2}
    small = {"batch_size": 2, "test_examples": 2, "evaluations": 1, "seeds": experiment.seeds[:1]}
    if experiment.train_examples:
        small["train_examples"] = 4
    return dataclasses.replace(experiment, learning_rates=experiment.learning_rates[:1], **small, **steps)


def test_every_experiment_has_a_small_form():
    names = {file.stem for file in FILES}
    assert len(names) >= 8
    assert names == {name.removesuffix("-small") + end for name in names for end in ("", "-small")}


# The models of the other full sizes take seconds to build.
BUILT = [
    pytest.param(
        file, marks=() if file.stem.endswith("-small") or file.stem == "palimpsa-figure-2" else pytest.mark.slow
    )
    for file in FILES
]


@pytest.mark.parametrize("file", BUILT, ids=lambda file: file.stem)
def test_an_example_builds(file):
    read = loaded(file)
    for experiment in read.parts.values():
        check_models(experiment.runs())
    assert read.output == f"runs/{file.stem}"
    small = file.stem.endswith("-small")
    assert (load_text(file, "device = ") == "") == small  # the full size needs a GPU
    tokens = sum(run.tokens for experiment in read.parts.values() for run in experiment.runs())
    assert tokens < 2e7 if small else tokens > 1e9


def load_text(file: Path, start: str) -> str:
    return "".join(line for line in file.read_text().splitlines() if line.startswith(start))


@fast_where(lambda given: given["file"].stem == "gka-figure-3a-small")
@pytest.mark.parametrize("file", [file for file in FILES if file.stem.endswith("-small")], ids=lambda file: file.stem)
def test_a_small_example_trains(file, tmp_path):
    for name, experiment in loaded(file).parts.items():
        for run in shortened(experiment).runs():
            result = train_run(run, tmp_path / "run.checkpoint")
            assert result.status == "finished", (name, run.name)
            assert len(result.stage_values) == len(experiment.curriculum)
            (tmp_path / "run.checkpoint").unlink(missing_ok=True)


# What the papers print, or Zoology's code where a paper refers to it: settings of every part, and cells (length, pairs, steps).
COSINE_TO_0 = {"schedule": "cosine", "warmup_fraction": 0, "final_fraction": 0}
ZOOLOGY = {
    "vocab_size": 8192, "layers": 2, "train_examples": 100_000, "test_examples": 3000, "tie_word_embeddings": True,
    "weight_decay": 0.1, "learning_rates": (1e-4, 4.64e-4, 2.15e-3, 1e-2), "task_options": {"random_non_queries": False},
    **COSINE_TO_0,
}  # fmt: skip
PRINTED: dict[str, dict[str, Any]] = {
    "gka-figure-3a": {**ZOOLOGY, "intermediate_size": 0},
    "pdn-figure-5": {**ZOOLOGY, "width": 128, "intermediate_size": 512, "mixers": ("deltanet", "pdn", "gdn", "pgdn")},
    "palimpsa-figure-2": {
        "vocab_size": 8192, "width": 128, "heads": 8, "layers": 2, "learning_rates": (1e-3, 2.15e-3, 4.64e-3, 1e-2),
        "seeds": (1, 2, 3, 4, 5, 6, 7, 8), "intermediate_size": 0, "tie_word_embeddings": True, "scale_residuals": False,
        "curriculum": (
            Stage(length=128, pairs=32, steps=15_620), Stage(length=256, pairs=64, steps=15_620),
            Stage(length=512, pairs=128, steps=15_620), Stage(length=1024, pairs=256, steps=31_240, batch_size=64),
        ),
    },
    "vla": {
        "vocab_size": 128, "width": 128, "heads": 4, "layers": 2, "intermediate_size": 256, "tie_word_embeddings": True,
        "learning_rates": (3e-4,), "schedule": "cosine", "warmup_fraction": 0.1, "weight_decay": 0.01, "beta1": 0.9,
        "beta2": 0.999, "max_gradient_norm": 1.0, "test_examples": 960,
    },
}  # fmt: skip
# Zoology's batches, 64 epochs.
EPOCHS = {128: (512, 12_480), 256: (256, 24_960), 512: (128, 49_984), 1024: (64, 99_968)}
# Parts of vla.toml: task, pairs, length, steps, batch_size, seeds.
THREE, ONE = (42, 123, 999), (42,)
VLA = {
    "tables-8-9-and-12": ("mqar-shuffled", (4, 8, 12, 16, 24), None, 2000, 64, THREE),
    "tables-10-and-11": ("mqar-shuffled", (8, 16, 24, 32, 48), None, 1000, 64, ONE),
    "table-4": ("mqar-shuffled", (16, 48), None, 1000, 64, ONE),
    "table-13": ("mqar-shuffled-ood", (8, 16, 24), None, 1000, 64, ONE),
    **{f"figure-6-length-{length}": ("mqar-shuffled", (8,), length, 2000, 64, THREE) for length in (64, 128, 256, 512)},
    "table-7": ("copy", (32,), None, 1500, 32, ONE),
}


@pytest.mark.parametrize("stem", PRINTED)
def test_a_full_size_example_has_the_settings_of_its_paper(stem):
    parts = loaded(FOLDER / f"{stem}.toml").parts
    for name, experiment in parts.items():
        assert {key: getattr(experiment, key) for key in PRINTED[stem]} == PRINTED[stem], name
        if "steps" not in PRINTED[stem] and "train_examples" in PRINTED[stem]:
            assert (experiment.batch_size, experiment.steps) == EPOCHS[experiment.length], name
            assert experiment.steps == 64 * (100_000 // experiment.batch_size)
    cells = {(part.width, part.length, pairs) for part in parts.values() for pairs in part.pairs}
    if stem == "gka-figure-3a":
        assert cells == {(w, *cell) for w in (64, 128, 256) for cell in ((256, 64), (512, 128))}
    if stem == "pdn-figure-5":
        fixed_pairs, fixed_ratio = {(128, 32), (256, 32), (512, 32), (1024, 32)}, {(256, 32), (512, 64), (1024, 128)}
        assert cells == {(128, *cell) for cell in fixed_pairs | fixed_ratio | {(1024, 64)}}
    if stem == "vla":
        keys = ("task", "pairs", "length", "steps", "batch_size", "seeds")
        assert {name: tuple(getattr(part, key) for key in keys) for name, part in parts.items()} == VLA
        every = {round(parts["table-7"].steps * part / 30) for part in range(1, 31)}
        assert {50, 100, 150, 300, 600, 1500} <= every and parts["table-7"].evaluations == 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "file", [file for file in FILES if not file.stem.endswith("-small")], ids=lambda file: file.stem
)
def test_an_example_trains_at_its_own_size(file, tmp_path):
    """Each mixer on each task, in the smallest part that has them."""
    runs: dict[Any, Any] = {}
    for experiment in loaded(file).parts.values():
        short = shortened(experiment)
        if short.curriculum:
            first = short.curriculum[:1]
            changes = {"pairs": (first[0].pairs,), "length": first[0].length, "steps": first[0].steps}
            short = dataclasses.replace(short, curriculum=first, **changes)
        for run in short.runs():
            known = runs.setdefault((run.choice.label, run.task), run)
            if run.tokens * run.width < known.tokens * known.width:
                runs[run.choice.label, run.task] = run
    for run in runs.values():
        status = train_run(run, tmp_path / f"{run.name}.checkpoint").status
        assert status == ("diverged" if run.choice.label in DIVERGE else "finished"), run.name
