"""Claims about trained models: their settings make experiments, their rules find their numbers, tiny ones train."""

import dataclasses
import math
import time
from contextlib import nullcontext

import pytest
import torch
from fastweights_studies import rate_search
from fastweights_studies.claims import Conditions, claims_of, find_claim, trained
from fastweights_studies.claims.conditions import Unmeasured
from fastweights_studies.claims.measurement import UNDERTRAINED
from fastweights_studies.claims.papers import c35_parts_of_gka as gka
from fastweights_studies.claims.readings import SECOND_WEIGHTS
from fastweights_studies.own import o1_least_squares_as_layers as squares

from fastweights.layers import MixerChoice
from fastweights.results import RecallResult
from fastweights.training import RecallExperiment, pool
from fastweights.training.language import together
from tests.training.language.small import small_run, write_texts

RECALL = [claim.name for claim in claims_of() if claim.name in {f"C{number}" for number in range(22, 32)}]
LANGUAGE = ["C32", "C33", "C34", "C35"]


def result(run, accuracy):
    stages = [stage["steps"] for stage in run.get("curriculum", ())]
    ends = [sum(stages[: i + 1]) for i in range(len(stages))] or [run["steps"]]
    watched = {"step": [50.0, 100.0, 150.0], "window": [9.0, 99.0, 999.0], "metaplasticity ratio": [1.0, 2.0, 90.0]}
    return RecallResult(
        run=run, status="finished", stopped_at=run["steps"], accuracy=accuracy, accuracy_steps=ends,
        accuracies=[accuracy] * len(ends), loss_steps=[1], losses=[1.0], undertrained=True, parameters=1, state_size=1,
        wall_seconds=1.0, cpu_seconds=1.0, versions={}, machine={}, chance=0.1, queries=10,
        watched=watched if "watch_every" in run else {},
    )  # fmt: skip


@pytest.mark.parametrize("name", RECALL)
def test_settings_are_experiments_and_rules_find_their_numbers(name, monkeypatch, tmp_path):
    """The sizes are checked as for a training. Where every model is equally good, no claim of a difference holds."""

    def made(experiments, outputs, workers):
        return {part: [result(run.record(), 0.5) for run in one.runs()] for part, one in experiments.items()}

    for module in (trained, rate_search):
        monkeypatch.setattr(module, "run_recall_parts", made)
    claim = find_claim(name)
    found = claim.measure(Conditions(seeds=claim.seeds, folder=tmp_path))
    verdict = claim.decide(found)
    assert found.select(UNDERTRAINED) and verdict.reason
    assert verdict.status == ("not resolved" if name in ("C28", "C29", "C30") else "does not hold")  # ties
    assert claim.decide(found) == verdict


def test_trainings_that_diverged_are_counted_and_said(monkeypatch, tmp_path):
    """Their accuracy counts as 0."""

    def made(experiments, outputs, workers):
        return {
            part: [ended(part, result(run.record(), 0.5)) for run in one.runs()] for part, one in experiments.items()
        }

    def ended(part, finished):
        lost = part == "first weights 0.05" and finished.mixer == "vla-deltanet" and finished.run["seed"] == 42
        return dataclasses.replace(finished, status="diverged", accuracy=None) if lost else finished

    monkeypatch.setattr(trained, "run_recall_parts", made)
    claim = find_claim("C27")
    found = claim.measure(Conditions(seeds=claim.seeds, folder=tmp_path))
    fields = {"pairs": 32, "initializer_range": SECOND_WEIGHTS}
    assert found.values("accuracy", "vla-deltanet", **fields) == [0.0, 0.5, 0.5]
    assert found.values("diverged_trainings", "vla-deltanet", **fields) == [1]
    assert len(found.select("diverged_trainings")) == 1
    assert claim.decide(found).reason.count("; diverged trainings: 1 of vla-deltanet, 32 pairs") == 1


def test_the_larger_size_searches_its_rates_with_the_first_seed(monkeypatch, tmp_path):
    """84 trainings in own-1, in folders beside those of the smaller size."""
    runs, folders = [], set()

    def made(experiments, outputs, workers):
        runs.extend(run for one in experiments.values() for run in one.runs())
        folders.update(path.relative_to(tmp_path).parts[0] for path in outputs.values())
        return {part: [result(run.record(), 0.5) for run in one.runs()] for part, one in experiments.items()}

    for module in (trained, rate_search):
        monkeypatch.setattr(module, "run_recall_parts", made)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    claim = find_claim("own-1")
    for device, count in (("cpu", 84), ("cuda", 84)):
        runs.clear()
        trained.train_size(
            claim, squares.make_parts(device), Conditions(seeds=(0, 1, 2), device=device, folder=tmp_path, workers=1)
        )
        assert len(runs) == count and {run.device for run in runs} == {device}
    assert folders == {"own-1", "own-1-cuda"}


@pytest.mark.slow
@pytest.mark.parametrize("train", [trained.train_parts, trained.train_best_rates])
def test_models_of_trainings_are_found(train, tmp_path):
    settings = {"width": 16, "heads": 2, "layers": 1, "steps": 2, "batch_size": 2, "learning_rates": (1e-3, 1e-2),
                "vocab_size": 32, "pairs": (4,), "mixers": ("deltanet",), "save_models": True, "evaluations": 1}  # fmt: skip
    conditions = Conditions(seeds=(0, 1), folder=tmp_path, workers=1)
    for found in train("own-9", {"": settings}, conditions)[""]:
        model = trained.trained_model("own-9", "", settings, found, conditions)
        assert sum(p.numel() for p in model.parameters()) == found.parameters


def pretend_training(monkeypatch, loss=lambda run: 2.0, norms=lambda run: [1.0] * 1000):
    """Trainings that end with these losses and gradient norms. Returns the list of runs that were asked for."""
    runs = []

    def made(wanted, workers, device):
        for run in wanted:
            run.models()
        runs.extend(wanted)
        return {run.output for run in wanted if loss(run) is None}

    def result(run):
        lengths = [{"length": length, "loss": loss(run)} for length in run.context_lengths]
        return type("Result", (), {"held_out_loss": loss(run), "perplexities": lengths})()

    monkeypatch.setattr(together, "train_together", made)
    monkeypatch.setattr(trained, "passes_over_text", lambda run: 0.9)
    monkeypatch.setattr(trained, "language_result", result)
    monkeypatch.setattr(trained, "still_learning", lambda result: result.held_out_loss > 2.5)
    monkeypatch.setattr(trained, "gradient_norms", norms)
    return runs


@pytest.mark.parametrize("name", LANGUAGE)
def test_settings_are_language_models_and_rules_find_their_numbers(name, monkeypatch, tmp_path):
    runs = pretend_training(monkeypatch)
    claim = find_claim(name)
    verdict = claim.decide(claim.measure(Conditions(seeds=(1, 2, 3), folder=tmp_path)))
    # All losses are equal: without a deviation the objectives of C34 are equal and none gains, and no part of C35 is so.
    assert verdict.status == {"C34": "holds weakly", "C35": "does not hold"}.get(name, "not resolved")
    assert len({run.output for run in runs}) == len(runs) and {run.seed for run in runs} == {1, 2, 3}


def test_spikes_and_lost_trainings_are_numbers(monkeypatch, tmp_path):
    def norms(run):
        return [1.0] * 998 + [9.0 if "constant" in run.output else 3.0] * 2

    def loss(run):
        return 2.0 + 0.03 * ("gating" in run.output)

    pretend_training(monkeypatch, loss, norms)
    claim, conditions = find_claim("C35"), Conditions(seeds=(1,), folder=tmp_path)
    found = claim.measure(Conditions(seeds=(1, 2), folder=tmp_path))
    assert found.values("gradient_spike", gka.CONSTANT_RIDGE, share=0.999) == [9.0, 9.0]
    assert claim.decide(claim.measure(conditions)).status == "not resolved"  # one seed
    assert claim.decide(found).status == "holds" and "3.00" in claim.decide(found).reason
    assert not found.select(UNDERTRAINED)
    pretend_training(monkeypatch, lambda run: 2.0 + ("gating" in run.output))
    (mark,) = claim.measure(conditions).select(UNDERTRAINED)
    assert mark.is_of(gka.UNGATED)
    pretend_training(monkeypatch, lambda run: None if "unstable" in run.output else 2.0)
    found = find_claim("C32").measure(conditions)
    assert math.isnan(found.mean("loss", "pgdn", options={"squash": "none"}))
    assert "did not stay finite: unstable" in find_claim("C32").decide(found).reason


def test_windows_while_learning(tmp_path, monkeypatch):
    """The ratio that the paper has and a window that rises before the loss falls."""

    def made(experiments, outputs, workers):
        return {part: [learning(run.record(), part) for run in one.runs()] for part, one in experiments.items()}

    def learning(run, part):
        windows = [10.0, 100.0, 400.0, 900.0] if part == "paper" else [900.0, 400.0, 100.0, 10.0]
        watched = {
            "step": [50.0, 100.0, 150.0, 200.0],
            "window": windows,
            "metaplasticity ratio": [0.5, 1.0, 1.5, 40.0],
        }
        return dataclasses.replace(result(run, 0.5), loss_steps=[45, 160, 205], losses=[8.3, 8.2, 2.0], watched=watched)

    monkeypatch.setattr(trained, "run_recall_parts", made)
    claim = find_claim("C31")
    found = claim.measure(Conditions(seeds=(1,), folder=tmp_path))
    assert found.values("rank_correlation", ramp="paper") == [pytest.approx(1)]
    assert found.values("rank_correlation", ramp="release") == [pytest.approx(-1)]
    assert found.values("fall_step", ramp="paper") == [205]
    assert found.values("fall_window", ramp="paper") == [900 / 128]
    assert claim.decide(found).status == "holds"


def test_text_that_would_be_read_twice_is_refused(tmp_path, monkeypatch):
    passes = trained.passes_over_text
    runs = pretend_training(monkeypatch)
    monkeypatch.setattr(trained, "passes_over_text", passes)
    small = small_run(tmp_path)
    settings = {field.name: getattr(small, field.name) for field in dataclasses.fields(small) if field.name != "mixers"}
    once = int(1 / passes(dataclasses.replace(small, max_steps=1)))
    for steps in (once, 2 * once):
        measure = trained.language_models("C0", [MixerChoice("gdn", {}, "one")], **{**settings, "max_steps": steps})
        with pytest.raises(Unmeasured, match=r"reads its text [12]\.\d times") if steps > once else nullcontext():
            measure(Conditions(seeds=(0,), folder=tmp_path))
    assert [run.max_steps for run in runs] == [once] and runs[0].model["mixer"]["long_memory"] == "own"  # as published
    assert vars(runs[0].corpus).keys() == {field.name for field in dataclasses.fields(small.corpus)}  # no list of files


@pytest.mark.slow
def test_language_models_train_together_and_continue(tmp_path, monkeypatch):
    """Two processes at once. A stop in the middle leaves checkpoints, and the same call ends with the losses of a whole run."""
    write_texts(tmp_path / "texts")
    small = small_run(tmp_path, max_steps=30, context_lengths=(16,), checkpoint_every=1000, evaluate_every=0)
    settings = {field.name: getattr(small, field.name) for field in dataclasses.fields(small) if field.name != "mixers"}
    monkeypatch.setattr(trained, "passes_over_text", lambda run: 1.0)
    choices = [MixerChoice("gdn", {}, "one"), MixerChoice("linear", {}, "two")]
    measure = trained.language_models("C0", choices, **settings)
    conditions = [Conditions(seeds=(0,), folder=tmp_path / name, workers=2) for name in ("stopped", "whole")]
    waited = pool.wait

    def stop_in_the_middle(sentinels):
        assert len(sentinels) == 2  # both train
        while not any((tmp_path / f"stopped/C0/{name}-seed0/log.jsonl").exists() for name in ("one", "two")):
            time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "wait", stop_in_the_middle)
    with pytest.raises(KeyboardInterrupt):
        measure(conditions[0])
    monkeypatch.setattr(pool, "wait", waited)
    saved = [list((tmp_path / f"stopped/C0/{name}-seed0/checkpoints").glob("checkpoint-*")) for name in ("one", "two")]
    assert any(saved) and not all(
        (tmp_path / f"stopped/C0/{name}-seed0/result.json").exists() for name in ("one", "two")
    )
    found = [measure(each) for each in conditions]
    assert found[0] == found[1] and 0 < found[0].mean("loss", "gdn") != found[0].mean("loss", "linear")
    assert found[0].mean("gradient_spike", "gdn", share=0.999) > 1 and found[0].mean(
        "context_loss", "linear", context=16
    )
    monkeypatch.setattr("fastweights.training.engine.run_tasks", None)  # nothing is trained again
    assert measure(conditions[0]) == found[0]


@pytest.mark.slow
def test_a_tiny_training_gives_accuracies_by_seed(tmp_path):
    settings = {"pairs": (2,), "steps": 3, "batch_size": 2, "width": 8, "heads": 1, "layers": 1, "vocab_size": 8,
                "test_examples": 8, "learning_rates": (1e-2, 1e-3), "mixers": ("linear",)}  # fmt: skip
    measure = trained.recall_experiment("C0", {"": trained.Part(settings, {"steps": 3})})
    conditions = Conditions(seeds=(0, 1), folder=tmp_path, workers=1)
    found = measure(conditions)
    accuracies = found.select("accuracy", "linear", pairs=2, steps=3)
    assert [one.seed for one in accuracies] == [0, 1] and len(found.select(UNDERTRAINED, "linear", pairs=2)) == 1
    assert all(0 <= one.value <= 1 and one.run["learning_rate"] in settings["learning_rates"] for one in accuracies)
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
