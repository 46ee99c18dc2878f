"""Every training says how many processes train, and a launcher that started fewer than it should is an error."""

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.training.language import processes, train_language
from fastweights.training.language.processes import check_launch, step_size

from .launching import free_port
from .small import small_run

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({}, None),
        ({"WORLD_SIZE": "1"}, None),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}, None),
        ({"ACCELERATE_MIXED_PRECISION": "no"}, None),
        ({"MASTER_ADDR": "node-1"}, None),
        (
            {"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1"},
            "accelerate launch was given --num_processes",
        ),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK and LOCAL_RANK are not set.*torchrun --nproc-per-node"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "1"},
            "must be started with --max-restarts 0.*give the command itself again",
        ),
        ({"WORLD_SIZE": "2", "RANK": "1"}, "WORLD_SIZE is 2, but LOCAL_RANK are not set"),
    ],
)
def test_launchers(environment, words):
    if words is None:
        check_launch(environment)
    else:
        with pytest.raises(ValueError, match=words):
            check_launch(environment)


def test_the_check_comes_first(make_run, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    run = make_run()
    with pytest.raises(ValueError, match="WORLD_SIZE is 2"):
        train_language(run)
    assert not Path(run.output).exists()


@pytest.mark.slow
def test_processes_that_cannot_find_each_other(make_run, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    run = make_run()
    with pytest.raises(ValueError, match="MASTER_ADDR and MASTER_PORT are not set.*to the host of rank 0"):
        train_language(run)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.setattr(processes, "JOIN_SECONDS", 1.0)
    with pytest.raises(ValueError, match="2 processes must meet at 127.0.0.1:.* within 1 seconds"):
        train_language(run)
    assert not Path(run.output).exists()


def test_what_a_step_reads(tmp_path, monkeypatch):
    run = small_run(tmp_path, length=1024, batch_size=8, accumulation=1)
    assert step_size(run) == "1 process x 8 rows x 1 pass x 1,024 tokens = 8,192 tokens per step"
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert step_size(run).startswith("4 processes x 8 rows x 1 pass x 1,024 tokens = 32,768 tokens")
    two = dataclasses.replace(run, context_parallel=2)
    assert step_size(two).startswith("4 processes in 2 context groups x 8 rows x 1 pass x 1,024 tokens = 16,384 tokens")


@pytest.mark.slow
@pytest.mark.parametrize("device", [[], ["--cpu"]])
def test_accelerate_launch_that_starts_one_process_for_two(tmp_path, device):
    """What accelerate does without several GPUs."""
    (tmp_path / "run.toml").write_text("length = 32\n")
    options = [
        *device,
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
    ]
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, "-m", "fastweights", "train"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path)}
    environment = {name: value for name, value in environment.items() if name != "MASTER_ADDR"}
    ended = subprocess.run(
        [*command, str(tmp_path / "run.toml")], capture_output=True, text=True, cwd=ROOT, env=environment, timeout=180
    )
    assert ended.returncode != 0
    assert re.search("fastweights: error: accelerate launch was given --num_processes above 1", ended.stderr)
