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


def request(workers):
    return Request(mixers=(), size="small", device="cpu", output=Path(), workers=workers)


def test_a_failure_costs_one_job():
    """A process that has failed or died is replaced by another; the message names what failed."""
    jobs = {name: [name] for name in ("first", "fail", "die", "second", "third")}
    done, before = {}, torch.get_num_threads()
    with pytest.raises(WorkerError) as failure:
        call_each(work, jobs, request(2), done.__setitem__)
    assert set(done) == {"first", "second", "third"} and os.getpid() not in {pid for pid, _ in done.values()}
    assert {threads for _, threads in done.values()} == {1} and torch.get_num_threads() == before
    message = str(failure.value)
    assert message.startswith("2 of 5 failed: ") and "fail: ValueError: this one cannot be done" in message
    assert "die: its process ended with exit code 3" in message and "Traceback" in failure.value.details
    assert not multiprocessing.active_children()


def test_one_process_is_this_one():
    done = {}
    with pytest.raises(WorkerError, match="1 of 2 failed: fail: ValueError"):
        call_each(fail_or_pid, {name: [name] for name in ("fail", "first")}, request(1), done.__setitem__)
    assert done == {"first": os.getpid()}


def fail_or_pid(what):
    return work(what) if what == "fail" else os.getpid()


def test_an_interruption_ends_the_processes_at_once():
    """Also one within `ended`, and with a call that runs for long."""
    done = []

    def ended(name, result):
        done.append(name)
        raise KeyboardInterrupt

    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        call_each(work, {"wait": ["wait"], "first": ["first"], "second": ["second"]}, request(2), ended)
    assert done == ["first"] and time.monotonic() - start < 60 and not multiprocessing.active_children()
