"""Time of a step of a recall training on a GPU, replayed as a CUDA graph and launched kernel by kernel.

    python -m fastweights_studies.measure.recall_steps
    python -m fastweights_studies.measure.recall_steps --mixers gdn,vla --steps 100

The recall experiments of Variational Linear Attention's tables (64 sequences of 73 tokens) and of Zoology (128 of 256 tokens,
8,192 words), two layers of width 128. Times are of whole steps as `fastweights recall` takes them, batches included, of one
training that has the GPU for itself; graphs and launches in turn. Writes studies/results/recall-steps-<device>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastweights.training import RecallExperiment
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.train import Training
from fastweights_studies.claims.trained import VLA_SETTINGS, ZOOLOGY_SETTINGS
from fastweights_studies.measure.environment import describe, file_suffix, write_json
from fastweights_studies.places import RESULTS

SETTINGS = {"vla": (VLA_SETTINGS, 24), "zoology": (ZOOLOGY_SETTINGS, 64)}
WARM, PARTS = 10, 4


def trainings(setting: str, mixer: str, steps: int) -> dict[str, tuple[Training, Iterator[Any]]]:
    """The same training with graphs and without."""
    settings, pairs = SETTINGS[setting]
    grid = {"pairs": (pairs,), "mixers": (mixer,), "seeds": (0,), "learning_rates": (1e-3,)}
    whole = WARM + PARTS * steps
    run = RecallExperiment(**{**settings, **grid, "steps": whole, "evaluations": 1, "device": "cuda"}).runs()[0]
    return {
        name: (Training(run, uses_graphs=name == "graphs"), training_batches(run, 0)) for name in ("graphs", "launches")
    }


def take(training: Training, batches: Iterator[Any], steps: int) -> float:
    """Milliseconds per step."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        training.step(next(batches))
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / steps * 1e3


def measure(setting: str, mixer: str, steps: int) -> dict[str, list[float]]:
    sides = trainings(setting, mixer, steps)
    for side in sides.values():
        take(*side, WARM)
    times: dict[str, list[float]] = {name: [] for name in sides}
    for part in range(PARTS):
        for name, side in sides.items():
            times[name].append(take(*side, steps - (part == PARTS - 1)))  # the last step would be followed by the test
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="softmax,linear,gdn,pgdn,palimpsa-d,gka,lattice,vla")
    parser.add_argument("--steps", type=int, default=50, help="per part, of four")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    torch.use_deterministic_algorithms(True, warn_only=True)  # as the workers of `fastweights recall` do
    rows: dict[str, Any] = {}
    device = torch.cuda.get_device_name()
    for setting in SETTINGS:
        for mixer in given.mixers.split(","):
            times = rows[f"{setting}, {mixer}"] = measure(setting, mixer, given.steps)
            best = {name: min(found) for name, found in times.items()}
            print(
                f"{setting:8} {mixer:12} graphs {best['graphs']:.2f} ms, launches {best['launches']:.2f} ms", flush=True
            )
            content = {**describe(), "device": device, "ms per step": rows}
            write_json(given.results / f"recall-steps-{file_suffix(device)}.json", content)


if __name__ == "__main__":
    main()
