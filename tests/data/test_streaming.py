"""The background thread: same batches as without it, errors that surface, and an end."""

import gc
import itertools
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fastweights.data import MQAR, RecallTask, make_task, stream

ENOUGH = 30  # seconds; a thread that should end and has not by then is stuck


class Failing(MQAR):
    """Raises in batch number 2."""

    def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Any:
        if index == 2:
            raise RuntimeError("batch 2 is broken")
        return super().batch(split, seed=seed, index=index, batch_size=batch_size)


def producers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "fastweights-batches"]


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test() -> Any:
    before = producers()
    yield
    for thread in producers():
        if thread not in before:
            thread.join(ENOUGH)
            assert not thread.is_alive()


def test_stream_equals_batch(task: RecallTask) -> None:
    streamed = list(stream(task, "test", seed=4, batch_size=3, start=2, stop=9, ahead=2))
    assert len(streamed) == 7
    for index, batch in enumerate(streamed, start=2):
        wanted = task.batch("test", seed=4, index=index, batch_size=3)
        assert torch.equal(batch.input_ids, wanted.input_ids) and torch.equal(batch.labels, wanted.labels)


def test_resume_continues_where_it_stopped() -> None:
    task = make_task("mqar", pairs=4)
    whole = list(stream(task, "train", seed=0, batch_size=2, stop=6))
    begun = stream(task, "train", seed=0, batch_size=2, stop=6)
    parts = list(itertools.islice(begun, 2))
    begun.close()  # type: ignore[attr-defined]
    parts += stream(task, "train", seed=0, batch_size=2, start=2, stop=6)
    assert len(parts) == 6
    assert all(torch.equal(one.input_ids, two.input_ids) for one, two in zip(whole, parts, strict=True))


def test_nothing_to_stream() -> None:
    assert list(stream(make_task("mqar", pairs=4), "train", seed=0, batch_size=2, start=3, stop=3)) == []


def test_batches_are_made_in_another_thread_and_not_too_far_ahead() -> None:
    made: list[tuple[int, str]] = []
    fourth = threading.Event()

    class Recording(MQAR):
        def batch(self, split: str, *, seed: int, index: int, batch_size: int) -> Any:
            made.append((index, threading.current_thread().name))
            if index == 3:
                fourth.set()
            return super().batch(split, seed=seed, index=index, batch_size=batch_size)

    batches = stream(Recording(pairs=2), "train", seed=0, batch_size=1, stop=100, ahead=2)
    next(batches)
    assert fourth.wait(ENOUGH)  # one taken, two in the queue, one waiting for room
    (thread,) = producers()
    thread.join(0.5)
    assert made == [(index, "fastweights-batches") for index in range(4)]


def test_an_exception_surfaces_in_the_consumer_after_the_good_batches() -> None:
    batches = stream(Failing(pairs=2), "train", seed=0, batch_size=1, stop=10)
    next(batches)
    next(batches)
    with pytest.raises(RuntimeError, match="batch 2 is broken"):
        next(batches)
    assert list(batches) == []


@pytest.mark.parametrize("end", ["close", "forget", "cycle"])
def test_the_thread_stops_with_its_iterator(end: str) -> None:
    batches: Any = stream(make_task("mqar", pairs=2), "train", seed=0, batch_size=1, stop=10**12)
    next(batches)
    (thread,) = producers()
    assert thread.is_alive() and thread.daemon
    if end == "close":
        batches.close()
    elif end == "cycle":
        cycle: list[Any] = [batches]
        cycle.append(cycle)
        del cycle
    del batches
    gc.collect()
    thread.join(ENOUGH)
    assert not thread.is_alive()


@pytest.mark.parametrize(
    "error, bad",
    [
        (ValueError, {"split": "validation"}),
        (ValueError, {"seed": -1}),
        (ValueError, {"batch_size": 0}),
        (ValueError, {"start": -1}),
        (TypeError, {"start": 1.0}),
        (ValueError, {"stop": 4}),
        (TypeError, {"stop": True}),
        (ValueError, {"ahead": 0}),
        (TypeError, {"ahead": np.float64(2)}),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_at_once(error: type[Exception], bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"split": "train", "seed": 0, "batch_size": 1, "start": 5, "stop": 9}
    (name,) = bad
    with pytest.raises(error, match=name):
        stream(make_task("mqar", pairs=2), **(arguments | bad))
    assert not producers()
