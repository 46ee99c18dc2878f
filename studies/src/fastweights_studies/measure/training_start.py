"""Seconds from the start of `fastweights train` to its first steps, with nothing kept from an earlier start and after one.

    python -m fastweights_studies.measure.training_start
    python -m fastweights_studies.measure.training_start --compile blocks,false --mixer gka

24 layers of width 1024, 8 heads of 128, 8 rows of 2,048 tokens, bfloat16. The text is tokenized beforehand. Every start is a
process of its own: seconds count from its launch, imports of Python included, until a step is in its log. The first start finds
no compiled code, neither of torch nor of Triton; the second finds what the first one left. Step 4 captures the CUDA graph that
the later steps replay. Writes studies/results/training-start-<device>.json, which keeps the rows that are not measured again.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS, ROOT
from fastweights_studies.record import Origin, Row

TASK = "training_start"
STEPS = 6
WAYS = {"blocks": '"blocks"', "true": "true", "false": "false"}  # as a run file has them
COMPILED = {"blocks": "blocks", "true": "whole", "false": None}  # as a column has them
MODEL: Mapping[str, Any] = {"vocab_size": 8192, "megabytes": 8, "length": 2048, "batch_size": 8, "fields": ""}
LONGEST = 540.0  # seconds of a start
RUN = """
output = "{output}"
cache = "{cache}"
compile = {compile}
precision = "bf16"
length = {length}
batch_size = {batch_size}
max_steps = 100
log_every = 1
checkpoint_every = 100
[model]
mixer = "{mixer}"
{fields}
[tokenizer]
vocab_size = {vocab_size}
[corpus]
max_megabytes = {megabytes}
"""


def start(run: Path, log: Path, kernels: Path) -> dict[int, float]:
    """By step, seconds until the first and the last of STEPS steps of a training, which is then killed."""
    began = time.perf_counter()
    seen: dict[int, float] = {}
    command = [sys.executable, "-m", "fastweights", "train", str(run), "--overwrite"]
    environment = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # in place of which the run's own folder is taken
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
    try:
        while len(seen) < STEPS:
            if process.poll() is not None:
                raise SystemExit(f"the training ended after {len(seen)} steps, with code {process.returncode}")
            if time.perf_counter() - began > LONGEST:
                raise SystemExit(f"the training took {len(seen)} of {STEPS} steps in {LONGEST:.0f} s")
            written = log.read_bytes().count(b"\n") if log.exists() else 0
            for step in range(len(seen) + 1, min(written, STEPS) + 1):
                seen[step] = time.perf_counter() - began
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    return {step: seen[step] for step in (1, STEPS)}


def starts(mixer: str, way: str, folder: Path, model: Mapping[str, Any] = MODEL) -> dict[bool, dict[int, float]]:
    """The first start and the second one, by whether it finds compiled code. folder: an empty one."""
    cache, output, run = folder / "cache", folder / f"{mixer}-{way}", folder / f"{mixer}-{way}.toml"
    prepare_text(TextCorpus(max_megabytes=model["megabytes"]), TextTokenizer(vocab_size=model["vocab_size"]), cache)
    run.write_text(RUN.format(**model, output=output, cache=cache, compile=WAYS[way], mixer=mixer))
    found = {}
    for warm in (False, True):
        found[warm] = start(run, output / "log.jsonl", folder / "kernels")
        (output / "log.jsonl").unlink()  # of the start before
    return found


def make_start_rows(mixer: str, way: str, found: Mapping[bool, Mapping[int, float]], origin: Origin) -> list[Row]:
    return [
        row
        for warm, steps in found.items()
        for step, seconds in steps.items()
        for row in make_rows(
            TASK,
            origin,
            {"start_s": seconds},
            mixer=mixer,
            column={"compiled": COMPILED[way], "warm": warm, "step": step},
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixer", default="gdn")
    parser.add_argument("--compile", default="blocks", help="comma-separated, of " + ", ".join(WAYS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    ways = arguments.compile.split(",")
    if not set(ways) <= set(WAYS):
        raise SystemExit(f"--compile must name some of {', '.join(WAYS)}, got {arguments.compile}")
    device = find_gpu()
    path = name_file(arguments.results, "training-start", device)
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            found = starts(arguments.mixer, way, Path(folder))
        replace_rows(path, make_start_rows(arguments.mixer, way, found, describe(device)))
        for warm, steps in found.items():
            start_of = "second start" if warm else "first start"
            print(arguments.mixer, way, start_of, *(f"step {step} {s:.1f} s" for step, s in steps.items()), flush=True)


if __name__ == "__main__":
    main()
