"""Trainings whose rows are divided over processes have the losses of one process."""

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.results.language import load_result
from fastweights.training.language import LanguageRun, load_run, train_language

from .launching import fork, torchrun
from .small import assert_same_losses, log

HYBRID = {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "mixer": "gdn", "softmax_layers": [1]}
# Of rows with several documents, 4 x 31 tokens, which neither 8 nor 16 divides.
RUN = {"length": 31, "batch_size": 4, "max_steps": 5, "evaluate_every": 3, "checkpoint_every": 4, "model": HYBRID}


def train_together(run: LanguageRun, size: int, folder: Path, stop_at=None) -> None:
    """In so many processes."""
    for process in fork(lambda rank: train_language(run, stop_at=stop_at), folder, size):
        assert process.code(120) == 0, process.errors.read_text()


def result_of(run: LanguageRun, stage=""):
    return load_result(Path(run.output, stage, "result.json"))


def assert_same(result, expected):
    assert_same_losses(result, expected)
    assert (result.loss_tokens, result.tokens) == (expected.loss_tokens, expected.tokens)
    for found, wanted in zip(result.perplexities, expected.perplexities, strict=True):
        assert found == pytest.approx(wanted, rel=1e-4)


def test_two_processes_divide_every_row(make_run, tmp_path):
    """Stopped and continued by one process, which reads whole rows."""
    run = make_run(**RUN, context_parallel=2)
    (alone,) = train_language(make_run("alone", **RUN))
    train_together(run, 2, tmp_path, stop_at=2)
    train_together(run, 2, tmp_path)
    result = result_of(run)
    assert_same(result, alone)
    norms, wanted = ([point.get("gradient_norm") for point in log(one)] for one in (run, make_run("alone")))
    assert [norm for norm in norms if norm] == pytest.approx([norm for norm in wanted if norm], rel=1e-4)
    saved, whole = (AutoModelForCausalLM.from_pretrained(one.folder) for one in (result, alone))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gdn", "gka", "mesa", "rwkv7", "softmax"])
def test_four_processes_in_two_groups_continue_as_two_and_as_one(make_run, tmp_path, mixer):
    model = {**HYBRID, "mixer": mixer, "num_heads": 4, "softmax_layers": []}
    settings = {**RUN, "model": model, "checkpoint_every": 1}
    (alone,) = train_language(make_run("alone", **settings))
    run = make_run(**{**settings, "batch_size": 2}, context_parallel=2)
    train_together(run, 4, tmp_path, stop_at=2)
    train_together(dataclasses.replace(run, batch_size=4), 2, tmp_path, stop_at=3)
    train_together(dataclasses.replace(run, context_parallel=1), 2, tmp_path, stop_at=4)
    (result,) = train_language(dataclasses.replace(run, batch_size=4, context_parallel=1))
    assert_same(result, alone)
    again = dataclasses.replace(run, context_lengths=(20,))  # which measures the finished model again
    train_together(again, 4, tmp_path)
    (wanted,) = train_language(dataclasses.replace(make_run("alone", **settings), context_lengths=(20,)))
    assert_same(result_of(run), wanted)


@pytest.mark.slow
def test_stages_and_streams_with_other_groups(make_run, tmp_path):
    """The second stage divides rows of twice the length, over more processes than the first."""
    stages = ({"max_steps": 2, "batch_size": 2}, {"max_steps": 3, "length": 62, "context_parallel": 4})
    settings = {
        **RUN,
        "model": {**HYBRID, "num_heads": 4},
        "max_steps": 2,
        "corpus": dataclasses.replace(make_run().corpus, streaming=True, parts=2),
    }
    wanted = train_language(
        make_run("alone", **settings, stages=({**stages[0], "batch_size": 4}, {**stages[1], "context_parallel": 1}))
    )
    run = make_run(**settings, context_parallel=2, stages=stages)
    train_together(run, 4, tmp_path)
    for stage, other in zip(("stage1", "stage2"), wanted, strict=True):
        assert_same(result_of(run, stage), other)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "settings"),
    [
        (4, ""),
        (4, "fsdp = true"),
        (4, 'fsdp = true\nprecision = "bf16"'),
        (2, 'compile = "blocks"\ngradient_checkpointing = true'),
        (2, 'fsdp = true\ncompile = "blocks"\ngradient_checkpointing = true'),
    ],
)
def test_launched_processes_in_groups_of_two(run_file, tmp_path, count, settings):
    """By DDP and FSDP2: up to step 4, from the checkpoint on, and by DDP one process to the end."""
    groups = count // 2
    text = run_file.read_text().replace("length = 32", "length = 31").replace("accumulation = 2", "accumulation = 3")
    run_file.write_text(text)
    own = {"precision": "bf16"} if "bf16" in settings else {}
    (alone,) = train_language(load_run(run_file, output=str(tmp_path / "alone"), batch_size=groups, **own))
    run_file.write_text(f"context_parallel = 2\n{settings}\n{text}")
    run = load_run(run_file)
    if "fsdp" in settings:
        torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4, processes=count)
        result = load_result(Path(run.output, "result.json"))
    else:
        errors = torchrun("-m", "fastweights", "train", run_file, "--stop-at", 4, processes=count)
        step = f"gdn: {count} processes in {groups} context group{'s' * (groups > 1)} x 1 row x 3 passes x 31 tokens"
        assert errors.count(step) == 1
        (result,) = train_language(dataclasses.replace(run, batch_size=groups, context_parallel=1))
    tolerance = 1e-2 if own else 1e-5
    torch.testing.assert_close(result.losses, alone.losses, rtol=tolerance, atol=0)
    torch.testing.assert_close(result.held_out_losses, alone.held_out_losses, rtol=tolerance, atol=0)
