"""`fastweights train` by two launchers of torchrun, as on two hosts."""

import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
import torch

from fastweights.files import damage
from fastweights.training.checkpoints import checkpoints_in
from fastweights.training.language import load_run, train_language

from .launching import ROOT, RUN, launch_hosts
from .small import log, losses

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals_arrive")]
COMMAND = ("-m", "fastweights", "train")


@pytest.fixture
def hosts(tmp_path):
    folders = [tmp_path / "host-0", tmp_path / "host-1"]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.fixture
def run_file(prepared, tmp_path):
    """A run whose cache each host has for itself."""
    file = tmp_path / "run.toml"
    places = {"output": tmp_path / "out", "cache": "cache", "texts": prepared / "texts"}
    file.write_text(RUN.format(**{name: f'"{path}"' for name, path in places.items()}))
    return file


def ranks(launchers):
    """The processes of a training, by their ranks."""
    children = [child for launcher in launchers for child in psutil.Process(launcher.pid).children(recursive=True)]
    return {int(child.environ()["RANK"]): child for child in children if "RANK" in child.environ()}


def wait_for_points(run, launchers, count):
    until = time.monotonic() + 180
    while not Path(run.output, "log.jsonl").exists() or len(log(run)) < count:
        assert all(launcher.poll() is None for launcher in launchers) and time.monotonic() < until
        time.sleep(0.01)


def errors_of(hosts):
    return [(host / "errors").read_text() for host in hosts]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_ends_both_hosts(run_file, hosts, tmp_path, number):
    text = (
        run_file.read_text().replace("max_steps = 6", "max_steps = 100").replace("accumulation = 2", "accumulation = 1")
    )
    run_file.write_text(text)
    run = load_run(run_file)
    launchers = launch_hosts(hosts, *COMMAND, run_file, processes=2)
    wait_for_points(run, launchers, 7)
    processes = ranks(launchers)
    processes[1].send_signal(number)
    gone, alive = psutil.wait_procs([processes[rank] for rank in (0, 2, 3)], timeout=60)
    assert len(gone) == 3 and not alive
    assert all(launcher.wait(60) != 0 for launcher in launchers)
    for errors in errors_of(hosts):
        assert errors.count("fastweights: error: rank 1 (") == errors.count("fastweights: error: ") == 1
    latest = checkpoints_in(Path(run.output, "checkpoints"))[-1]
    assert damage(latest) is None
    if number == signal.SIGSTOP:
        return
    options = ("--stop-at", int(latest.name.removeprefix("checkpoint-")) + 4)
    launchers = launch_hosts(hosts, *COMMAND, run_file, *options, processes=2)
    assert [launcher.wait(180) for launcher in launchers] == [0, 0], errors_of(hosts)
    alone = load_run(run_file, output=str(tmp_path / "alone"), cache=str(tmp_path / "cache"), batch_size=4)
    train_language(alone, stop_at=options[1])
    torch.testing.assert_close(losses(run), losses(alone), rtol=1e-5, atol=1e-5)


def test_other_code_on_one_host(run_file, hosts, tmp_path):
    for number in range(2):
        shutil.copytree(ROOT / "fastweights", tmp_path / f"code-{number}" / "fastweights")
    with open(tmp_path / "code-1" / "fastweights" / "layers" / "__init__.py", "a") as file:
        file.write("\n# changed\n")
    paths = [
        {
            "PYTHONPATH": os.pathsep.join(
                [str(tmp_path / f"code-{number}"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
            )
        }
        for number in range(2)
    ]
    launchers = launch_hosts(hosts, *COMMAND, run_file, environments=paths)
    assert all(launcher.wait(180) != 0 for launcher in launchers)
    for errors in errors_of(hosts):
        assert errors.count("fastweights: error: every process must run the same code") == 1
        assert "but the code of fastweights is" in errors and "on rank 0 (" in errors and "on rank 1 (" in errors
    assert not (tmp_path / "out").exists()


def test_a_run_file_that_is_on_one_host_only(run_file, hosts):
    shutil.copy(run_file, hosts[0] / "run.toml")
    launchers = launch_hosts(hosts, *COMMAND, "run.toml", processes=2)
    assert all(launcher.wait(180) != 0 for launcher in launchers)
    for errors in errors_of(hosts):
        assert errors.count("fastweights: error: ") == 1
        assert "error: rank 2 (" in errors and "run.toml" in errors
