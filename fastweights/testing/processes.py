"""Processes that exchange tensors by gloo and stay for the next test: to start Python with torch takes seconds."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

__all__ = ["Processes", "processes"]

LONGEST = 120.0  # seconds of one call
GRACE = 1.0  # seconds that others get after a failure


def _work(rank: int, size: int, folder: str, calls: Any) -> None:
    import torch.distributed as dist

    signal.pthread_sigmask(
        signal.SIG_SETMASK, ()
    )  # a server that a training has started holds signals back, also that to end
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=LONGEST / 2)
    )
    while True:
        try:
            function, arguments = pickle.loads(calls.recv_bytes())
            answer = (True, function(*arguments))
        except EOFError:
            return
        except Exception:
            answer = (False, traceback.format_exc())
        calls.send_bytes(pickle.dumps(answer))  # not send, which would pass tensors in shared memory


class Processes:
    """Processes of one gloo group, the default group of each. They start with the first call, and anew after one that failed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[Any, Any]] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["fastweights.testing.cases"])
        self.folder = TemporaryDirectory()
        for rank in range(self.size):
            here, there = context.Pipe()
            arguments = (rank, self.size, str(Path(self.folder.name)), there)
            worker = context.Process(target=_work, args=arguments, daemon=True)
            worker.start()
            there.close()
            self.workers.append((worker, here))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What the function returns on each rank.

        Args:
            function: of a module that the processes can import; it and the arguments are pickled.

        Raises:
            RuntimeError: it raised on some rank, or took longer than two minutes.
        """
        if not self.workers:
            self._start()
        message, end = pickle.dumps((function, arguments)), time.monotonic() + LONGEST
        waiting = {calls: rank for rank, (_, calls) in enumerate(self.workers)}
        for calls in waiting:
            calls.send_bytes(message)
        failed: dict[int, str] = {}
        results: list[Any] = [None] * self.size
        # Once one has failed, the others may wait for it.
        while waiting and (ready := wait([*waiting], GRACE if failed else max(0.0, end - time.monotonic()))):
            for calls in ready:
                rank = waiting.pop(calls)
                try:
                    is_right, results[rank] = pickle.loads(calls.recv_bytes())  # type: ignore[union-attr]
                except EOFError:
                    is_right, results[rank] = False, "the process ended"
                if not is_right:
                    failed[rank] = results[rank]
        failed |= dict.fromkeys(waiting.values(), "no answer")
        if failed:
            self.stop()
            raise RuntimeError("\n".join(f"rank {rank}: {text}" for rank, text in failed.items()))
        return results

    def stop(self) -> None:
        for worker, calls in self.workers:
            calls.close()
            worker.kill()
            worker.join()
        self.workers = []
        self.folder.cleanup()


@cache
def processes(size: int) -> Processes:
    """The processes that all tests of this Python share."""
    return Processes(size)
