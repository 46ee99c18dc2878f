"""The processes that tests share survive a call that fails."""

from __future__ import annotations

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


def test_a_failure_is_told_and_does_not_last() -> None:
    two = Processes(2)
    with pytest.raises(RuntimeError, match=r"(?s)rank 1: Traceback.*ArithmeticError: no sum\n\nrank 0: no answer"):
        two.run(add_ranks, 1)
    assert two.run(add_ranks, None) == [3.0, 3.0]
    two.stop()
