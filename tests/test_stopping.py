"""Signals that ask a process to stop: raised at once, or noted while the body holds them; a second one ends the process."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from fastweights.stopping import SIGNALS, Stopped, StopSignals, join_or_kill

pytestmark = pytest.mark.usefixtures("signals_arrive")


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGUSR1, 138)])
def test_a_signal_is_raised_with_its_exit_code(number, code):
    with pytest.raises(Stopped, match=f"stopped by {number.name}") as stopped, StopSignals() as signals:
        send(number)
    assert stopped.value.exit_code == code and signals.received == number


def test_a_held_signal_is_raised_behind_the_body():
    ended = []
    with pytest.raises(Stopped), StopSignals() as signals, signals.hold():
        assert signals.received is None
        send(signal.SIGTERM)
        send(signal.SIGTERM)  # as `timeout` sends it, twice in a moment
        assert signals.received == signal.SIGTERM
        ended.append(True)
    assert ended


def test_an_error_of_the_body_comes_first():
    with pytest.raises(OSError, match="disk"), StopSignals() as signals, signals.hold():
        send(signal.SIGTERM)
        raise OSError("disk")


def test_handlers_of_before_come_back():
    def own(number, frame): ...

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with StopSignals():
            assert signal.getsignal(signal.SIGUSR1) is not own
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_what_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as signals:
            send(signal.SIGHUP)
        assert signals.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_has_no_handlers():
    handlers = []

    def look():
        with StopSignals():
            handlers.extend(map(signal.getsignal, SIGNALS))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == list(map(signal.getsignal, SIGNALS))


SCRIPT = """
import time
from fastweights.stopping import StopSignals
with StopSignals() as signals, signals.hold():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
        if signals.received:
            print("noted", flush=True)
            time.sleep(60)
"""


def test_a_second_signal_ends_the_process_at_once():
    process = subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True)
    for word in ("ready", "noted"):
        assert process.stdout.readline() == f"{word}\n"
        time.sleep(0.3 * (word == "noted"))  # later than what counts as one request
        process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=10) == -signal.SIGTERM


def test_processes_that_do_not_end_cost_one_wait_and_not_one_each():
    context, hanging, seconds = multiprocessing.get_context("spawn"), 6, 1.0
    processes = [context.Process(target=time.sleep, args=(wait,)) for wait in (0.0, *[600.0] * hanging)]
    for process in processes:
        process.start()
    processes[0].join()
    begun = time.monotonic()
    join_or_kill(processes, seconds)
    waited = time.monotonic() - begun
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, *[-signal.SIGKILL] * hanging]
    assert waited < hanging * seconds / 2
