"""Curricula and fixed training sets: which batch is read in which step, and what is measured when."""

from __future__ import annotations

import io
import itertools

import pytest
import torch
from rich.console import Console

from fastweights.analysis import stage_table
from fastweights.evaluation import recall_accuracy
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import RecallRun, Stage, learning_rate_factor, train_run, weight_decay_groups
from fastweights.training.recall.batches import training_batches
from tests.training.small import numbers, small_run

STAGES = (Stage(pairs=2, steps=5), Stage(pairs=3, steps=7, length=12))
CURRICULUM = {"curriculum": STAGES, "pairs": 3, "length": 12}


def same(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_stages_follow_each_other():
    run = small_run(**CURRICULUM)
    batches = list(training_batches(run, 0))
    (_, first), (_, second) = run.stages()
    assert (first.pairs, second.pairs, second.length, run.steps) == (2, 3, 12, 12)
    for step, batch in enumerate(batches):
        task = first if step < 5 else second
        assert same(batch, task.batch("train", seed=0, index=step, batch_size=4))
    assert len(batches) == 12 and run.tokens == 4 * (5 * first.length + 7 * 12)


@pytest.mark.parametrize("start", [0, 3, 5, 9, 12])
@pytest.mark.parametrize("fixed", [None, 10])
def test_batches_do_not_depend_on_where_a_run_continues(start, fixed):
    run = small_run(train_examples=fixed, **CURRICULUM)
    whole, rest = list(training_batches(run, 0)), list(training_batches(run, start))
    assert len(rest) == 12 - start and all(same(a, b) for a, b in zip(whole[start:], rest))


def test_a_fixed_training_set_is_read_in_rounds():
    run = small_run(train_examples=9, steps=8)
    examples = {tuple(row.tolist()) for row in run.make_task().batch("train", seed=0, index=0, batch_size=9).input_ids}
    batches = [[tuple(row.tolist()) for row in batch.input_ids] for batch in training_batches(run, 0)]
    rounds = [first + second for first, second in zip(batches[::2], batches[1::2])]
    assert all(len(set(rows)) == 8 and set(rows) <= examples for rows in rounds)  # the ninth waits for another round
    assert len({tuple(rows) for rows in rounds}) == len(rounds) == 4  # in a new order each time
    assert set(itertools.chain(*rounds)) == examples


def test_a_stage_may_have_a_batch_size_of_its_own():
    run = small_run(curriculum=(Stage(pairs=2, steps=2, batch_size=3), Stage(pairs=2, steps=1)), steps=3)
    assert [len(batch.input_ids) for batch in training_batches(run, 0)] == [3, 3, 4]
    assert run.tokens == (2 * 3 + 4) * run.make_task().length
    with pytest.raises(ValueError, match="train_examples must be at least batch_size, 9"):
        small_run(curriculum=(Stage(pairs=2, steps=12, batch_size=9),), train_examples=8)


def test_two_stages_of_a_fixed_set_read_different_examples():
    run = small_run(train_examples=4, curriculum=(Stage(pairs=2, steps=1), Stage(pairs=2, steps=1)), steps=2)
    first, second = training_batches(run, 0)
    assert not same(first, second)


def test_each_stage_is_measured_at_its_end_on_its_own_task(tmp_path):
    run = small_run(evaluations=1, **CURRICULUM)
    result = train_run(run, tmp_path / "run.checkpoint")
    assert result.accuracy_steps == [5, 12] and result.stage_values == result.accuracies
    # the first stage alone, with the same schedule of learning rates, ends at the same model
    alone = _trained(run, 5)
    assert result.accuracies[0] == recall_accuracy(alone, run.stages()[0][1], seed=0, examples=8)
    assert result.accuracies[1] == recall_accuracy(_trained(run, 12), run.make_task(), seed=0, examples=8)
    console = Console(file=io.StringIO(), width=120)
    console.print(stage_table([result]))
    table = console.file.getvalue()
    assert "3 pairs, 12 tokens" in table and f"{result.accuracies[0]:.3f}" in table


def test_a_curriculum_can_be_cut_anywhere(tmp_path):
    run = small_run(train_examples=7, **CURRICULUM)
    whole = train_run(run, tmp_path / "whole.checkpoint")
    result = None
    for _ in range(100):  # one step at a time
        looks = iter([False, True])
        result = train_run(run, tmp_path / "cut.checkpoint", should_stop=lambda: next(looks))  # noqa: B023
        if result is not None:
            break
    assert result is not None and numbers(result) == numbers(whole)


def test_optimizer_schedule_and_model_are_those_of_the_run(tmp_path):
    run = small_run(
        steps=6, beta1=0.5, beta2=0.6, schedule="constant", intermediate_size=0, tie_word_embeddings=True,
        scale_residuals=False, layers=2, softmax_layers=(1,),
    )  # fmt: skip
    config = run.model_config()
    assert config.mixers() == [("gdn", {"long_memory": "own"}), ("softmax", {})] and config.intermediate_size == 0
    assert config.tie_word_embeddings and not config.scale_residuals
    result = train_run(run, tmp_path / "run.checkpoint")
    model = _trained(run, 6)
    assert result.accuracies[-1] == recall_accuracy(model, run.make_task(), seed=0, examples=8)
    others = [
        train_run(small_run(**{**_changes(run), **change}), tmp_path / f"{n}.checkpoint").losses
        for n, change in enumerate([{"beta1": 0.9}, {"beta2": 0.999}, {"schedule": "cosine"}])
    ]
    assert all(losses != result.losses for losses in others)


def _changes(run: RecallRun):
    names = (
        "steps",
        "beta1",
        "beta2",
        "schedule",
        "intermediate_size",
        "tie_word_embeddings",
        "scale_residuals",
        "layers",
    )
    return {name: getattr(run, name) for name in (*names, "softmax_layers")}


def _trained(run: RecallRun, steps: int) -> FastWeightsForCausalLM:
    """The model after some steps, by a loop of its own."""
    torch.manual_seed(run.seed)
    model = FastWeightsForCausalLM(run.model_config()).train()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, run.weight_decay), betas=(run.beta1, run.beta2))
    for step, batch in zip(range(steps), training_batches(run, 0)):
        factor = learning_rate_factor(
            step, steps=run.steps, warmup_steps=round(0.1 * run.steps), final=0.1, schedule=run.schedule
        )
        for group in optimizer.param_groups:
            group["lr"] = run.learning_rate * factor
        logits = model(batch.input_ids).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_gradient_norm)
        optimizer.step()
    return model


def test_a_constant_schedule_stays_at_the_peak():
    factors = [learning_rate_factor(s, steps=8, warmup_steps=2, final=0.1, schedule="constant") for s in range(8)]
    assert factors == [pytest.approx(1 / 3), pytest.approx(2 / 3), 1, 1, 1, 1, 1, 1]
