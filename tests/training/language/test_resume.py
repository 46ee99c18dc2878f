"""Killed at any step, a training continues with the same losses; and no failure to write costs a checkpoint."""

import dataclasses
import errno
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors import SafetensorError

from fastweights.data.text import TextTokenizer
from fastweights.files import CHECKSUMS, write_checksums
from fastweights.training.checkpoints import SaveError
from fastweights.training.language import (
    NonFiniteLoss,
    background,
    callbacks,
    sharded_checkpoints,
    train,
    train_language,
    trainer,
)

from .small import log, losses, moments, small_run, write_texts


class Killed(BaseException):
    """Not an error that anything may handle."""


def names(run):
    return sorted(path.name for path in Path(run.output, "checkpoints").iterdir())


@pytest.fixture
def killed_at(monkeypatch):
    """Makes the training die after the step given, once its checkpoint, if it has one, is written."""

    def arrange(step):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == step:
                raise Killed

        monkeypatch.setattr(callbacks.StopAt, "on_step_begin", on_step_begin)

    return arrange


@pytest.fixture(scope="module")
def whole_log(prepared, tmp_path_factory):
    """The log of small_run, never interrupted."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = small_run(prepared, output=str(tmp_path_factory.mktemp("whole") / "out"))
    train_language(run)
    torch.set_num_threads(threads)
    return log(run)


# Before the first checkpoint, at it, at a held-out loss, and between the last checkpoint and the end; or at every step.
@pytest.mark.parametrize(
    "steps", [(2, 3, 4, 7), pytest.param(range(1, 8), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_killed_at_any_step(make_run, killed_at, steps):
    whole = make_run("whole", log_every=2)
    expected = train_language(whole)[0]
    cut = make_run("cut", log_every=2)
    for step in steps:
        killed_at(step)
        with pytest.raises(Killed):
            train_language(cut)
    killed_at(None)
    result = train_language(cut)[0]
    assert log(cut) == log(whole)
    assert result.losses == expected.losses and result.held_out_losses == expected.held_out_losses
    assert result.perplexities == expected.perplexities
    found, wanted = moments(cut, 8), moments(whole, 8)
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.slow
def test_a_killed_process(make_run, tmp_path):
    """SIGKILL, from outside, in the middle of a step; the log may even end in half a line."""
    whole = make_run("whole", max_steps=40, checkpoint_every=6, evaluate_every=0)
    train_language(whole)
    cut = make_run("cut", max_steps=40, checkpoint_every=6, evaluate_every=0)
    script = (
        f"import torch; torch.set_num_threads(1)\nfrom pathlib import Path\nfrom {__package__}.small import small_run\n"
    )
    script += "from fastweights.training.language import train_language\n"
    script += f"run = small_run(Path({str(Path(cut.cache).parent)!r}), output={cut.output!r}, max_steps=40, "
    script += "checkpoint_every=6, evaluate_every=0)\ntrain_language(run)"
    process = subprocess.Popen([sys.executable, "-c", script])
    until = time.monotonic() + 60
    while not Path(cut.output, "checkpoints/checkpoint-6").exists() or len(losses(cut)) < 8:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    with Path(cut.output, "log.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')
    train_language(cut)
    assert log(cut) == log(whole) and len(losses(cut)) == 40


def test_stopped_on_purpose(make_run, whole_log):
    cut = make_run("cut")
    assert train_language(cut, stop_at=4) is None
    assert names(cut) == ["checkpoint-3", "checkpoint-4"] and len(losses(cut)) == 4
    train_language(cut)
    assert log(cut) == whole_log
    assert names(cut) == ["checkpoint-6", "checkpoint-8"]


def test_other_text_or_another_tokenizer_is_another_training(tmp_path):
    run = small_run(tmp_path)
    first = dataclasses.replace(run, tokenizer=TextTokenizer(path=str(tmp_path / "tokenizer")))
    for size in (300, 290):
        if size == 290:
            train_language(first, stop_at=3)
        texts = [document.text for document in run.corpus.documents()]
        TextTokenizer(vocab_size=size).train(texts).save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(ValueError, match='another training: tokenizer_content is ".*" there and ".*" here; choose'):
        train_language(first)
    train_language(run, stop_at=3, overwrite=True)
    texts = sorted((tmp_path / "texts").iterdir())
    for file in texts:
        file.touch()
    assert train_language(run, stop_at=4) is None
    texts[0].write_text("other words\n" * 20)
    run = dataclasses.replace(run, corpus=dataclasses.replace(run.corpus))
    with pytest.raises(ValueError, match='another training: corpus_text is ".*" there and ".*" here'):
        train_language(run)


def test_output_and_cache_inside_the_corpus(tmp_path):
    write_texts(tmp_path / "texts")
    run = small_run(tmp_path, output=str(tmp_path / "texts/out"), cache=str(tmp_path / "texts/cache"), max_steps=4)
    assert train_language(run, stop_at=2) is None
    assert len(train_language(run)[0].losses) == 4


def test_killed_behind_the_last_step(make_run, monkeypatch):
    """The held-out loss at the end is measured once."""
    run = make_run(evaluate_every=0, log_every=3)
    with monkeypatch.context() as patched:
        patched.setattr(trainer.LanguageTrainer, "save_to", lambda *args: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            train_language(run)
    console = Console(file=io.StringIO(), width=150)
    assert train_language(run, console=console)[0].held_out_steps == [8]
    assert [point["step"] for point in log(run) if "held_out_loss" in point] == [8]
    assert ", ," not in console.file.getvalue()


def test_a_damaged_log(make_run):
    run = make_run()
    train_language(run, stop_at=4)
    path = Path(run.output, "log.jsonl")
    whole = path.read_text()
    for line in ("{\n", "[]\n", "{}\n"):
        path.write_text(line + whole)
        with pytest.raises(ValueError, match="log.jsonl is damaged in line 1 .*delete that line"):
            train_language(run)


@pytest.mark.slow
def test_a_finished_training_is_measured_as_asked(make_run, monkeypatch):
    run = make_run(prompt="the cat", context_lengths=(16,))
    first, console = train_language(run)[0], Console(file=io.StringIO(), width=150)
    for start in ("build_model", "compiler_loading"):  # neither is needed
        monkeypatch.setattr(train, start, None)
    assert train_language(run, console=console) == [first]
    assert console.file.getvalue() == "gdn: finished earlier, not trained again\n"
    other = dataclasses.replace(run, prompt="rivers", context_lengths=(16, 32), context_texts=1)
    result = train_language(other)[0]
    assert [entry["length"] for entry in result.perplexities] == [16, 32] and result.run["prompt"] == "rivers"
    assert result.continuation != first.continuation and result.losses == first.losses
    assert train_language(other) == [result]


DISK_FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
WRITERS = {
    "configuration": (trainer.Trainer, "_save", DISK_FULL),
    "tensors": (sharded_checkpoints, "save_file", SafetensorError("Error while serializing: I/O error")),
    "flush": (background, "publish_folder", DISK_FULL),
}


@pytest.mark.parametrize(
    "writer", ["tensors", *(pytest.param(x, marks=pytest.mark.slow) for x in ("configuration", "flush"))]
)
def test_a_full_disk_costs_no_checkpoint(make_run, monkeypatch, whole_log, writer):
    run = make_run(keep_checkpoints=1)
    owner, name, error = WRITERS[writer]
    write = getattr(owner, name)

    def full_at_step_6(*args, **kwargs):
        full = any("checkpoint-6" in str(place) for place in args if isinstance(place, (str, Path)))
        if writer != "flush" or not full:
            write(*args, **kwargs)
        if full:
            raise error

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full_at_step_6)
        with pytest.raises(SaveError, match="checkpoint of step 6 could not be written.*checkpoint-3, is whole"):
            train_language(run)
    assert names(run) == ["checkpoint-3"]
    train_language(run)
    assert log(run) == whole_log
    assert names(run) == ["checkpoint-8"]


@pytest.mark.parametrize(
    "writer",
    [
        pytest.param((trainer, "publish_folder"), id="model"),
        pytest.param((train, "save_result"), id="result", marks=pytest.mark.slow),
    ],
)
def test_a_full_disk_at_the_end_costs_no_step(make_run, monkeypatch, writer):
    run = make_run(checkpoint_every=8, max_steps=8, evaluate_every=0)
    owner, name = writer
    write = getattr(owner, name)

    def full(*args):
        if name == "publish_folder" and args[1].name != "model":
            return write(*args)
        raise DISK_FULL

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(OSError, match="No space left on device"):
            train_language(run)
    before = log(run)
    assert not Path(run.output, "result.json").exists() and names(run) == ["checkpoint-8"]
    assert train_language(run)[0].losses == losses(run) and log(run) == before


@pytest.mark.parametrize("what", [pytest.param("loss", marks=pytest.mark.slow), "gradient"])
def test_a_loss_that_is_not_finite(make_run, monkeypatch, whole_log, what):
    run = make_run()
    compute_loss = trainer.LanguageTrainer.compute_loss

    def spoiled(self, model, inputs, **kwargs):
        loss = compute_loss(self, model, inputs, **kwargs)
        if self.state.global_step != 5:
            return loss
        return loss * float("nan") if what == "loss" else loss + (model.lm_head.weight[0, 0] * 0).sqrt()

    with monkeypatch.context() as patched:
        patched.setattr(trainer.LanguageTrainer, "compute_loss", spoiled)
        words = f"the {what} is nan at step 6.*learning_rate.*another output folder, with path = .*checkpoint-3"
        with pytest.raises(NonFiniteLoss, match=words):
            train_language(run)
    assert names(run) == ["checkpoint-3"]
    train_language(run)
    assert log(run) == whole_log


@pytest.mark.slow
@pytest.mark.parametrize("preset", [pytest.param("gdn-340m", marks=pytest.mark.slow), "palimpsa-d-170m"])
def test_a_training_of_a_preset_from_before_it_named_its_first_values_continues(make_run, preset):
    model = {"preset": preset, "hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
    whole, cut = make_run("whole", model=model), make_run("cut", model=model)
    train_language(whole)
    assert train_language(cut, stop_at=3) is None
    checkpoint = Path(cut.output, "checkpoints/checkpoint-3")
    saved = json.loads((checkpoint / "config.json").read_text())
    for name in ("long_memory", "skip_init"):
        if saved["mixer"].get(name) in ("own", 1.0):
            del saved["mixer"][name]
    (checkpoint / "config.json").write_text(json.dumps(saved))
    (checkpoint / CHECKSUMS).unlink()
    write_checksums(checkpoint)
    train_language(cut)
    assert losses(cut) == losses(whole)
