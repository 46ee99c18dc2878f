"""Claims about trained models: their settings make experiments, their rules find their numbers, tiny ones train."""

import dataclasses

import pytest

from fastweights.experiments import Conditions, claims_of, find_claim, trained
from fastweights.results import RecallResult
from fastweights.training import RecallExperiment

RECALL = [claim.name for claim in claims_of() if claim.name in {f"C{number}" for number in range(22, 31)}]
LANGUAGE = ["C32", "C33", "C34"]


def result(run, accuracy):
    stages = [stage["steps"] for stage in run.get("curriculum", ())]
    ends = [sum(stages[: i + 1]) for i in range(len(stages))] or [run["steps"]]
    return RecallResult(
        run=run, status="finished", stopped_at=run["steps"], accuracy=accuracy, accuracy_steps=ends,
        accuracies=[accuracy] * len(ends), loss_steps=[1], losses=[1.0], undertrained=True, parameters=1, state_size=1,
        wall_seconds=1.0, cpu_seconds=1.0, versions={}, machine={}, chance=0.1, queries=10,
    )  # fmt: skip


@pytest.mark.parametrize("name", RECALL)
def test_settings_are_experiments_and_rules_find_their_numbers(name, monkeypatch, tmp_path):
    """The sizes are checked as for a training. Where every model is equally good, no claim of a difference holds."""

    def made(experiments, outputs, workers):
        return {part: [result(run.record(), 0.5) for run in one.runs()] for part, one in experiments.items()}

    monkeypatch.setattr(trained, "run_recall_parts", made)
    claim = find_claim(name)
    found = claim.measure(Conditions(seeds=claim.seeds, folder=tmp_path))
    verdict = claim.decide(found)
    assert found.undertrained and verdict.reason
    assert verdict.status in ("does not hold", "not resolved") or name == "C28"  # a tie is not worse


@pytest.mark.parametrize("name", LANGUAGE)
def test_settings_are_language_models_and_rules_find_their_numbers(name, monkeypatch, tmp_path):
    from fastweights.training import language

    trained_runs = []

    def made(run):
        run.models()
        trained_runs.append(run)
        lengths = [{"length": length, "loss": 2.0} for length in run.context_lengths]
        return [type("Result", (), {"held_out_loss": 2.0, "perplexities": lengths})()]

    monkeypatch.setattr(language, "train_language", made)
    claim = find_claim(name)
    verdict = claim.decide(claim.measure(Conditions(seeds=(1, 2, 3), folder=tmp_path)))
    assert verdict.status in ("does not hold", "not resolved")
    assert len({run.output for run in trained_runs}) == len(trained_runs) and {run.seed for run in trained_runs} == {
        1,
        2,
        3,
    }


def test_a_tiny_training_gives_accuracies_by_seed(tmp_path):
    settings = {"pairs": (2,), "steps": 3, "batch_size": 2, "width": 8, "heads": 1, "layers": 1, "vocab_size": 8,
                "test_examples": 8, "learning_rates": (1e-2, 1e-3), "mixers": ("linear",)}  # fmt: skip
    measure = trained.recall_experiment("C0", {"": settings})
    conditions = Conditions(seeds=(0, 1), folder=tmp_path, workers=1)
    found = measure(conditions)
    assert len(found.values["linear, 2 pairs"]) == 2 and found.undertrained == ("linear, 2 pairs",)
    assert all(0 <= x <= 1 for x in found.values["linear, 2 pairs"])
    assert found.values["learning rate of linear, 2 pairs"][0] in settings["learning_rates"]
    assert (tmp_path / "C0" / "all" / "results.json").exists()
    assert measure(conditions) == found  # read again, not trained again


def test_settings_of_the_paper_are_those_of_its_run_file():
    """The part of examples/recall/vla.toml that claims repeat."""
    from fastweights.training import load_recall_file

    file = load_recall_file("examples/recall/vla.toml", device="cpu")
    theirs = file.parts["tables-8-9-and-12"]
    ours = RecallExperiment(**trained.VLA_SETTINGS, pairs=(24,), seeds=theirs.seeds)
    for field in dataclasses.fields(ours):
        if field.name not in ("pairs", "evaluations"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
