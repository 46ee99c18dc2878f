"""The grid on worker processes: the same numbers as one run after the other, and a clear end when a worker dies."""

import multiprocessing
import os
import signal

import pytest

from fastweights.analysis import load_results
from fastweights.training import WorkerError, run_recall, train_run
from fastweights.training.progress import Silent

from .small import numbers, small_experiment


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
def test_a_killed_worker_is_reported_and_the_call_can_be_repeated(tmp_path):
    class Killer(Silent):
        def step(self, worker, run, step, loss, speed):
            for process in multiprocessing.active_children():
                os.kill(process.pid, signal.SIGKILL)

    experiment = small_experiment(steps=100)
    (run,) = experiment.runs()
    with pytest.raises(WorkerError, match=r"linear-pairs2-lr0.01-seed0 was killed by signal 9"):
        run_recall(experiment, tmp_path / "output", workers=1, checkpoint_seconds=0, reporter=Killer())
    assert not (tmp_path / "output" / "results.json").exists()
    (saved,) = (tmp_path / "output").rglob("*.checkpoint")
    assert numbers(train_run(run, saved)) == numbers(train_run(run, tmp_path / "whole.checkpoint"))


@pytest.mark.slow
def test_an_error_in_a_worker_arrives_with_its_traceback(tmp_path):
    experiment = small_experiment()
    (tmp_path / "output").mkdir()

    class Saboteur(Silent):
        def begin(self, pending, *, total):  # a folder where the result should go
            (tmp_path / "output" / "runs" / f"{pending[0].name}.json" / "in the way").mkdir(parents=True)

    with pytest.raises(WorkerError, match="linear-pairs2-lr0.01-seed0 failed: IsADirectoryError") as error:
        run_recall(experiment, tmp_path / "output", workers=1, reporter=Saboteur())
    assert "save_result" in error.value.details


@pytest.mark.parametrize(
    ("error", "option", "value"),
    [(ValueError, "workers", 0), (TypeError, "workers", 1.5), (ValueError, "checkpoint_seconds", -1.0)],
)
def test_bad_arguments_are_refused_before_anything_is_made(tmp_path, error, option, value):
    with pytest.raises(error, match=option):
        run_recall(small_experiment(), tmp_path / "output", **{option: value})
    assert not (tmp_path / "output").exists()
