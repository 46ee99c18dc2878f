"""Several processes are one with the batch of all of them, sharded or not; and killed ones lose no bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from fastweights.distillation import DistillRun, distill
from fastweights.results.language import load_result
from fastweights.training.language import load_run

from ..training.language.launching import torchrun
from .runs import assert_same_bits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("signals_arrive")]

FILE = """
output = "{output}"
cache = "{folder}/cache"
teacher_dtype = "float32"
length = 32
batch_size = 1
accumulation = 2
max_steps = 6
learning_rate = 1e-3
log_every = 1
evaluate_every = 3
evaluation_rows = 7
checkpoint_every = 4
context_lengths = []
{settings}
[model]
path = "{folder}/student"
[corpus]
paths = ["{folder}/texts"]
held_out_fraction = 0.2
"""
OBJECTIVES = {
    "attention": 'objective = "attention"',
    "logits": 'hidden_weight = 0.1\ntext_weight = 0.1\ntrain = ["*.self_attn.*", "lm_head.*"]',
    "text": 'objective = "text"',
}


@pytest.fixture
def write(models, tmp_path):
    def make(name, settings):
        file = tmp_path / f"{name}.toml"
        file.write_text(FILE.format(output=tmp_path / name, folder=models, settings=settings))
        return file

    return make


def assert_same(file, alone_file, close=1e-6):
    run, alone = (load_run(one, kind=DistillRun) for one in (file, alone_file))
    found, wanted = (load_result(Path(one.output, "result.json")) for one in (run, alone))
    for name in ("losses", "held_out_losses", "held_out_objectives", "held_out_kls"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=close, atol=close)
    saved, whole = (load_file(Path(one.output, "model", "model.safetensors")) for one in (run, alone))
    for name, value in whole.items():
        torch.testing.assert_close(
            saved[name], value, rtol=10 * close, atol=10 * close
        )  # AdamW divides rounding by itself


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("sharded", [False, True], ids=["copied", "sharded"])
def test_two_processes_are_one_with_twice_the_batch(write, name, sharded):
    alone, file = write("alone", OBJECTIVES[name]), write("both", f"fsdp = {str(sharded).lower()}\n{OBJECTIVES[name]}")
    distill(load_run(alone, kind=DistillRun, batch_size=2))
    if sharded:
        torchrun(Path(__file__).with_name("sharded_on_cpu.py"), file)
    else:
        torchrun("-m", "fastweights", "distill", file, "--stop-at", 4)
        torchrun("-m", "fastweights", "distill", file)
    assert_same(file, alone)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_replayed_steps_train_a_shared_student(write, name):
    settings = OBJECTIVES[name]
    alone, file = write("alone", settings), write("both", f"fsdp = true\n{settings}")
    for one in (alone, file):
        one.write_text(one.read_text().replace("max_steps = 6", "max_steps = 10").replace("accumulation = 2\n", ""))
    distill(load_run(alone, kind=DistillRun, batch_size=2))
    torchrun(Path(__file__).with_name("sharded_on_cpu.py"), file, "replayed")
    assert_same(file, alone)


def test_a_shared_teacher_in_8_bits_computes_what_one_process_misses(write, tmp_path):
    """The teacher's blocks are gathered by all processes, also for rows that only one of them has not cached."""
    settings = f'cache_teacher = "{tmp_path}/teacher"\n{OBJECTIVES["logits"]}'
    alone, file = write("alone", settings), write("both", f"fsdp = true\n{settings}")
    for one in (alone, file):
        one.write_text(one.read_text().replace('"float32"', '"int8"'))
    distill(load_run(alone, kind=DistillRun, batch_size=2))
    rows = sorted((tmp_path / "teacher").rglob("*.safetensors"))
    assert len(rows) > 20
    for row in rows[::3]:
        row.unlink()
    torchrun(Path(__file__).with_name("sharded_on_cpu.py"), file)
    assert sorted((tmp_path / "teacher").rglob("*.safetensors")) == rows
    assert_same(file, alone, close=1e-3)  # in bfloat16 a row depends on those that it is computed with


@pytest.mark.parametrize("name", ["attention", "logits"])
def test_compiled_blocks(write, name):
    alone, file = write("alone", OBJECTIVES[name]), write("compiled", f'compile = "blocks"\n{OBJECTIVES[name]}')
    for one in (alone, file):
        distill(load_run(one, kind=DistillRun))
    assert_same(file, alone)


@pytest.mark.parametrize("name", ["attention", "logits"])
def test_killed_at_random_moments(write, tmp_path, name):
    more = f'max_steps = 30\n{OBJECTIVES[name]}\ncache_teacher = "{tmp_path}/{{}}-teacher"'
    files = [write(one, more.format(one)) for one in ("cut", "whole")]
    for file in files:
        file.write_text(file.read_text().replace("max_steps = 6\n", ""))
    cut, whole = (load_run(file, kind=DistillRun) for file in files)
    draw, command = random.Random(0), [sys.executable, "-m", "fastweights", "distill", str(files[0]), "--quiet"]
    for number in (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL):
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        wanted, until = points(cut) + draw.randint(1, 6), time.monotonic() + 300
        while process.poll() is None and points(cut) < wanted:
            assert time.monotonic() < until
            time.sleep(0.005)
        process.send_signal(number)
        process.wait(timeout=60)
    distill(cut)
    distill(whole)
    assert_same_bits(cut, whole, step=30)


def points(run):
    log = Path(run.output, "log.jsonl")
    return log.read_text().count("\n") if log.exists() else 0
