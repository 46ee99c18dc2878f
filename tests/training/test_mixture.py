"""Mixtures of pairs, validation sequences, ends before the last step, and first weights by name."""

import statistics
from dataclasses import replace

import pytest
import torch

from fastweights.evaluation import recall_accuracy
from fastweights.models import FastWeightsForCausalLM
from fastweights.results.experiment import best_results
from fastweights.training import RecallExperiment, Stage, load_recall_file, train_run
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.train import Training
from tests.training.small import numbers, small_run

MIXTURE = {
    "mixture": (Stage(pairs=2, steps=1, batch_size=6), Stage(pairs=3, steps=2)), "pairs": 3, "validation_examples": 16,
}  # fmt: skip


def trained(tmp_path, name="run", **changes):
    return train_run(small_run(**{**MIXTURE, **changes}), tmp_path / f"{name}.checkpoint", model_folder=tmp_path / name)


def test_stages_of_a_mixture_are_read_in_turn_wherever_a_run_continues():
    run = small_run(**MIXTURE, steps=8)
    (_, first), (_, second) = run.stages()
    batches = list(training_batches(run, 0))
    for step, batch in enumerate(batches):
        task, size = (first, 6) if step % 3 == 0 else (second, 4)
        wanted = task.batch("train", seed=0, index=step, batch_size=size)
        assert torch.equal(batch.input_ids, wanted.input_ids)
    assert len(batches) == 8 and run.tokens == (6 * first.length + 8 * second.length) * 8 // 3
    assert all(torch.equal(a.labels, b.labels) for a, b in zip(batches[4:], training_batches(run, 4), strict=True))


def test_a_run_is_validated_on_other_sequences_than_it_is_tested_on(tmp_path):
    result = trained(tmp_path, save_models=True, learning_rate=0.03)
    model = FastWeightsForCausalLM.from_pretrained(tmp_path / "run")
    tasks = [task for _, task in small_run(**MIXTURE).stages()]
    tested = [recall_accuracy(model, task, seed=0, examples=8) for task in tasks]
    validated = [recall_accuracy(model, task, seed=2**40, examples=16) for task in tasks]
    assert result.tested == {"2": tested[0], "3": tested[1]} and result.accuracy == statistics.fmean(tested)
    assert result.validated["step"] == [6.0, 12.0] == [float(step) for step in result.accuracy_steps]
    assert [result.validated[name][-1] for name in "23"] == validated and tested != validated
    assert result.chosen_by == result.accuracies[-1] == statistics.fmean(validated)


def test_an_interrupted_mixture_gives_the_same_numbers(tmp_path):
    whole = trained(tmp_path, "whole", seed_by_name=True)
    run, calls = small_run(**MIXTURE, seed_by_name=True), iter(range(100))
    stopped = train_run(run, tmp_path / "part", should_stop=lambda: next(calls) == 7)
    assert stopped is None and numbers(train_run(run, tmp_path / "part")) == numbers(whole)


def test_a_run_ends_where_every_stage_is_good_enough(tmp_path):
    early = trained(tmp_path, stop_at=0.0, evaluations=4)
    assert early.stopped_at == 3 and early.status == "finished" and not early.undertrained and early.tested
    assert early.chosen_by == 0.0 and early.steps_to(0.0) == early.steps_to(0.0, pairs=2) == 3
    late = trained(tmp_path, "late", stop_at=1.0)
    assert late.stopped_at == 12 and late.steps_to(2.0) is None
    error = train_run(
        small_run(task="regression", pairs=3, task_options={"inputs": 2}, validation_examples=8, stop_at=100.0),
        tmp_path / "error",
    )
    assert error.stopped_at == 6 and error.chosen_by == 100.0 and error.error == error.tested["3"] != error.errors[-1]


def test_the_rate_is_chosen_by_validation_and_then_by_the_steps_to_the_end(tmp_path):
    first = trained(tmp_path, learning_rate=0.03, stop_at=0.99)
    better = replace(first, run={**first.run, "learning_rate": 0.01}, accuracies=[0.5, 0.9], accuracy=0.0)
    worse = replace(first, accuracies=[0.5, 0.8], accuracy=1.0)
    assert best_results([worse, better]) == [better]
    sooner = replace(worse, accuracies=[0.5, 0.991], stopped_at=6)
    later = replace(better, accuracies=[0.5, 0.999], losses=[0.0])
    assert best_results([later, sooner]) == [sooner]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_examples": None}, "validation_examples must be given with mixture"),
        (
            {"mixture": (), "validation_examples": None, "stop_at": 0.9},
            "validation_examples must be given with stop_at",
        ),
        ({"pairs": 4}, "pairs must be that of the mixture's last stage, 3, got 4"),
        ({"train_examples": 9}, "train_examples must be left out with a mixture"),
        (
            {"mixture": (Stage(pairs=3, steps=1), Stage(pairs=3, steps=2))},
            "mixture must have stages of different pairs",
        ),
    ],
)
def test_mixtures_that_cannot_be_trained_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        small_run(**{**MIXTURE, **changes})


def test_run_files_have_tables_of_a_mixture(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("validation_examples = 8\n[[mixture]]\npairs = 2\nsteps = 1\n[[mixture]]\npairs = 4\nsteps = 1\n")
    (experiment,) = load_recall_file(file).parts.values()
    assert experiment.pairs == (4,) and [stage.pairs for stage in experiment.mixture] == [2, 4]


def first_values(mixer, **changes):
    run = small_run(mixer=mixer, **changes)
    return Training(run).model.state_dict()


def test_models_of_one_seed_begin_alike_outside_the_memory():
    gdn, softmax, other = (
        first_values(name, seed_by_name=True) for name in ("gdn", "softmax", "gdn:long_memory=windows")
    )
    shared = [name for name in gdn if ".mixer." not in name]
    assert shared and all(torch.equal(gdn[name], softmax[name]) for name in shared)
    decays = [name for name in gdn if not torch.equal(gdn[name], other[name])]
    assert decays and all(".decay." in name for name in decays)
    seed = first_values("gdn", seed_by_name=True, seed=1)
    assert not torch.equal(seed["model.embed_tokens.weight"], gdn["model.embed_tokens.weight"])
    drawn = [first_values(name) for name in ("gdn", "softmax")]
    assert not all(torch.equal(drawn[0][name], drawn[1][name]) for name in shared)
    std = gdn[
        "model.layers.0.mlp.gate_proj.weight" if "model.layers.0.mlp.gate_proj.weight" in gdn else shared[0]
    ].std()
    assert 0.03 < std < 0.07  # initializer_range 0.05


def test_models_of_vectors_begin_alike_too():
    """Of regression, with the same scale as without."""
    task = {"task": "regression", "task_options": {"inputs": 8}, "pairs": (8,)}

    def values(mixer, **changes):
        (run,) = RecallExperiment(
            mixers=(mixer,), steps=1, seeds=(0,), learning_rates=(1e-3,), **task, **changes
        ).runs()
        return Training(run).model.state_dict()

    gdn, softmax, usual = values("gdn", seed_by_name=True), values("softmax", seed_by_name=True), values("gdn")
    shared = [name for name in gdn if ".mixer." not in name]
    assert {"read_in.weight", "read_out.bias"} < set(shared)
    assert all(torch.equal(gdn[name], softmax[name]) for name in shared)
    for name in ("read_in.weight", "read_out.weight", "model.layers.0.mixer.out.proj.weight"):
        if name in gdn:
            assert 0.7 < gdn[name].std() / usual[name].std() < 1.4 and not torch.equal(gdn[name], usual[name])


def test_first_weights_by_name_leave_the_random_state_alone():
    torch.manual_seed(5)
    Training(small_run())
    state = torch.get_rng_state()
    Training(small_run(seed_by_name=True))
    assert torch.equal(state, torch.get_rng_state())
