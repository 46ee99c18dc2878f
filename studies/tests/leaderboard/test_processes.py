"""Jobs in processes of their own: each result as it comes, failures that cost one job, an end at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from fastweights_studies.leaderboard import Request
from fastweights_studies.leaderboard.processes import call_each

from fastweights.training import WorkerError
from fastweights.training.progress import Silent

pytestmark = pytest.mark.usefixtures("signals_arrive")


def work(what):
    if what == "fail":
        raise ValueError("this one cannot be done")
    if what == "die":
        os._exit(3)
    if what == "wait":
        time.sleep(600)
    os.kill(os.getpid(), signal.SIGINT)  # as Ctrl-C reaches every process
    return os.getpid(), torch.get_num_threads()


@pytest.fixture
def left():
    """Which processes that the test started are left. Other tests keep some for the next one."""
    before = multiprocessing.active_children()
    return lambda: [process for process in multiprocessing.active_children() if process not in before]


class Notes(Silent):
    """Keeps what is reported."""

    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


def request(workers, **more):
    return Request(mixers=(), size="small", device="cpu", output=Path(), workers=workers, **more)


def test_a_failure_costs_one_job(left):
    """A process that has failed or died is replaced by another; the message names what failed."""
    jobs = {name: [name] for name in ("first", "fail", "die", "second", "third")}
    done, before, notes = {}, torch.get_num_threads(), Notes()
    with pytest.raises(WorkerError) as failure:
        call_each(work, jobs, request(2, reporter=notes), done.__setitem__)
    assert set(done) == {"first", "second", "third"} and os.getpid() not in {pid for pid, _ in done.values()}
    assert {threads for _, threads in done.values()} == {1} and torch.get_num_threads() == before
    message = str(failure.value)
    assert message.endswith(" (and 1 more of 5 mixers)") and "Traceback" in failure.value.details
    assert set(notes.lines) == {
        "mixer fail failed: ValueError: this one cannot be done", "the worker on mixer die ended with exit code 3",
    }  # fmt: skip
    assert not left()


def test_an_interruption_ends_the_processes_at_once(left):
    """Also one within `ended`, and with a call that runs for long."""
    done = []

    def ended(name, result):
        done.append(name)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_each(work, {"wait": ["wait"], "first": ["first"], "second": ["second"]}, request(2), ended)
    assert done == ["first"] and time.monotonic() - start < 60 and not left()
