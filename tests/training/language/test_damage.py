"""A checkpoint that is not as it was written is reported, and the one before it continued."""

import io
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

from fastweights.training.checkpoints import checkpoints_in, latest_whole
from fastweights.training.language import train_language
from fastweights.training.language.model import model_config

from .small import SHARD, log, small_run


def overwrite(file):
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"100 bytes that were not there" * 4)


def cut(file):
    file.write_bytes(file.read_bytes()[:-1])


@pytest.fixture(scope="module")
def stopped(prepared, tmp_path_factory):
    """The output of a run that was stopped after step 4."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    run = small_run(prepared, output=str(tmp_path_factory.mktemp("stopped") / "out"))
    train_language(run, stop_at=4)
    torch.set_num_threads(threads)
    return run.output


@pytest.fixture
def folder(make_run, stopped):
    """Checkpoints of steps 3 and 4, the run of them, and the lines reported."""
    run, lines = make_run(), []
    shutil.copytree(stopped, run.output)
    return run, Path(run.output, "checkpoints"), lines


def latest(run, folder, lines):
    config = model_config(run)
    config.vocab_size = 300
    return latest_whole(folder, config, lines.append)


@pytest.mark.parametrize("harm", [overwrite, cut, Path.unlink])
def test_every_damage_of_every_file_is_noticed(folder, harm):
    run, checkpoints, lines = folder
    newest = checkpoints / "checkpoint-4"
    files = [str(path.relative_to(newest)) for path in newest.rglob("*.*") if path.name != "checksums.json"]
    assert {"model.safetensors", SHARD, "rng_state.pth", "trainer_state.json", "open_loss.json"} <= set(files)
    for name in files:
        shutil.copytree(newest, checkpoints / "checkpoint-5")
        harm(checkpoints / "checkpoint-5" / name)
        assert latest(run, checkpoints, lines) == newest
        assert f"checkpoint-5 is damaged ({name} " in lines[-1]
        assert lines[-1].endswith("now damaged-checkpoint-5; checkpoint-4, before it, is continued")
        assert checkpoints_in(checkpoints)[-1] == newest and (checkpoints / "damaged-checkpoint-5").exists()
    assert len(lines) == len(files)


def test_without_a_whole_checkpoint_nothing_is_trained_again(folder):
    run, checkpoints, lines = folder
    for name in ("checkpoint-3", "checkpoint-4"):
        overwrite(checkpoints / name / SHARD)
    before = sorted(checkpoints.rglob("*"))
    words = (
        r"checkpoint-4 is damaged \(optimizer/shard-\S+ has changed .*\), and so are all before it in .*pass overwrite"
    )
    with pytest.raises(ValueError, match=words):
        train_language(run)
    assert sorted(checkpoints.rglob("*")) == before
    shutil.rmtree(checkpoints / "checkpoint-3")
    with pytest.raises(ValueError, match="checkpoint-4 is damaged .* and there is no other; put a copy in its place"):
        latest(run, checkpoints, lines)
    assert not lines


def test_a_training_continues_from_the_checkpoint_before(folder, make_run):
    run, checkpoints, _ = folder
    overwrite(checkpoints / "checkpoint-4" / "model.safetensors")
    console = Console(file=io.StringIO(), width=400)
    train_language(run, console=console)
    shown = console.file.getvalue()
    assert "checkpoint-4 is damaged (model.safetensors has changed since it was written)" in shown
    assert "gdn: continues after step 3" in shown
    whole = make_run("whole")
    train_language(whole)
    assert log(run) == log(whole)
