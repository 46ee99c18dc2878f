"""A checkpoint comes back as it was saved, or is refused with the file's name and the remedy."""

import pytest
import torch

from fastweights.training import CheckpointError
from fastweights.training.checkpoints import load_checkpoint, save_checkpoint

RUN = {"mixer": "gdn", "steps": 12}
STATE = {"weight": torch.arange(1000.0), "history": {"step": 3, "losses": [0.1, 2.0]}}


@pytest.fixture
def checkpoint(tmp_path):
    path = tmp_path / "run.checkpoint"
    save_checkpoint(path, run=RUN, state=STATE)
    return path


def test_comes_back_as_it_was(checkpoint):
    state = load_checkpoint(checkpoint, run=RUN)
    assert torch.equal(state["weight"], STATE["weight"])
    assert state["history"] == STATE["history"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: b"garbage",
        lambda content: content[:-1],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-200] + bytes([content[-200] ^ 1]) + content[-199:],
        lambda content: content + b"\0",
    ],
    ids=["empty", "garbage", "last byte missing", "half", "one bit flipped", "longer"],
)
def test_damage_is_refused_and_the_file_stays(checkpoint, damage):
    damaged = damage(checkpoint.read_bytes())
    checkpoint.write_bytes(damaged)
    with pytest.raises(CheckpointError, match="damaged.*delete that file") as error:
        load_checkpoint(checkpoint, run=RUN)
    assert str(checkpoint) in str(error.value)
    assert checkpoint.read_bytes() == damaged


def test_another_run_is_refused_and_the_difference_named(checkpoint):
    with pytest.raises(CheckpointError, match=r"another run \(it differs in steps\)"):
        load_checkpoint(checkpoint, run={**RUN, "steps": 13})


def test_a_failed_save_leaves_the_old_checkpoint(checkpoint, monkeypatch):
    before = checkpoint.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save_checkpoint(checkpoint, run=RUN, state={"step": 4})
    assert checkpoint.read_bytes() == before
    assert [entry.name for entry in checkpoint.parent.iterdir()] == [checkpoint.name]
