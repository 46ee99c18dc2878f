"""`fastweights train` killed at random moments ends with the bits of one that was never interrupted."""

import fcntl
import os
import random
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from fastweights.cli import main
from fastweights.training.checkpoints import checkpoint_step, checkpoints_in

from .small import SHARD, log, small_run

pytestmark = pytest.mark.usefixtures("signals_arrive")

RUN = """
from pathlib import Path
from {package}.small import small_run
run = small_run(Path({folder!r}), output={output!r}, max_steps=60, checkpoint_every=25, log_every=4, evaluate_every=15,
                context_lengths=())
"""
SAVED = "fastweights: error: stopped by {}; the same command continues after the last checkpoint"


@pytest.fixture
def run_file(prepared, tmp_path):
    """A function that makes the run file of an output folder, and the run."""

    def make(name):
        file, output = tmp_path / f"{name}.py", str(tmp_path / name)
        file.write_text(RUN.format(package=__package__, folder=str(prepared), output=output))
        return file, small_run(prepared, output=output)

    return make


def start(file, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "fastweights", "train", str(file)],
        stdout=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        **{"stderr": subprocess.PIPE, "text": True, **options},
    )


def wait_for_points(run, process, count):
    """Until the loss curve has so many points, or the process ends."""
    until = time.monotonic() + 120
    while process.poll() is None and (not Path(run.output, "log.jsonl").exists() or len(log(run)) < count):
        assert time.monotonic() < until
        time.sleep(0.002)


def latest_step(run):
    return max((checkpoint_step(path) for path in checkpoints_in(Path(run.output, "checkpoints"))), default=0)


def assert_same_bits(run, whole):
    assert log(run) == log(whole)
    for name in ("model/model.safetensors", f"checkpoints/checkpoint-60/{SHARD}"):
        assert Path(run.output, name).read_bytes() == Path(whole.output, name).read_bytes()


@pytest.mark.slow
def test_a_preempted_command_loses_no_step(run_file):
    (file, run), (whole_file, whole) = run_file("cut"), run_file("whole")
    process = start(file)
    wait_for_points(run, process, random.randrange(1, 8))
    process.send_signal(signal.SIGTERM)
    errors = process.communicate(timeout=60)[1].splitlines()
    assert process.returncode == 143
    step = latest_step(run)
    assert errors[-2:] == [f"SIGTERM: stopped after step {step}, which is saved", SAVED.format("SIGTERM")]
    assert max(point["step"] for point in log(run)) <= step < 60
    assert main(["train", str(file)]) == main(["train", str(whole_file)]) == 0
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_kills_at_random_moments(run_file):
    (file, run), (whole_file, whole) = run_file("cut"), run_file("whole")
    draw = random.Random(0)
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL):
        before, points = latest_step(run), len(log(run)) if Path(run.output, "log.jsonl").exists() else 0
        process = start(file)
        wait_for_points(run, process, points + draw.choice([0, 1, 2]))
        time.sleep(draw.uniform(0, 0.2))
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode in (0, 128 + number, -number)
        assert latest_step(run) >= before
    assert main(["train", str(file)]) == main(["train", str(whole_file)]) == 0
    assert_same_bits(run, whole)


@pytest.mark.slow
def test_a_closed_terminal(run_file):
    """It sends SIGHUP, and then refuses every line that a command writes to it."""
    file, run = run_file("cut")
    ours, theirs = os.openpty()

    def own_terminal():
        os.setsid()
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = start(file, stderr=theirs, stdin=theirs, preexec_fn=own_terminal, text=False)
    os.close(theirs)
    os.set_blocking(ours, False)
    wait_for_points(run, process, 3)
    os.close(ours)
    assert process.wait(timeout=60) == 129
    assert latest_step(run) >= max(point["step"] for point in log(run))
