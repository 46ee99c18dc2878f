"""Commands in several processes."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]

# A run file, without its folders.
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


def start(*command, processes=2):
    """A command in so many processes, which report on standard error the graphs that torch compiles, and what it compiles
    again."""
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={processes}",
            *map(str, command),
        ],
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_LOGS": "recompiles,graph_code"},
    )


def torchrun(*command, processes=2, succeeds=True, while_running=lambda process: None):
    """Standard error of a command in so many processes."""
    process = start(*command, processes=processes)
    try:
        while_running(process)
        errors = process.communicate(timeout=180)[1]
    finally:
        process.terminate()  # torchrun then ends its processes
        process.wait()
    assert (process.returncode == 0) == succeeds, errors
    return errors
