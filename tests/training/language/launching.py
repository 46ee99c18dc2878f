"""Commands in several processes, two by default."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


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
        errors = process.communicate(timeout=180)[1]
    finally:
        process.terminate()  # torchrun then ends its processes
        process.wait()
    assert (process.returncode == 0) == succeeds, errors
    return errors
