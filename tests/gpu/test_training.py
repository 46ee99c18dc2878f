"""Training of a language model on several GPUs: the same losses as on one with the batch of all of them, and no process outlives
another. On one in half precision."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("several GPUs")]
several = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
ROOT = Path(__file__).parents[2]
RUN = """
output = "{output}"
cache = "{cache}"
precision = "{precision}"
compile = {compile}
fsdp = {fsdp}
batch_size = {batch_size}
accumulation = {accumulation}
graphs = {graphs}
length = 256
max_steps = {max_steps}
learning_rate = 2e-3
log_every = 5
evaluation_rows = 16
checkpoint_every = 15
context_lengths = []
[model]
hidden_size = 128
num_hidden_layers = 3
num_heads = 2
mixer = {mixers}
tie_word_embeddings = true
[tokenizer]
vocab_size = 1024
[corpus]
max_megabytes = 4
"""


def command(
    folder: Path,
    name: str,
    gpus: int,
    *options: str,
    precision: str = "no",
    fsdp: bool = False,
    compiled: str = "false",
    graphs: bool = False,
    accumulation: int = 1,
    mixers: tuple[str, ...] = ("gdn", "softmax", "gka"),
    max_steps: int = 30,
) -> list[str]:
    """Of a run of a batch of 8 rows in all, in one process per GPU."""
    file = folder / f"{name}.toml"
    fields = {
        "precision": precision,
        "compile": compiled,
        "fsdp": str(fsdp).lower(),
        "batch_size": 8 // gpus // accumulation,
        "max_steps": max_steps,
    }
    fields |= {"graphs": str(graphs).lower(), "accumulation": accumulation, "mixers": json.dumps(mixers)}
    file.write_text(RUN.format(output=folder / name, cache=folder / "tokens", **fields))
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={gpus}"]
    return [sys.executable, *launch, "-m", "fastweights", "train", str(file), *options]


def points(folder: Path, name: str) -> list[dict[str, Any]]:
    """What a run has logged."""
    log = folder / name / "log.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def train(folder: Path, name: str, gpus: int, *options: str, **how: Any) -> list[float]:
    """The losses of a run. A start takes far longer with torch.compile."""
    begun = command(folder, name, gpus, *options, **how)
    result = subprocess.run(begun, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return [point.get("loss", point.get("held_out_loss")) for point in points(folder, name)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("several")


@pytest.fixture(scope="module")
def alone(folder: Path) -> torch.Tensor:
    return torch.tensor(train(folder, "alone", 1))


@several
@pytest.mark.parametrize("fsdp", [False, True], ids=["copied", "sharded"])
def test_two_gpus_are_one_with_twice_the_batch(folder: Path, alone: torch.Tensor, fsdp: bool) -> None:
    name, how = f"two-{fsdp}", {"fsdp": fsdp, "compiled": "false" if fsdp else '"blocks"'}
    train(folder, name, 2, "--stop-at", "20", **how)
    torch.testing.assert_close(torch.tensor(train(folder, name, 2, **how)), alone, rtol=1e-3, atol=0)


@several
def test_sharded_bfloat16(folder: Path, alone: torch.Tensor) -> None:
    losses = train(folder, "bf16", 2, precision="bf16", fsdp=True, compiled='"blocks"')
    torch.testing.assert_close(torch.tensor(losses), alone, rtol=2e-2, atol=0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_half_precision(folder: Path, alone: torch.Tensor) -> None:
    """The loss scale begins too large, and the first steps are skipped."""
    losses = train(folder, "fp16", 1, precision="fp16", compiled='"blocks"')
    assert losses[-1] < losses[0] - 0.5


@several
@pytest.mark.parametrize(
    ("fsdp", "accumulation"), [(False, 1), (False, 2), (True, 1)], ids=["copied", "copied-passes", "sharded"]
)
def test_steps_of_two_gpus_are_replayed_with_their_exchange(folder: Path, fsdp: bool, accumulation: int) -> None:
    """Bit for bit the losses of steps that the host launches, in a training that is stopped and continued."""
    how = {"fsdp": fsdp, "accumulation": accumulation, "mixers": ("gdn", "pgdn", "gka")}
    launched = train(folder, f"launched-{fsdp}-{accumulation}", 2, **how)
    train(folder, f"replayed-{fsdp}-{accumulation}", 2, "--stop-at", "20", graphs=True, **how)
    assert train(folder, f"replayed-{fsdp}-{accumulation}", 2, graphs=True, **how) == launched


@several
@pytest.mark.parametrize("fsdp", [False, True], ids=["copied", "sharded"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_process_that_dies_or_stops_ends_the_others(folder: Path, number: int, fsdp: bool) -> None:
    """Within a minute, in the middle of replayed steps, whose exchange waits for it. The same command continues."""
    name = f"ended-{number}-{fsdp}"
    how: dict[str, Any] = {"fsdp": fsdp, "graphs": True, "mixers": ("gdn", "pgdn", "gka"), "max_steps": 10**6}
    begun = command(folder, name, 2, **how)
    with (folder / f"{name}.txt").open("w") as errors:
        launcher = psutil.Popen(begun, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=errors)
    until = time.monotonic() + 200
    while not any(point["step"] > 30 for point in points(folder, name)):
        assert launcher.poll() is None and time.monotonic() < until, Path(errors.name).read_text()
        time.sleep(0.1)
    ranks = {int(process.environ()["RANK"]): process for process in launcher.children()}
    ranks[1].send_signal(number)
    ranks[0].wait(60)
    launcher.kill() if number == signal.SIGSTOP else launcher.wait(60)
    with suppress(psutil.NoSuchProcess):
        ranks[1].kill()
    assert "rank 1 (" in Path(errors.name).read_text()
    further = points(folder, name)[-1]["step"] + 15
    train(folder, name, 2, "--stop-at", str(further), **how)
    assert points(folder, name)[-1]["step"] == further
