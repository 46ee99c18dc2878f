"""A signal ends a training after its step, with a checkpoint, and the loss curve does not show where."""

import io
import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastweights.stopping import Stopped, StopSignals
from fastweights.training.language import callbacks, train_language, trainer

from .small import SHARD, log

pytestmark = pytest.mark.usefixtures("signals_arrive")


@pytest.fixture
def signal_in_step(monkeypatch):
    """Sends this process a signal in the middle of a step: between its forward passes and its optimizer."""
    step_of = trainer.LanguageTrainer.training_step

    def arrange(step, number=signal.SIGTERM):
        def training_step(self, *args, **kwargs):
            if self.state.global_step == step - 1:
                os.kill(os.getpid(), number)
            return step_of(self, *args, **kwargs)

        monkeypatch.setattr(trainer.LanguageTrainer, "training_step", training_step)

    return arrange


def trained(run, console=None):
    with StopSignals() as signals:
        return train_language(run, console=console, signals=signals)


def test_signals_at_any_step_cost_none_and_leave_no_trace(make_run, signal_in_step):
    settings = {"max_steps": 14, "log_every": 5, "checkpoint_every": 7, "evaluate_every": 7, "accumulation": 2}
    whole, cut = make_run("whole", **settings), make_run("cut", **settings)
    expected = train_language(whole)[0]
    for step, number in ((1, signal.SIGTERM), (3, signal.SIGHUP), (4, signal.SIGUSR1), (5, signal.SIGTERM)):
        console = Console(file=io.StringIO(), width=200)
        signal_in_step(step, number)
        with pytest.raises(Stopped, match=f"stopped by {number.name}"):
            trained(cut, console)
        assert f"{number.name}: stopped after step {step}, which is saved" in console.file.getvalue()
        assert Path(cut.output, f"checkpoints/checkpoint-{step}").exists()
    signal_in_step(14)  # the last one: all is trained, and nothing measured yet
    with pytest.raises(Stopped):
        trained(cut)
    assert not Path(cut.output, "result.json").exists()
    signal_in_step(None)
    result = trained(cut)[0]
    assert [point["step"] for point in log(cut) if "loss" in point] == [5, 7, 10, 14]
    assert log(cut) == log(whole)
    assert result.losses == expected.losses and result.perplexities == expected.perplexities
    for name in ("model.safetensors", SHARD):
        files = (Path(run.output, "checkpoints/checkpoint-14", name).read_bytes() for run in (cut, whole))
        assert len(set(files)) == 1


def test_of_several_models_the_next_is_not_begun(make_run, signal_in_step):
    run = make_run(mixers=("linear", "gdn"), model={"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2})
    signal_in_step(2)
    with pytest.raises(Stopped):
        trained(run)
    assert Path(run.output, "linear/checkpoints/checkpoint-2").exists() and not Path(run.output, "gdn").exists()


def test_a_signal_before_the_first_step_stops_at_once(make_run, monkeypatch):
    monkeypatch.setattr(callbacks.RunLog, "__init__", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGTERM))
    run = make_run()
    with pytest.raises(Stopped):
        trained(run)
    assert not Path(run.output, "checkpoints").exists()


def test_without_signals_the_callers_handlers_are_called(make_run, signal_in_step):
    seen = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        signal_in_step(2, signal.SIGUSR1)
        train_language(make_run(max_steps=3))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_a_stop_saves_no_model_whose_loss_is_not_finite(make_run, signal_in_step, monkeypatch):
    compute_loss = trainer.LanguageTrainer.compute_loss
    monkeypatch.setattr(
        trainer.LanguageTrainer, "compute_loss", lambda *args, **kw: compute_loss(*args, **kw) * torch.nan
    )
    signal_in_step(2)
    run = make_run(log_every=100, checkpoint_every=100, evaluate_every=0)
    with pytest.raises(callbacks.NonFiniteLoss, match="the loss is nan at step 2"):
        trained(run)
    assert not list(Path(run.output).glob("checkpoints/checkpoint-*"))
