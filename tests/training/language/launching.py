"""Commands in several processes, two by default; and processes forked from that of the tests, which import nothing anew."""

import os
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path

from accelerate.state import AcceleratorState

ROOT = Path(__file__).parents[3]

# The beginning of a run file, without its folders.
TRAINING = """
output = {output}
cache = {cache}
batch_size = 1
accumulation = 2
length = 32
max_steps = 6
learning_rate = 1e-2
log_every = 1
checkpoint_every = 4
context_lengths = [16]
"""
MODEL = """
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
mixer = "gdn"
"""
RUN = (
    f"{TRAINING}evaluate_every = 3\nevaluation_rows = 7\n{MODEL}"
    + """
[tokenizer]
vocab_size = 300
[corpus]
paths = [{texts}]
held_out_fraction = 0.2
"""
)


def start(*command, processes=2):
    """A command in several processes, which report on standard error what torch compiles, and what it compiles again."""
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return subprocess.Popen(
        [sys.executable, "-m", *launcher, *map(str, command)],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_LOGS": "recompiles,graph_code"},
    )


def torchrun(*command, succeeds=True, while_running=lambda process: None, **options):
    """Standard error of a command. options: of `start`."""
    process = start(*command, **options)
    try:
        while_running(process)
        errors = process.communicate(timeout=600)[1]  # of a hang alone: compiling takes minutes on a busy machine
    finally:
        process.terminate()  # torchrun then ends its processes
        process.wait()
    assert (process.returncode == 0) == succeeds, errors
    return errors


def launch_hosts(folders, *command, processes=1, environments=({}, {})):
    """A launcher of torchrun in each of two folders, as if they were hosts, with so many processes each of `python command`. What
    they write on standard error is in the file errors there."""
    options = ["--nnodes=2", f"--nproc-per-node={processes}", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    started = []
    for number, (folder, environment) in enumerate(zip(folders, environments, strict=True)):
        usual = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONSAFEPATH": "1"}
        with open(folder / "errors", "w") as errors:
            started.append(
                subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "torch.distributed.run",
                        *options,
                        f"--node-rank={number}",
                        *map(str, command),
                    ],
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    cwd=folder,
                    env={**os.environ, **usual, **environment},
                )
            )
    return started


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


class Forked:
    """A process that calls `work`, as the only one of its launcher. It must not use a GPU."""

    def __init__(self, work, rank, size, port, errors):
        self.errors, self._code = errors, None
        self.pid = os.fork()
        if self.pid:
            return
        code = 1
        try:
            descriptor = os.open(errors, os.O_WRONLY | os.O_CREAT)
            for stream in (1, 2):
                os.dup2(descriptor, stream)
            sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
            os.environ.update(
                RANK=f"{rank}", WORLD_SIZE=f"{size}", LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", GROUP_RANK=f"{rank}"
            )
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=f"{port}", OMP_NUM_THREADS="1")
            AcceleratorState._reset_state(reset_partial_state=True)  # of earlier tests in one process
            work(rank)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def code(self, seconds=60.0):
        """Its exit code, or minus the signal that has ended it, within so many seconds."""
        until = time.monotonic() + seconds
        while self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            assert time.monotonic() < until, self.errors.read_text()
            time.sleep(0.01)
        return self._code


def fork(work, folder, size=2):
    """`size` processes, each as if on a host of its own; what they write is in `folder`."""
    port = free_port()
    return [Forked(work, rank, size, port, folder / f"errors-{rank}") for rank in range(size)]
