"""The pool that every training and measurement runs in: results, failures, requests to stop, GPUs."""

import os
import signal
import time

import pytest

from fastweights.stopping import Stopped, StopSignals
from fastweights.training.pool import Call, Pool, WorkerError, _find_gpus, _visible, run_tasks

pytestmark = pytest.mark.usefixtures("signals_arrive")


def double(number):
    if number == 13:
        raise ZeroDivisionError("13")
    if number == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return os.getpid(), 2 * number


class Waits:
    """Reports that it has begun, and then waits for a request to stop, which it notes in a file."""

    def __init__(self, file, by_signal):
        self.name, self.file, self.by_signal = "waits", file, by_signal

    def __call__(self, worker):
        worker.report("begun")
        if not self.by_signal:
            while not worker.should_stop():
                time.sleep(0.01)
            self.file.write_text("asked")
            return
        try:
            with StopSignals(), worker.requests_as_signals():
                worker.report("entered")
                while True:
                    time.sleep(0.01)
        except Stopped as stopped:
            self.file.write_text(str(stopped))
            raise


def calls(*numbers):
    return [Call(str(number), double, (number,)) for number in numbers]


@pytest.mark.parametrize("renewed", [False, True])
def test_tasks_share_a_process_or_have_one_each(renewed):
    found = {}
    pool = Pool(workers=1, renewed=renewed)
    run_tasks(calls(1, 2), pool, on_end=lambda worker, task, result: found.update({task.name: result}))
    processes, values = zip(*found.values(), strict=True)
    assert values == (2, 4) and len(set(processes)) == (2 if renewed else 1)
    assert os.getpid() not in processes


def test_a_task_that_fails_or_dies_is_lost_alone():
    ended, failed = [], []
    with pytest.raises(WorkerError, match=r"run 13 failed: ZeroDivisionError: 13 \(and 1 more of 3 runs\)") as error:
        run_tasks(
            calls(13, 14, 15),
            Pool(workers=1, what="run"),
            on_end=lambda worker, task, result: ended.append(result[1]),
            on_failure=lambda task, why: failed.append((task.name, str(why))),
        )
    assert ended == [30] and [name for name, _ in failed] == ["13", "14"]
    assert "the worker on run 14 was killed by signal 9" in failed[1][1]
    assert "Traceback" in error.value.details


@pytest.mark.parametrize("by_signal", [False, True])
def test_an_interruption_lets_tasks_save_their_work(tmp_path, by_signal):
    file = tmp_path / "noted"

    def interrupt(worker, task, message):
        if message == "begun" and by_signal:
            return
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_tasks([Waits(file, by_signal)], Pool(workers=1), on_report=interrupt)
    assert file.read_text() == ("stopped by SIGTERM" if by_signal else "asked")


def test_tasks_with_nothing_to_save_are_ended_at_once():
    began = time.monotonic()

    def interrupt():
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, lambda number, frame: interrupt())
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            run_tasks([Call("sleep", time.sleep, (60.0,))], Pool(workers=1, stop_seconds=0.0))
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - began < 20.0


def test_the_gpus_of_a_device(monkeypatch):
    """ "cuda" is every GPU of the machine, also for workers that each see one of them."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for one_gpu in (True, False):
        assert _find_gpus(Pool(workers=3, devices=["cuda"], one_gpu=one_gpu), 3) == [0, 1, 0]
        assert _find_gpus(Pool(workers=3, devices=["cpu"], one_gpu=one_gpu), 3) == [None] * 3
        assert _find_gpus(Pool(workers=2, devices=["cuda:1"], one_gpu=one_gpu), 2) == [1 if one_gpu else None] * 2
    assert _find_gpus(Pool(workers=3, devices=["cuda:1", "cuda:0"], one_gpu=True), 3) == [1, 0, 1]


@pytest.mark.parametrize(("before", "seen"), [(None, "1"), ("GPU-5,3", "3"), ("", "1")])
def test_a_process_sees_its_gpu_alone(monkeypatch, before, seen):
    """Names and numbers of CUDA_VISIBLE_DEVICES stay; without it GPUs have their numbers."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", before or "")
    if before is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with _visible(1):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
    with _visible(None):
        assert os.environ.get("CUDA_VISIBLE_DEVICES") == before
