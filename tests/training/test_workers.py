"""Processes that train are waited for together."""

import multiprocessing
import signal
import time

from fastweights.training.workers import join_or_kill

HANGING, SECONDS = 6, 1.0


def test_processes_that_do_not_end_cost_one_wait_and_not_one_each() -> None:
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(seconds,)) for seconds in (0.0, *[600.0] * HANGING)]
    for process in processes:
        process.start()
    processes[0].join()
    begun = time.monotonic()
    join_or_kill(processes, SECONDS)
    waited = time.monotonic() - begun
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, *[-signal.SIGKILL] * HANGING]
    assert waited < HANGING * SECONDS / 2
