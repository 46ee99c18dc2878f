"""Several processes through torchrun: the same losses as one process with the batch of all of them."""

import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.results.language import load_result
from fastweights.training.language import load_run, train_language

from .small import log

ROOT = Path(__file__).parents[3]

RUN = """
output = {output}
cache = {cache}
batch_size = 1
accumulation = 2
length = 32
max_steps = 6
learning_rate = 1e-2
log_every = 1
evaluate_every = 3
evaluation_rows = 7
checkpoint_every = 4
context_lengths = [16]
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
mixer = "gdn"
[tokenizer]
vocab_size = 300
[corpus]
paths = [{texts}]
held_out_fraction = 0.2
"""


def torchrun(*command, succeeds=True):
    """Standard error of a command in two processes."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        errors = process.communicate(timeout=180)[1]
    finally:
        process.terminate()  # torchrun then ends its processes
        process.wait()
    assert (process.returncode == 0) == succeeds, errors
    return errors


@pytest.fixture
def run_file(prepared, tmp_path):
    places = {"output": tmp_path / "out", "cache": prepared / "cache", "texts": prepared / "texts"}
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(**{name: f'"{path}"' for name, path in places.items()}))
    return file


@pytest.fixture
def alone(run_file, tmp_path):
    """The run in one process, with the batch of two."""
    run = load_run(run_file, output=str(tmp_path / "alone"), batch_size=2)
    return train_language(run)[0]


def assert_same_losses(result, expected):
    torch.testing.assert_close(result.losses, expected.losses, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(result.held_out_losses, expected.held_out_losses, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_processes_are_one_with_twice_the_batch(run_file, alone):
    assert "stopped after step 4" in torchrun("-m", "fastweights", "train", run_file, "--stop-at", 4)
    result = train_language(load_run(run_file, batch_size=2))[0]  # one process continues the training of two
    assert_same_losses(result, alone)
    assert log(load_run(run_file))[-1]["tokens"] == alone.tokens


@pytest.mark.slow
def test_every_process_is_told_of_a_folder_that_is_refused(run_file, tmp_path):
    (tmp_path / "out").mkdir()
    with filelock.FileLock(tmp_path / "out" / ".lock"):
        errors = torchrun("-m", "fastweights", "train", run_file, succeeds=False)
    assert errors.count("fastweights: error: output") == 2
    assert "is in use by another process" in errors and "gloo" not in errors.lower()


@pytest.mark.slow
def test_sharded_processes_are_one_with_twice_the_batch(run_file, alone):
    run_file.write_text("fsdp = true\n" + run_file.read_text())
    run = load_run(run_file)
    torchrun(Path(__file__).with_name("fsdp_on_cpu.py"), run_file, 4)
    assert_same_losses(load_result(Path(run.output, "result.json")), alone)
    saved, whole = (AutoModelForCausalLM.from_pretrained(Path(f, "model")) for f in (run.output, alone.folder + "/.."))
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(saved.state_dict()[name], value, rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="fsdp is true there and false here"):
        train_language(load_run(run_file, fsdp=False, batch_size=2))


def test_sharding_needs_gpus(run_file):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(ValueError, match="fsdp needs several processes with a GPU each, got 1"):
        train_language(load_run(run_file, fsdp=True))
