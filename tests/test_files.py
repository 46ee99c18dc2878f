"""Files appear whole or not at all, and a failure to write says what, where and why."""

import errno
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fastweights.files import TENSOR_ERRORS, WriteError, damage, staged_folder, write_checksums, write_json, writing

from .full_disk import largest_file

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def raises(error):
    def call(*args, **kwargs):
        raise error

    return call


def test_a_full_disk_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, 1)
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", raises(FULL))
        with pytest.raises(WriteError) as error:
            write_json(path, 2)
    assert str(error.value) == f"a.json could not be written to {tmp_path}: No space left on device"
    assert path.read_text() == "1\n" and os.listdir(tmp_path) == ["a.json"]


def test_a_full_disk_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    with staged_folder(folder) as staged:
        (staged / "a").write_text("old")
    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", raises(FULL))
        with (
            pytest.raises(WriteError, match=r"folder could not be written to .*No space left"),
            staged_folder(folder) as staged,
        ):
            (staged / "a").write_text("new")
    assert (folder / "a").read_text() == "old" and os.listdir(tmp_path) == ["folder"]


@pytest.mark.parametrize("write", ["plain", "numpy", "torch", "safetensors"])
def test_errors_of_every_library_for_a_full_disk(tmp_path, write):
    """A limit on the size of a file acts as a full disk does: the system refuses to write more."""
    path = tmp_path / "file"
    writers = {
        "plain": lambda: path.write_bytes(bytes(40_000)),
        "numpy": lambda: np.zeros(9999).tofile(path),
        "torch": lambda: torch.save(torch.zeros(9999), path),
        "safetensors": lambda: save_file({"a": torch.zeros(9999)}, path),
    }
    message = f"^the file could not be written to {tmp_path}: "
    with pytest.raises(WriteError, match=message), largest_file(20_000), writing("the file", tmp_path, *TENSOR_ERRORS):
        writers[write]()


def test_other_errors_pass():
    for error in (KeyError("a"), RuntimeError("b"), KeyboardInterrupt()):
        with pytest.raises(type(error)), writing("the file", "place"):
            raise error


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.bin").write_bytes(bytes(10_000))
    (tmp_path / "inner" / "b.bin").write_bytes(b"b")
    write_checksums(tmp_path)
    return tmp_path


def test_checksums_notice_every_damage(folder):
    assert damage(folder) is None
    with (folder / "a.bin").open("r+b") as file:
        file.seek(5000)
        file.write(b"1")
    assert damage(folder) == "a.bin has changed since it was written"
    assert damage(folder, content=False) is None
    (folder / "inner" / "b.bin").write_bytes(b"bb")
    assert damage(folder) == "inner/b.bin has 2 bytes, where 1 were written"
    (folder / "inner" / "b.bin").unlink()
    assert damage(folder) == "inner/b.bin is missing"


@pytest.mark.parametrize("content", [None, "", "{", "[]", '{"a.bin": 1}'])
def test_damaged_checksums(folder, content):
    (folder / "checksums.json").unlink()
    if content is not None:
        (folder / "checksums.json").write_text(content)
    assert damage(folder).startswith("it has no checksums.json" if content is None else "checksums.json cannot be read")


def test_large_files_are_read_in_blocks(folder, monkeypatch):
    whole = damage(folder)
    monkeypatch.setattr("fastweights.files.BLOCK", 64)
    assert damage(folder) is whole is None
