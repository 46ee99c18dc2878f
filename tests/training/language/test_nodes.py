"""Processes on several hosts: what they must share, that they are compared, and that none outlives another."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language import agreement, heartbeat, texts, train_language
from fastweights.training.language.joining import joined
from fastweights.training.language.processes import on_every_process

from .launching import fork
from .small import losses, small_run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a forked process cannot use the GPU of its parent")


@pytest.fixture
def hosts(tmp_path, monkeypatch):
    """A folder for each of two hosts, which is the current one there. Files of others are looked for shortly."""
    for module in (agreement, texts):
        monkeypatch.setattr(module, "SEEN_SECONDS", 0.2)
    folders = [tmp_path / f"host-{number}" for number in range(3)]
    for folder in folders:
        folder.mkdir()
    return folders


@pytest.mark.slow
def test_hosts_with_caches_of_their_own_train_as_one_process(hosts, tmp_path):
    def changes(output, cache):
        return {"output": str(tmp_path / output), "cache": cache, "max_steps": 3, "context_lengths": ()}

    def work(rank):
        os.chdir(hosts[rank])
        train_language(small_run(tmp_path, **changes("several", "cache"), batch_size=1))

    small_run(tmp_path)  # writes the texts
    assert [process.code() for process in fork(work, tmp_path)] == [0, 0]
    run = small_run(tmp_path, **changes("one", str(tmp_path / "cache")))
    train_language(run)
    torch.testing.assert_close(
        losses(small_run(tmp_path, **changes("several", "cache"))), losses(run), rtol=1e-5, atol=1e-5
    )
    for folder in hosts[:2]:
        assert any(folder.glob("cache/tokens-*/*"))


def refused(work, folder, size=2):
    """The last lines of processes that all raise a ValueError."""
    processes = fork(work, folder, size)
    assert [process.code() for process in processes] == [1] * size
    lines = [process.errors.read_text().splitlines()[-1] for process in processes]
    assert all(line.startswith("ValueError: ") for line in lines)
    return lines


def test_an_output_that_hosts_do_not_share(prepared, hosts, tmp_path):
    def work(rank):
        os.chdir(hosts[rank])
        train_language(small_run(prepared, output="out"))

    for line in refused(work, tmp_path):
        assert "writes into out is not there for rank 1 (" in line and "file system that all hosts share" in line
    assert not any(hosts[0].glob("out/*")) and not Path(hosts[1], "out").exists()


def test_other_settings(make_run, tmp_path):
    def work(rank):
        train_language(make_run(learning_rate=0.5 if rank == 1 else 0.25, cache=make_run().cache + "/" * rank))

    for line in refused(work, tmp_path, 3):
        assert "must have the same settings, but learning_rate is 0.25 on ranks 0, 2 (" in line
        assert " and 0.5 on rank 1 (" in line and "cache" not in line
    assert not (tmp_path / "out").exists()


def test_other_variables(make_run, tmp_path):
    def work(rank):
        os.environ.update({"FASTWEIGHTS_LAUNCH": "plain"} if rank else {})
        train_language(make_run())

    for line in refused(work, tmp_path):
        assert "FASTWEIGHTS_LAUNCH is not there on rank 0" in line and '"plain" on rank 1' in line


def test_other_text(hosts, tmp_path):
    def work(rank):
        os.chdir(hosts[rank])
        (hosts[rank] / "texts").mkdir()
        for name in ("a", "b", "c"):
            (hosts[rank] / "texts" / f"{name}.txt").write_text("the cat sat on a mat. " * (20 + rank))
        run = small_run(tmp_path)
        train_language(small_run(tmp_path, cache="cache", corpus=type(run.corpus)(paths=("texts",))))

    for line in refused(work, tmp_path):
        assert "must have the same text and tokenizer, but text.0.corpus_text is" in line and "rank 1 (" in line


def test_another_model_to_continue_from(make_run, hosts, tmp_path):
    def work(rank):
        os.chdir(hosts[rank])
        torch.manual_seed(rank)
        FastWeightsForCausalLM(FastWeightsConfig(**make_run().model, vocab_size=300)).save_pretrained("model")
        train_language(make_run(model={"path": "model"}))

    for line in refused(work, tmp_path):
        assert "must continue from the same model, but the model model is" in line and "rank 1 (" in line


def test_a_refusal_of_one_process_is_that_of_all(tmp_path):
    def check(rank):
        if rank == 1:
            raise ValueError("the text is not here")

    def work(rank):
        with joined():
            on_every_process(lambda: check(rank))

    for line in refused(work, tmp_path, 3):
        assert line.startswith("ValueError: rank 1 (") and line.endswith("): the text is not here")


def wait_until_joined(processes, folder):
    until = time.monotonic() + 60
    while len(list(folder.glob("joined-*"))) < len(processes):
        assert time.monotonic() < until, [process.errors.read_text() for process in processes]
        time.sleep(0.01)


@pytest.mark.slow
def test_rank_0_keeps_its_store_until_the_others_have_left(tmp_path, monkeypatch):
    """Here they look into the store a second after rank 0 has done its work."""
    monkeypatch.setattr("fastweights.training.language.processes.POLL_SECONDS", 1.5)

    def work(rank):
        with joined():
            time.sleep(0.5 if rank == 0 else 0)

    processes = fork(work, tmp_path, 3)
    assert [process.code() for process in processes] == [0, 0, 0], [process.errors.read_text() for process in processes]


@pytest.mark.parametrize(
    ("number", "rank"),
    [
        (signal.SIGKILL, 1),
        pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.slow),
        pytest.param(signal.SIGSTOP, 1, marks=pytest.mark.slow),
    ],
)
def test_a_process_that_dies_or_stops_ends_the_others(tmp_path, monkeypatch, number, rank):
    for name, seconds in (("BEAT", 0.1), ("GRACE", 0.1)):
        monkeypatch.setattr(heartbeat, f"{name}_SECONDS", seconds)
    if number == signal.SIGSTOP:  # one that is killed is missed at once
        monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 3.0)

    def work(rank):
        with joined():
            (tmp_path / f"joined-{rank}").touch()
            time.sleep(600)

    processes = fork(work, tmp_path, 3)
    wait_until_joined(processes, tmp_path)
    if number == signal.SIGSTOP:
        time.sleep(4.5)  # the main threads do nothing, and yet all are alive
    os.kill(processes[rank].pid, number)
    for other in range(3):
        if other != rank:
            assert processes[other].code(8) == 1
            (line,) = processes[other].errors.read_text().splitlines()
            assert line.startswith(f"fastweights: error: rank {rank} (") and "the same command continues" in line
            assert (
                "has ended without a message" if number == signal.SIGKILL else "has not answered for 3 seconds"
            ) in line
    if number == signal.SIGSTOP:
        os.kill(processes[rank].pid, signal.SIGKILL)
    assert processes[rank].code() == -signal.SIGKILL


@pytest.mark.slow
def test_processes_that_are_stopped_together_go_on(tmp_path, monkeypatch):
    """As by Ctrl-Z and fg."""
    monkeypatch.setattr(heartbeat, "SILENT_SECONDS", 3.0)

    def work(rank):
        with joined():
            (tmp_path / f"joined-{rank}").touch()
            while not (tmp_path / "done").exists():
                time.sleep(0.01)

    processes = fork(work, tmp_path, 3)
    wait_until_joined(processes, tmp_path)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for process in processes:
            os.kill(process.pid, number)
        time.sleep(5)
    (tmp_path / "done").touch()
    assert [process.code() for process in processes] == [0, 0, 0]


def test_an_error_of_one_process_ends_the_others(tmp_path, monkeypatch):
    for name in ("GRACE", "SAME"):
        monkeypatch.setattr(heartbeat, f"{name}_SECONDS", 0.5)

    def work(rank):
        with joined():
            if rank == 1:
                raise RuntimeError("the GPU is gone")
            time.sleep(600)

    processes = fork(work, tmp_path, 3)
    assert [process.code() for process in processes] == [1, 1, 1]
    errors = [process.errors.read_text() for process in processes]
    assert "Traceback" in errors[1]
    for other in (0, 2):
        assert (
            "error: ended, as rank 1 (" in errors[other]
            and "has failed: RuntimeError('the GPU is gone')" in errors[other]
        )
