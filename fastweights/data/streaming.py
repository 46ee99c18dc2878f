"""Batches generated in a background thread, ahead of the training loop that takes them."""

import queue
import threading
from collections.abc import Iterator
from typing import Any

from ..checks import check_size, check_whole_number, describe_value
from .task import Task, check_batch

__all__ = ["stream"]

_MOST_AHEAD = 1024  # batches in memory
_CLOSED_EVERY = 0.1  # seconds between a waiting thread's looks at whether its consumer is gone


def stream(
    task: Task, split: str, *, seed: int, batch_size: int, start: int = 0, stop: int, ahead: int = 4
) -> Iterator[Any]:
    """Iterator of task.batch(split, seed=seed, index=index, batch_size=batch_size) for index in range(start, stop).

    A thread, started by the first next(), generates up to `ahead` batches in advance. To resume after n batches, pass
    start=n. An exception in the thread is raised in the consumer. The thread ends with the last batch, and soon after
    the iterator is closed (`.close()`) or garbage-collected. ValueError or TypeError for bad arguments, at once.
    """
    if not callable(getattr(task, "batch", None)):
        raise TypeError(f"task must be a RecallTask, got {describe_value(task)}; make_task makes one of a name")
    check_batch(split, seed, 0, batch_size)
    start = check_whole_number("start", start)
    stop = check_whole_number("stop", stop, low=start)
    ahead = check_size("ahead", ahead, high=_MOST_AHEAD)
    return _consume(task, split, seed, batch_size, range(start, stop), ahead)


def _consume(task: Task, split: str, seed: int, batch_size: int, indices: range, ahead: int) -> Iterator[Any]:
    ready: queue.Queue[Any] = queue.Queue(maxsize=ahead)
    closed = threading.Event()

    def offer(item: Any) -> bool:
        # The consumer only sets a flag: it may be closed by the garbage collector, inside this very thread, where
        # waiting for the thread or taking the queue's lock could block for ever.
        while not closed.is_set():
            try:
                ready.put(item, timeout=_CLOSED_EVERY)
                return True
            except queue.Full:
                continue
        return False

    def produce() -> None:
        try:
            for index in indices:
                if not offer(task.batch(split, seed=seed, index=index, batch_size=batch_size)):
                    return
        except BaseException as error:  # also KeyboardInterrupt and the like: the consumer must not wait for ever
            offer(error)

    threading.Thread(target=produce, name="fastweights-batches", daemon=True).start()
    try:
        for _ in indices:
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
