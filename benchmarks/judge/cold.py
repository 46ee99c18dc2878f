"""Seconds of the first forward + backward in a new process: with an empty kernel cache, then with the one it left."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from .cases import Sizes

PROGRAM = """
import sys, time, torch
from judge.cases import CASES, Sizes
name, sizes, dtype, backend = sys.argv[1:]
case = CASES[name]
inputs = case.draw(Sizes.read(sizes), getattr(torch, dtype), "cuda", 0)
torch.cuda.synchronize()
start = time.perf_counter()
o, _ = case.ours(inputs, backend=backend)
torch.autograd.grad(o.sum(), list(inputs.values()))
torch.cuda.synchronize()
print(time.perf_counter() - start)
"""


def cold_start(name: str, sizes: Sizes, dtype: str, backend: str) -> dict[str, float]:
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "TRITON_CACHE_DIR": folder, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM, name, str(sizes), dtype, backend]
        seconds = [
            float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
            for _ in range(2)
        ]
    return {"empty_cache_s": seconds[0], "warm_cache_s": seconds[1]}
