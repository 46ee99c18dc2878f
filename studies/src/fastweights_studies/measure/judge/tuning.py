"""The peers' run-time autotuning, made bearable: every variant is still compiled and timed, alone on the device.

flash-linear-attention 0.6 times 68 to 278 compiled variants per op at its first call: minutes. Triton keeps compiled
kernels, and with FLA_CACHE_RESULTS=1 (its default; TRITON_CACHE_AUTOTUNING=1 for the rest) also the choices, in its cache
folder. So: parallel processes compile every variant without timing any (timings of processes that share a device mean
nothing), then one process times the variants alone and shortly, and its choices go into a file, with which another machine
with the same versions compiles the chosen variants only.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from fastweights_studies.measure.rows import name_file
from fastweights_studies.places import SOURCES

from .cases import CASES, Sizes
from .peers import CHUNK

PARTS = 4  # processes per op, each compiling its share of the variants
SUFFIX = ".autotune.json"


def cache_folder() -> Path:
    from triton import knobs

    return Path(knobs.cache.dir)


def choices_file(results: Path, device: str) -> Path:
    """Where the choices for a device are kept, below a folder of results."""
    return name_file(results / "peer_tuning", "choices", device)


def keep_choices() -> None:
    """Before flash-linear-attention is imported."""
    os.environ.update(FLA_CACHE_RESULTS="1", TRITON_CACHE_AUTOTUNING="1")


def save_choices(path: Path) -> None:
    """What has been chosen so far: of every tuned kernel the fastest variant."""
    chosen = json.loads(path.read_text()) if path.exists() else {}
    for file in cache_folder().glob(f"*/*{SUFFIX}"):
        found = json.loads(file.read_text())
        best = min(found["configs_timings"], key=lambda pair: pair[1])
        chosen[f"{file.parent.name}/{file.name}"] = {**found, "configs_timings": [best]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(chosen, indent=0, sort_keys=True) + "\n")


def load_choices(path: Path) -> None:
    """Into the cache, where Triton finds them by the hash of source, versions and variants."""
    if path.exists():
        for name, found in json.loads(path.read_text()).items():
            file = cache_folder() / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found))


def time_shortly() -> None:
    """A variant is timed for 8 ms in place of 100: 20 launches of the slowest kernels, hundreds of the others."""
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    Autotuner.do_bench = property(lambda tuner: partial(do_bench, warmup=2, rep=8))


def warm_peers(names: Sequence[str], sizes: Sequence[Sizes], dtype: str, processes: int) -> None:
    """Compile what the peers of these ops need, several processes at a time."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCES), *sys.path])}
    shapes = list(map(str, sizes))

    def one(name: str, part: int) -> str:
        start = time.perf_counter()
        command = [sys.executable, "-m", "fastweights_studies.measure.judge.tuning", name, str(part), dtype, *shapes]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1:] or ["no output"]
        return f"  {name}, share {part + 1} of {PARTS}: {last[0][:150]}, {time.perf_counter() - start:.0f} s"

    work = [(name, part) for name in names if name in CHUNK for part in range(PARTS)]
    with ThreadPoolExecutor(processes) as pool:
        for line in pool.map(lambda arguments: one(*arguments), work):
            print(line, flush=True)


def compile_only(part: int) -> Callable[[], int]:
    """Every PARTS-th variant that Triton would time is compiled and run once, the others are passed over, and no choice is
    kept. Returns a count of what was compiled."""
    from triton.runtime.autotuner import Autotuner

    turns, compiled = count(), count()

    def bench(call: Callable[[], Any], quantiles: Any = None) -> list[float]:
        if next(turns) % PARTS != part:
            return [1.0] * 3
        call()
        next(compiled)
        return [0.0] * 3

    class Unknown(Exception):
        pass

    look_up = Autotuner.check_disk_cache

    def look_up_only(tuner: Any, key: Any, configs: Any, tune: Callable[[], None]) -> bool:
        def unknown() -> None:
            raise Unknown

        try:
            return look_up(tuner, key, configs, unknown)
        except Unknown:
            tune()
            return False

    Autotuner.do_bench = property(lambda tuner: bench)
    Autotuner.check_disk_cache = look_up_only
    return lambda: next(compiled)


def main() -> None:
    import torch

    from .measuring import forward_backward
    from .peers import peers

    name, part, dtype, *shapes = sys.argv[1:]
    keep_choices()
    compiled = compile_only(int(part))
    call = peers(name)["fla"]
    for sizes in map(Sizes.read, shapes):
        inputs = CASES[name].draw(sizes, getattr(torch, dtype), "cuda", 0)
        forward_backward(call, inputs, torch.randn_like(inputs["v"]))
    torch.cuda.synchronize()
    print(f"{compiled()} variants compiled")


if __name__ == "__main__":
    main()
