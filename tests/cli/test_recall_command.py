"""`fastweights recall` from outside: killed, interrupted, continued, and what it leaves behind."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from fastweights.cli import main
from fastweights.results.recall import save_result
from fastweights.training import RecallExperiment, train_run

from ..full_disk import largest_file

pytestmark = pytest.mark.usefixtures("signals_arrive")

SETTINGS = {
    "mixers": ("linear", "deltanet"),
    "task": "mqar-shuffled",
    "pairs": (2,),
    "vocab_size": 16,
    "width": 8,
    "heads": 2,
    "layers": 1,
    "steps": 60,
    "batch_size": 4,
    "learning_rates": (0.003, 0.01),
    "test_examples": 16,
    "validation_examples": 8,
}
RUNS = 4
STOPPED = "fastweights: error: {}; the same command continues where it stopped"


def command(output: Path, **changes) -> list[str]:
    options = {**SETTINGS, "output": output, "workers": 1, "checkpoint_seconds": 0.02, **changes}
    texts = {
        f"--{name.replace('_', '-')}": ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        for name, value in options.items()
    }
    return ["recall", *[word for pair in texts.items() for word in pair]]


def start(arguments: list[str]) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "fastweights", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # one process group, so that all of it can be killed at once
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def wait_until(condition: Callable[[], object], process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Accuracy and loss curves of the same experiment, run after run in this process. The command is in the matched block."""
    folder, threads = tmp_path_factory.mktemp("uninterrupted"), torch.get_num_threads()
    experiment = RecallExperiment(block="matched", **SETTINGS)
    torch.set_num_threads(1)
    yield [numbers(vars(train_run(run, folder / run.name))) for run in experiment.runs()]
    torch.set_num_threads(threads)


def numbers(run: dict) -> dict:
    names = ("run", "status", "accuracy", "accuracies", "accuracy_steps", "losses", "loss_steps", "undertrained")
    return {name: run[name] for name in names}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """Output folder, table and progress of a command whose runs are trained in this process."""

    def train_jobs(jobs, *others):
        for job in jobs:
            if not job.has_ended():
                save_result(job.folder.result(job.run), train_run(job.run, job.folder.checkpoint(job.run)))

    output = tmp_path_factory.mktemp("finished") / "output"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastweights.training.recall.run.train_jobs", train_jobs)
        return output, *finish(output)


@pytest.fixture(scope="module")
def killed_and_continued(tmp_path_factory):
    """The same of a command whose own process was killed, and that was then given again."""
    output = tmp_path_factory.mktemp("killed") / "output"
    process = start(command(output))
    # one run has ended, and another has been saved in its middle
    wait_until(lambda: list(output.glob("runs/*.json")) and list(output.glob("runs/*.checkpoint")), process)
    end(process, signal.SIGKILL)
    process.communicate()
    assert len(list(output.glob("runs/*.json"))) < RUNS
    assert not (output / "results.json").exists()
    return output, *finish(output)


def finish(output: Path) -> tuple[str, str]:
    printed, errors = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(errors):
        code = main(command(output))
    assert code == 0, errors.getvalue()
    return printed.getvalue(), errors.getvalue()


def end(process: subprocess.Popen, number: int) -> None:
    """Send the command's own process a signal, and see its workers end too."""
    workers = psutil.Process(process.pid).children(recursive=True)
    assert workers
    process.send_signal(number)
    left = psutil.wait_procs(workers, timeout=60)[1]
    assert not left
    assert not list(Path(process.args[process.args.index("--output") + 1]).glob("runs/.*.partial"))


@pytest.mark.slow
def test_a_preempted_command_says_so(tmp_path):
    output = tmp_path / "output"
    process = start(command(output))
    wait_until(lambda: list(output.glob("runs/*.checkpoint")), process)
    end(process, signal.SIGTERM)
    errors = process.communicate()[1]
    assert process.returncode == 143
    assert errors.splitlines()[-1] == STOPPED.format("stopped by SIGTERM") and "Traceback" not in errors


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_kills_at_random_moments(tmp_path, uninterrupted, group):
    """To the command's own process, or to all its processes as from a cluster or a closed terminal."""
    draw, output = random.Random(group), tmp_path / "output"
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM):
        process = start(command(output, checkpoint_seconds=0.3, workers=2))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(draw.uniform(2, 12))
        if process.poll() is None:
            workers = psutil.Process(process.pid).children(recursive=True)
            (os.killpg if group else os.kill)(process.pid, number)
            assert not psutil.wait_procs(workers, timeout=60)[1]
        process.communicate()
        assert process.returncode in (0, 128 + number, -number)
    assert main(command(output, checkpoint_seconds=0.3, workers=2)) == 0
    runs = json.loads((output / "results.json").read_text())["runs"]
    assert [numbers(run) for run in runs] == uninterrupted


@pytest.mark.slow
def test_a_killed_command_continues_with_the_same_numbers(killed_and_continued, uninterrupted):
    output, _, _ = killed_and_continued
    runs = json.loads((output / "results.json").read_text())["runs"]
    assert [numbers(run) for run in runs] == uninterrupted


@pytest.mark.slow
def test_finished_runs_are_not_repeated(killed_and_continued):
    _, _, errors = killed_and_continued
    first_line = errors.splitlines()[0]
    left, total = int(first_line.split()[0]), int(first_line.split()[2])
    assert total == RUNS and 0 < left < RUNS
    assert f"[{RUNS}/{RUNS}]" in errors


def test_results_hold_configuration_versions_machine_times_and_sizes(finished):
    output, _, _ = finished
    results = json.loads((output / "results.json").read_text())
    assert set(results) == {"format", "experiment", "summary", "runs"}
    assert results["experiment"]["learning_rates"] == [0.003, 0.01]
    assert len(results["runs"]) == RUNS
    for run in results["runs"]:
        assert set(run["versions"]) == {"fastweights", "python", "torch", "transformers", "numpy"}
        assert run["machine"]["cores"] >= 1 and run["machine"]["cpu"]
        assert run["wall_seconds"] > 0 and run["cpu_seconds"] > 0
        assert run["parameters"] > 100 and run["state_size"] == 2 * 4 * 4
        assert run["run"]["weight_decay"] >= 0 and run["run"]["steps"] == 60
        assert 0 <= run["accuracy"] <= 1
    assert [(row["mixer"], row["pairs"]) for row in results["summary"]] == [
        (mixer, pairs) for mixer in SETTINGS["mixers"] for pairs in SETTINGS["pairs"]
    ]
    for row in results["summary"]:
        own = [
            run for run in results["runs"] if (run["run"]["mixer"], run["run"]["pairs"]) == (row["mixer"], row["pairs"])
        ]
        chosen = max(own, key=lambda run: (run["accuracies"][-1], -run["losses"][-1]))  # on validation sequences
        assert (row["accuracy"], row["learning_rate"]) == (chosen["accuracy"], chosen["run"]["learning_rate"])


def test_the_table_and_the_plots(finished):
    output, printed, _ = finished
    for word in ("linear", "deltanet", "accuracy", "results.json", "matched block"):
        assert word in " ".join(printed.split())
    for name in ("accuracy-by-pairs.png", "accuracy-by-state-size.png", "loss-curves.png"):
        content = (output / name).read_bytes()
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
        assert width > 900 and height > 500
        assert name in printed


def test_the_command_given_again_shows_the_results_at_once(finished, capsys):
    output, _, _ = finished
    before = (output / "results.json").read_bytes()
    assert main(command(output)) == 0
    printed = capsys.readouterr()
    assert "deltanet" in printed.out and printed.err == ""
    assert (output / "results.json").read_bytes() == before


def test_another_configuration_is_refused_and_nothing_overwritten(finished, capsys):
    output, _, _ = finished
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert main(command(output, steps=61)) == 2
    error = capsys.readouterr().err
    assert "steps is 60 there and 61 here" in error and error.count("\n") == 1
    assert main([*command(output), "--block", "published"]) == 2
    assert 'block is "matched" there and not set here' in capsys.readouterr().err
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_ctrl_c_stops_cleanly_and_a_damaged_checkpoint_is_then_reported(tmp_path, capsys):
    output = tmp_path / "output"
    arguments = command(output, steps=400, mixers=("linear",), learning_rates=(0.01,))
    process = start(arguments)
    wait_until(lambda: list(output.glob("runs/*.checkpoint")), process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines()[-1] == STOPPED.format("stopped")
    assert "Traceback" not in errors

    (saved,) = output.glob("runs/*.checkpoint")
    saved.write_bytes(saved.read_bytes()[:-10])
    assert main(arguments) == 0
    assert f"its checkpoint {saved} is damaged, so this run begins again" in capsys.readouterr().err


@pytest.mark.slow
def test_a_full_disk_while_it_trains_is_one_line(tmp_path, capsys, monkeypatch):
    # A spawned worker inherits the limit; one of an earlier test's server would not.
    monkeypatch.setattr("fastweights.training.pool._context", lambda _: multiprocessing.get_context("spawn"))
    with largest_file(6000):  # of the checkpoints
        assert main(command(tmp_path / "output", checkpoint_seconds=0)) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert ".checkpoint could not be written to " in error and "File too large; the same command continues" in error
    left = [path.name for path in (tmp_path / "output" / "runs").iterdir()]
    assert left == []


def test_a_full_disk_is_one_line(tmp_path, capsys):
    with largest_file(100):  # of anything
        assert main(command(tmp_path / "other")) == 1
    printed = capsys.readouterr().err
    assert f"experiment.json could not be written to {tmp_path / 'other'}: File too large" in printed
    assert printed.count("\n") == 1


def test_without_matplotlib_the_results_are_there_all_the_same(finished, capsys, monkeypatch):
    output, _, _ = finished
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(command(output)) == 0
    assert "fastweights[viz]" in capsys.readouterr().err


@pytest.mark.slow
def test_variants_of_a_mixer_are_compared_under_their_labels(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # no label wraps
    mixers = ("linear", "linear:conv_size=2,expand_v=2", "linear:conv_size=null@short")
    arguments = command(tmp_path / "output", mixers=mixers, learning_rates=(0.01,), steps=3)
    assert main(arguments) == 0
    printed = capsys.readouterr()
    saved = json.loads((tmp_path / "output" / "results.json").read_text())
    assert [row["mixer"] for row in saved["summary"]] == ["linear", "linear:conv_size=2,expand_v=2", "short"]
    sizes = {row["mixer"]: (row["state_size"], row["parameters"]) for row in saved["summary"]}
    assert sizes["linear:conv_size=2,expand_v=2"][0] == 2 * sizes["linear"][0]  # the options reached the layer
    assert sizes["short"][1] == sizes["linear"][1] - 3 * 8 * 4
    for label in sizes:
        assert f"{label}, 2 pairs" in printed.err and label in printed.out
    assert main(arguments) == 0  # continues: nothing is trained again
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_run_file_with_parts_and_a_curriculum(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text(
        f"output = '{tmp_path / 'out'}'\nvocab_size = 16\nwidth = 8\nheads = 2\nbatch_size = 4\ntest_examples = 8\n"
        "learning_rates = [0.01]\nworkers = 1\nmixers = ['linear', {name = 'gdn', options = {conv_size = 2}, label = 'small'}]\n"
        "[parts.plain]\npairs = [2]\nsteps = 9\n"
        "[[parts.stages.curriculum]]\npairs = 2\nsteps = 3\n[[parts.stages.curriculum]]\npairs = 3\nsteps = 4\n"
    )
    assert main(["recall", str(file), "--test-examples", "6"]) == 0
    printed = capsys.readouterr().out
    assert (
        "Part plain" in printed and "Part stages" in printed and "Accuracy by stage" in printed and "small" in printed
    )
    for part, steps in (("plain", 9), ("stages", 7)):
        runs = json.loads((tmp_path / "out" / part / "results.json").read_text())["runs"]
        assert {(run["run"]["steps"], run["run"]["test_examples"], run["stopped_at"]) for run in runs} == {
            (steps, 6, steps)
        }
    assert main(["recall", str(file), "--test-examples", "6", "--steps", "8"]) == 2
    assert "part stages: steps must be left out with a curriculum" in capsys.readouterr().err


def test_a_bad_run_file_is_one_line(tmp_path, capsys):
    file = tmp_path / "run.toml"
    file.write_text("pairz = 3")
    assert main(["recall", str(file)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "no key 'pairz'" in lines[0] and "did you mean 'pairs'" in lines[0]
    assert list(tmp_path.iterdir()) == [file]
