"""The processes that tests share survive a call that fails."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from fastweights.testing.processes import Processes


def add_ranks(fails_on: int | None) -> float:
    if dist.get_rank() == fails_on:
        raise ArithmeticError("no sum")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    return total.item()


@pytest.mark.slow
def test_a_failure_is_told_and_does_not_last() -> None:
    two = Processes(2)
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: Traceback.*ArithmeticError: no sum\n\nrank 0: no answer"):
        two.run(add_ranks, 1)
    assert two.run(add_ranks, None) == [3.0, 3.0]
    two.stop()


HELD_BACK = """
import math
from multiprocessing import forkserver
from fastweights.testing.processes import processes
from fastweights.training.pool import signals_held_back
if __name__ == "__main__":
    with signals_held_back():
        forkserver.ensure_running()
    assert processes(2).run(math.sqrt, 4.0) == [2.0, 2.0]
"""


@pytest.mark.slow
def test_the_processes_end_with_python_where_a_training_has_started_their_server(tmp_path) -> None:
    (tmp_path / "script.py").write_text(HELD_BACK)
    subprocess.run([sys.executable, tmp_path / "script.py"], check=True, timeout=120)
