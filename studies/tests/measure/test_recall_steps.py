"""Steps of recall in processes that share a device."""

import queue
import threading

from fastweights_studies.leaderboard import SIZES
from fastweights_studies.measure import recall_steps

from studies.tests.leaderboard.toy import TOY


def test_a_process_times_steps_of_the_leaderboards_recall_after_all_are_ready(monkeypatch):
    monkeypatch.setitem(SIZES, "full", TOY)
    run = recall_steps.recall_run("mamba2", 7, "cpu")
    assert run.choice.options["long_memory"] == "windows" and [stage.pairs for stage in run.mixture] == [2, 3]
    assert (run.steps, run.stop_at, run.task) == (7, None, "mqar-shuffled")
    ready, found = threading.Barrier(1), queue.SimpleQueue()
    recall_steps.time_one(0, "linear", 3, "cpu", ready, found)
    assert 0 < found.get() < 60_000
