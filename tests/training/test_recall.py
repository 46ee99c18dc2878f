"""The grid on worker processes: the same numbers as one run after the other, and a clear end when a worker dies."""

import json
import multiprocessing
import os
import signal

import pytest

from fastweights.analysis import load_results
from fastweights.environment import usable_cores
from fastweights.stopping import Stopped, StopSignals
from fastweights.training import WorkerError, run_recall, run_recall_parts, train_run
from fastweights.training.checkpoints import load_checkpoint, save_checkpoint
from fastweights.training.pool import _context, assign_gpus, usual_workers
from fastweights.training.progress import Silent

from .small import numbers, small_experiment

pytestmark = pytest.mark.usefixtures("signals_arrive")


@pytest.fixture
def started():
    """A function for the processes that this test has started and that still run: groups that tests share are none of them."""
    before = multiprocessing.active_children()
    return lambda: [process for process in multiprocessing.active_children() if process not in before]


class Recorder(Silent):
    def __init__(self):
        self.begun, self.ended = [], []

    def begin(self, pending, *, total):
        self.begun.append((len(pending), total))

    def end(self, worker, run, result):
        self.ended.append((worker, run.name, result.accuracy))


def test_workers_give_the_numbers_of_single_runs_in_the_order_of_the_grid(tmp_path):
    experiment = small_experiment(mixers=("linear", "gdn"), pairs=(1, 3))
    recorder = Recorder()
    results = run_recall(experiment, tmp_path / "output", workers=2, reporter=recorder)
    alone = [train_run(run, tmp_path / run.name) for run in experiment.runs()]
    assert [numbers(result) for result in results] == [numbers(result) for result in alone]
    assert load_results(tmp_path / "output" / "results.json") == results
    assert recorder.begun == [(4, 4)]
    assert sorted(name for _, name, _ in recorder.ended) == sorted(run.name for run in experiment.runs())
    assert {worker for worker, _, _ in recorder.ended} == {0, 1}
    assert not list((tmp_path / "output").rglob("*.checkpoint"))

    again = Recorder()
    assert run_recall(experiment, tmp_path / "output", reporter=again) == results
    assert again.begun == []  # nothing left to train


@pytest.mark.slow
def test_a_killed_worker_is_reported_and_the_call_can_be_repeated(tmp_path, started):
    class Killer(Silent):
        def step(self, worker, run, step, loss, speed):
            for process in started():
                os.kill(process.pid, signal.SIGKILL)

    experiment = small_experiment(steps=100)
    (run,) = experiment.runs()
    with pytest.raises(WorkerError, match=r"linear-pairs2-lr0.01-seed0 was killed by signal 9"):
        run_recall(experiment, tmp_path / "output", workers=1, checkpoint_seconds=0, reporter=Killer())
    assert not (tmp_path / "output" / "results.json").exists()
    (saved,) = (tmp_path / "output").rglob("*.checkpoint")
    assert numbers(train_run(run, saved)) == numbers(train_run(run, tmp_path / "whole.checkpoint"))


@pytest.mark.slow
def test_a_signal_costs_no_step(tmp_path, started):
    """It arrives in all processes, as from a cluster; the only save of the run is the one that it causes. Also where the server
    of the workers has started before, with other signals held back than those of the pool."""
    first = _context(["cpu"]).Process(target=abs, args=(1,))
    first.start()
    first.join()
    taken = []

    class Terminator(Silent):
        def step(self, worker, run, step, loss, speed):
            taken.append(step)
            for process in (*started(), multiprocessing.current_process()):
                os.kill(process.pid, signal.SIGTERM)

    experiment = small_experiment(steps=200)
    (run,) = experiment.runs()
    with pytest.raises(Stopped, match="stopped by SIGTERM"), StopSignals():
        run_recall(experiment, tmp_path / "output", workers=1, checkpoint_seconds=1000, reporter=Terminator())
    assert not started() and len(taken) == 1
    (saved,) = (tmp_path / "output").rglob("*.checkpoint")
    assert load_checkpoint(saved, run=run.record())["history"]["step"] >= taken[0] > 0
    assert numbers(train_run(run, saved)) == numbers(train_run(run, tmp_path / "whole.checkpoint"))


class Begun(Exception):
    """Ends a call before it starts a process."""


def test_signals_are_the_callers(tmp_path):
    """A script keeps its own handlers, during the call too."""
    seen = []

    class Looker(Silent):
        def begin(self, pending, *, total):
            os.kill(os.getpid(), signal.SIGUSR1)
            raise Begun

    before = signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    try:
        with pytest.raises(Begun):
            run_recall(small_experiment(), tmp_path / "output", workers=1, reporter=Looker())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [signal.SIGUSR1]


def test_a_damaged_checkpoint_is_reported_and_deleted(tmp_path):
    """Its run then begins again, as one without a checkpoint."""
    notes = []

    class Notes(Silent):
        def note(self, line):
            notes.append(line)

        def begin(self, pending, *, total):
            raise Begun

    experiment = small_experiment(seeds=(0, 1))
    with pytest.raises(Begun):
        run_recall(experiment, tmp_path / "output", reporter=Notes())
    whole, damaged = (tmp_path / "output" / "runs" / f"{run.name}.checkpoint" for run in experiment.runs())
    for run, checkpoint in zip(experiment.runs(), (whole, damaged), strict=True):
        steps = iter([False] * 5 + [True])
        assert train_run(run, checkpoint, should_stop=lambda steps=steps: next(steps)) is None
    before = whole.read_bytes()
    damaged.write_bytes(damaged.read_bytes()[:-10])
    with pytest.raises(Begun):
        run_recall(experiment, tmp_path / "output", reporter=Notes())
    assert notes == [f"{run.title}: its checkpoint {damaged} is damaged, so this run begins again"]
    assert whole.read_bytes() == before and not damaged.exists()


@pytest.mark.slow
def test_a_crash_of_one_run_loses_one(tmp_path, started):
    """A worker is killed in its first run of three: another takes over, and the same call trains what is missing."""

    class Killer(Silent):
        def __init__(self):
            self.killed, self.notes = False, []

        def note(self, line):
            self.notes.append(line)

        def step(self, worker, run, step, loss, speed):
            if not self.killed:
                self.killed = True
                (process,) = started()
                os.kill(process.pid, signal.SIGKILL)

    killer, experiment = Killer(), small_experiment(steps=100, seeds=(0, 1, 2))
    with pytest.raises(WorkerError, match=r"linear-pairs2-lr0.01-seed0 was killed by signal 9") as error:
        run_recall(experiment, tmp_path / "output", workers=1, reporter=killer)
    assert killer.notes == [str(error.value)] and not started()
    held = json.loads((tmp_path / "output" / "results.json").read_text())["runs"]
    assert [run["run"]["seed"] for run in held] == [1, 2]
    assert [result.run["seed"] for result in run_recall(experiment, tmp_path / "output", workers=1)] == [0, 1, 2]


@pytest.mark.slow
def test_a_worker_that_dies_between_two_runs_loses_one(tmp_path, started):
    class Killer(Silent):
        def __init__(self):
            self.ended = 0

        def end(self, worker, run, result):
            self.ended += 1
            if self.ended == 1:
                (process,) = started()
                os.kill(process.pid, signal.SIGKILL)
                process.join()

    killer, experiment = Killer(), small_experiment(seeds=(0, 1, 2))
    with pytest.raises(WorkerError, match=r"linear-pairs2-lr0.01-seed1 was killed by signal 9"):
        run_recall(experiment, tmp_path / "output", workers=1, reporter=killer)
    held = json.loads((tmp_path / "output" / "results.json").read_text())["runs"]
    assert [run["run"]["seed"] for run in held] == [0, 2]


def test_runs_of_several_parts_wait_in_one_queue(tmp_path):
    short, long = small_experiment(), small_experiment(steps=24, pairs=(2, 3))
    recorder = Recorder()
    outputs = {"short": tmp_path / "short", "long": tmp_path / "long"}
    results = run_recall_parts({"short": short, "long": long}, outputs, workers=1, reporter=recorder)
    assert recorder.begun == [(3, 3)]
    order = [*reversed(long.runs()), *short.runs()]  # the longest of all parts first
    assert [name for _, name, _ in recorder.ended] == [run.name for run in order]
    for name, experiment in (("short", short), ("long", long)):
        assert [result.run for result in results[name]] == [run.record() for run in experiment.runs()]
        assert load_results(outputs[name] / "results.json") == results[name]


def test_workers_are_spread_over_the_gpus(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert assign_gpus({"cuda"}, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert assign_gpus({"cuda:1"}, 2) == assign_gpus({"cpu"}, 2) == [None, None]


@pytest.mark.slow
def test_an_error_in_a_worker_arrives_with_its_traceback(tmp_path):
    class Saboteur(Silent):
        def begin(self, pending, *, total):
            path = tmp_path / "output" / "runs" / f"{pending[0].name}.checkpoint"
            save_checkpoint(path, run={"mixer": "another"}, state={})

    with pytest.raises(WorkerError, match="linear-pairs2-lr0.01-seed0 failed: CheckpointError") as error:
        run_recall(small_experiment(), tmp_path / "output", workers=1, reporter=Saboteur())
    assert "load_checkpoint" in error.value.details


@pytest.mark.parametrize(
    ("error", "option", "value"),
    [(ValueError, "workers", 0), (TypeError, "workers", 1.5), (ValueError, "checkpoint_seconds", -1.0)],
)
def test_bad_arguments_are_refused_before_anything_is_made(tmp_path, error, option, value):
    with pytest.raises(error, match=option):
        run_recall(small_experiment(), tmp_path / "output", **{option: value})
    assert not (tmp_path / "output").exists()


@pytest.mark.parametrize(
    ("device", "per_gpu", "count"), [("cpu", 8, usable_cores()), ("cuda", 8, 16), ("cuda", 1, 2), ("cuda:1", 8, 8)]
)
def test_how_many_train_at_the_same_time(monkeypatch, device, per_gpu, count):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert usual_workers(device, per_gpu) == count
