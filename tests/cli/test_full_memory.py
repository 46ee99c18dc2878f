"""A memory that is full ends every command with one line that names what needs less, on a CPU as on a GPU."""

from __future__ import annotations

import errno

import pytest
import torch

from fastweights.environment import OutOfMemory, within_memory

from . import full_memory
from .full_memory import RECALL, check_one_line

folder = full_memory.folder  # a fixture


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("train run.toml", "a smaller batch_size"),
        ("evaluate model --text text.txt --lengths 16", "a smaller --block"),
        ("generate model Once", "a smaller --block"),
        pytest.param(
            f"{RECALL} --mixers hungry --learning-rates 0.01",
            "a smaller batch_size, or fewer workers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_line(folder, capsys, command, remedy):
    check_one_line(capsys, command, remedy)


def allocate_on_the_cpu():
    torch.empty(2**50)


def allocate_in_python():
    bytearray(2**60)


def map_a_file():
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def overflow():
    torch.empty(2**40, 2**40)


@pytest.mark.parametrize("fails", [allocate_on_the_cpu, allocate_in_python, map_a_file, overflow])
def test_every_kind_of_error_for_a_full_memory(fails):
    with pytest.raises(OutOfMemory, match=r"^the device's memory is full; less needs less"), within_memory("less"):
        fails()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full"), ValueError("x")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, within_memory("less"):
        raise error
    assert raised.value is error
