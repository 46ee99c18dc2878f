"""One run: it learns, records what it should, stops on a loss that is not finite, and can be cut anywhere."""

import pytest
import torch
import torch.nn.functional as F

from fastweights.evaluation import recall_accuracy, regression_errors
from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsForCausalLM, VectorModel
from fastweights.training import CheckpointError, learning_rate_factor, train_run
from fastweights.training.optimization import weight_decay_groups
from tests.fast_set import slow

from .small import numbers, small_run


def test_learns_two_pairs(tmp_path):
    run = small_run(mixer="linear", width=16, steps=300, batch_size=16, test_examples=64, learning_rate=0.02)
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.accuracy > 0.9
    assert result.losses[-1] < 0.3 < result.losses[0]
    assert result.accuracy_steps == [150, 300]
    assert result.accuracies[-1] == result.accuracy
    assert result.status == "finished" and result.stopped_at == 300


def test_a_run_takes_the_steps_that_are_written_out_here(tmp_path):
    run = small_run(
        steps=6, learning_rate=0.05, warmup_fraction=0.5, warmup_start=0.1, weight_decay=0.3, max_gradient_norm=3.0,
        initializer_range=0.1,
    )  # fmt: skip
    result = train_run(run, tmp_path / "run.checkpoint")
    torch.manual_seed(0)
    model, task = FastWeightsForCausalLM(run.model_config()).train(), run.make_task()
    assert model.model.embed_tokens.weight.std().item() == pytest.approx(0.1, rel=0.2)
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.3))
    losses, norms = [], []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * learning_rate_factor(step, steps=6, warmup_steps=3, final=0.1, start=0.1)
        batch = task.batch("train", seed=0, index=step, batch_size=4)
        loss = F.cross_entropy(model(batch.input_ids).logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0).item())
        optimizer.step()
        losses.append(loss.item())
    assert min(norms) < 3 < max(norms)  # clipping by one factor in all steps would change nothing: Adam divides by it
    assert result.losses == pytest.approx(losses, rel=1e-4)
    assert result.accuracies[-1] == recall_accuracy(model, task, seed=0, examples=8)


def test_a_run_of_30_steps_is_undertrained(tmp_path):
    """The fault that was: its curve is too noisy for a fall to show, and it passed for a run that has converged."""
    for seed in range(3):
        result = train_run(small_run(steps=30, batch_size=16, learning_rate=0.001, seed=seed), tmp_path / f"{seed}")
        assert result.undertrained and result.losses[-1] > 1
        assert result.queries == 8 * 2  # every pair of every test sequence is asked for once


@pytest.mark.slow
def test_records_the_whole_loss_curve_and_the_sizes(tmp_path):
    run = small_run(steps=250, mixer="linear")
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.loss_steps == [*range(3, 250, 3), 250]  # 100 points at most, the last step always
    assert len(result.losses) == len(result.loss_steps)
    model = FastWeightsForCausalLM(run.model_config())
    assert result.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert result.state_size == 2 * 4 * 4
    assert result.run == run.record()
    assert result.wall_seconds > 0 and result.cpu_seconds > 0


def test_softmax_state_is_that_of_the_whole_sequence(tmp_path):
    result = train_run(small_run(mixer="softmax", length=10, steps=1, evaluations=1), tmp_path / "run.checkpoint")
    assert result.state_size == 2 * 10 * 8


@pytest.mark.parametrize("cuts", [*slow([0], [1]), [5, 6], *slow(list(range(12)))], ids=str)
def test_numbers_do_not_depend_on_where_the_run_was_cut(tmp_path, cuts):
    run = small_run()
    whole = train_run(run, tmp_path / "whole.checkpoint")
    checkpoint = tmp_path / "cut.checkpoint"
    for cut in cuts:
        asked = iter(range(cut + 1))
        steps_before = cuts[cuts.index(cut) - 1] if cuts.index(cut) else 0
        torch.randn(7)  # the random state outside of the run must not matter
        stop_after = cut - steps_before
        asked = iter([False] * stop_after + [True])
        assert train_run(run, checkpoint, should_stop=lambda asked=asked: next(asked)) is None
    result = train_run(run, checkpoint)
    assert numbers(result) == numbers(whole)


@pytest.mark.slow
def test_a_cut_between_two_points_of_the_loss_curve_loses_no_loss(tmp_path):
    run = small_run(steps=201, evaluations=1, mixer="linear")  # a point is the mean of 3 steps
    whole = train_run(run, tmp_path / "whole.checkpoint")
    assert whole.loss_steps[32:34] == [99, 102]
    checkpoint = tmp_path / "cut.checkpoint"
    for steps in (1, 100):  # to step 1, and from there to step 101: 1 and 2 steps into a window
        asked = iter([False] * steps + [True])
        assert train_run(run, checkpoint, should_stop=lambda asked=asked: next(asked)) is None
    assert numbers(train_run(run, checkpoint)) == numbers(whole)


def test_continues_from_a_checkpoint_of_every_step(tmp_path):
    class Killed(BaseException):
        pass

    def killed_at(step):
        def on_step(taken, loss):
            if taken == step:
                raise Killed

        return on_step

    run, checkpoint = small_run(), tmp_path / "run.checkpoint"
    whole = train_run(run, tmp_path / "whole.checkpoint")
    for step in (3, 7, 12):
        with pytest.raises(Killed):
            train_run(run, checkpoint, checkpoint_seconds=0, on_step=killed_at(step))
    assert numbers(train_run(run, checkpoint)) == numbers(whole)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [pytest.param(None, id="whole", marks=pytest.mark.slow), pytest.param(7, id="cut")])
def test_regression_learns_and_is_measured_by_its_error(tmp_path, cut):
    run = small_run(
        task="regression",
        task_options={"inputs": 2, "noise": 0.1},
        mixer="gdn",
        pairs=8,
        width=16,
        steps=120,
        batch_size=16,
        learning_rate=0.02,
        test_examples=64,
    )
    if cut is not None:
        asked = iter([False] * cut + [True])
        assert train_run(run, tmp_path / "run.checkpoint", should_stop=lambda: next(asked)) is None
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.measure == "error" and result.accuracy is None and result.accuracies == []
    assert result.accuracy_steps == [60, 120] and result.errors[-1] == result.error == result.value
    assert result.chance == pytest.approx(1.01) and result.best_error < result.error < 0.9
    columns = result.by_token
    assert list(columns) == ["example", "error", "ridge"] and columns["example"] == list(range(1, 9))
    assert sum(columns["error"]) / 8 == pytest.approx(result.error)
    assert sum(columns["ridge"]) / 8 == pytest.approx(result.best_error)
    assert columns["error"][-1] < 0.7 < columns["error"][0]
    assert result.state_size == 2 * 8 * 8


def test_a_regression_run_takes_the_steps_that_are_written_out_here(tmp_path):
    run = small_run(task="regression", pairs=4, steps=3, evaluations=1, warmup_fraction=0, max_gradient_norm=100.0)
    result = train_run(run, tmp_path / "run.checkpoint")
    torch.manual_seed(0)
    model, task = VectorModel(run.model_config(), inputs=9, outputs=1).train(), run.make_task()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.1))
    losses = []
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * learning_rate_factor(step, steps=3, warmup_steps=0, final=0.1)
        batch = task.batch("train", seed=0, index=step, batch_size=4)
        loss = (model(batch.inputs)[:, [0, 2, 4, 6]] - batch.targets).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert result.losses == pytest.approx(losses, rel=1e-4)
    errors = regression_errors(model, task, seed=0, examples=8)
    assert result.by_token["error"] == pytest.approx(errors.model, rel=1e-4)


def parity(tmp_path, **options):
    """Accuracy by token, up to twice the length of training."""
    run = small_run(
        task="parity",
        task_options={"test_length": 24},
        mixer=MixerChoice(name="gdn", options=options),
        pairs=12,
        vocab_size=2,
        width=16,
        steps=150,
        batch_size=32,
        test_examples=64,
        evaluations=1,
        initializer_range=0.02,
    )
    return train_run(run, tmp_path / "run.checkpoint").by_token["accuracy"]


@pytest.mark.slow
def test_parity_is_learnt_with_negative_eigenvalues(tmp_path):
    assert min(parity(tmp_path, negative_eigenvalues=True)) > 0.9


@pytest.mark.slow
def test_parity_is_not_learnt_without_them(tmp_path):
    accuracies = parity(tmp_path)
    assert accuracies[0] > 0.9 and max(accuracies[12:]) < 0.75


def test_accuracy_of_state_tracking_by_token(tmp_path):
    run = small_run(task="parity", task_options={"test_length": 30}, pairs=10, steps=2, evaluations=1, test_examples=50)
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.by_token["token"] == list(range(1, 31)) and len(result.by_token["accuracy"]) == 30
    assert sum(result.by_token["accuracy"]) / 30 == pytest.approx(result.accuracy)
    assert result.chance == pytest.approx((1 + 29 / 2) / 30)  # of the test
    assert train_run(small_run(steps=2, evaluations=1), tmp_path / "recall.checkpoint").by_token == {}


def test_a_seed_changes_the_numbers(tmp_path):
    results = [train_run(small_run(seed=seed), tmp_path / f"{seed}.checkpoint") for seed in (0, 1)]
    assert results[0].losses != results[1].losses


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path, monkeypatch):
    run = small_run(steps=200)
    steps = []

    def spoiled(logits, labels):
        steps.append(len(steps))
        return torch.nn.functional.nll_loss(logits.log_softmax(-1), labels) * (float("nan") if len(steps) == 50 else 1)

    monkeypatch.setattr("fastweights.training.recall.objectives.F.cross_entropy", spoiled)
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.status == "diverged" and result.diverged
    assert result.stopped_at == 50
    assert result.accuracy is None and not result.undertrained
    assert result.loss_steps[-1] == 48 and all(loss == loss for loss in result.losses)


def test_a_damaged_checkpoint_is_refused(tmp_path):
    checkpoint = tmp_path / "run.checkpoint"
    checkpoint.write_bytes(b"not a checkpoint")
    with pytest.raises(CheckpointError):
        train_run(small_run(), checkpoint)
    assert checkpoint.read_bytes() == b"not a checkpoint"
