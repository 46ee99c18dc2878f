"""Time of a step of a recall training on a GPU, replayed as a CUDA graph and launched kernel by kernel.

    python -m fastweights_studies.measure.recall_steps
    python -m fastweights_studies.measure.recall_steps --mixers gdn,vla --steps 100
    python -m fastweights_studies.measure.recall_steps --together 1,8,16

The recall experiments of Variational Linear Attention's tables (64 sequences of 73 tokens) and of Zoology (128 of 256 tokens,
8,192 words), two layers of width 128. Times are of whole steps as `fastweights recall` takes them, batches included, of one
training that has the GPU for itself; graphs and launches in turn. With --together the steps are those of the leaderboard's recall
at full size, in so many processes that share the GPU, each the same training: `fastweights leaderboard recall --dry-run` predicts
minutes by them. Writes studies/results/recall-steps-<device>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from fastweights.layers import MixerChoice
from fastweights.training import RecallExperiment, RecallRun
from fastweights.training.recall.batches import training_batches
from fastweights.training.recall.run import make_repeatable
from fastweights.training.recall.train import Training
from fastweights_studies.claims.trained import VLA_SETTINGS, ZOOLOGY_SETTINGS
from fastweights_studies.leaderboard import SIZES
from fastweights_studies.leaderboard.trainings import match_mixer
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "recall_step"
SETTINGS = {"vla": (VLA_SETTINGS, 24), "zoology": (ZOOLOGY_SETTINGS, 64)}
WARM, PARTS = 10, 4
WARM_TOGETHER = 25  # of five numbers of pairs, each captured at its fourth step


def trainings(setting: str, mixer: str, steps: int) -> dict[bool, tuple[Training, Iterator[Any]]]:
    """The same training with graphs and without, by whether it is replayed."""
    settings, pairs = SETTINGS[setting]
    grid = {"pairs": (pairs,), "mixers": (mixer,), "seeds": (0,), "learning_rates": (1e-3,)}
    whole = WARM + PARTS * steps
    run = RecallExperiment(**{**settings, **grid, "steps": whole, "evaluations": 1, "device": "cuda"}).runs()[0]
    return {replayed: (Training(run, uses_graphs=replayed), training_batches(run, 0)) for replayed in (True, False)}


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def take(training: Training, batches: Iterator[Any], steps: int) -> float:
    """Milliseconds per step."""
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        training.step(next(batches))
    wait()
    return (time.perf_counter() - begin) / steps * 1e3


def measure(setting: str, mixer: str, steps: int) -> dict[bool, list[float]]:
    sides = trainings(setting, mixer, steps)
    for side in sides.values():
        take(*side, WARM)
    times: dict[bool, list[float]] = {replayed: [] for replayed in sides}
    for part in range(PARTS):
        for replayed, side in sides.items():
            times[replayed].append(
                take(*side, steps - (part == PARTS - 1))
            )  # the last step would be followed by the test
    return times


def recall_run(mixer: str, steps: int, device: str) -> RecallRun:
    """A training of the leaderboard's recall at full size, in its middle column."""
    size = SIZES["full"].task("recall")
    column = size.columns[len(size.columns) // 2]
    chosen = match_mixer(size, column, MixerChoice(mixer))
    settings = {**size.experiment(column), "steps": steps, "evaluations": 1, "stop_at": None, "device": device}
    return RecallExperiment(
        **settings,
        mixers=(chosen.choice,),
        intermediate_size=chosen.intermediate_size,
        learning_rates=(1e-3,),
        seeds=(0,),
    ).runs()[0]


def time_one(number: int, mixer: str, steps: int, device: str, ready: Any, found: Any) -> None:
    """Put the milliseconds per step of one of several processes, which begin together."""
    torch.set_num_threads(1)
    make_repeatable()
    run = recall_run(mixer, WARM_TOGETHER + steps + 1, device)
    training, batches = Training(run), training_batches(run, 0)
    take(training, batches, WARM_TOGETHER)
    ready.wait()
    found.put(take(training, batches, steps))


def measure_together(mixer: str, processes: int, steps: int, device: str) -> float:
    """Milliseconds per step of each process, the mean."""
    context = torch.multiprocessing.get_context("spawn")
    ready, found = context.Barrier(processes), context.SimpleQueue()
    started = torch.multiprocessing.spawn(
        time_one, (mixer, steps, device, ready, found), nprocs=processes, join=False, start_method="spawn"
    )
    while not started.join():
        pass
    return sum(found.get() for _ in range(processes)) / processes


def measure_sharing(mixers: list[str], counts: list[int], steps: int, device: str, path: Path, origin: Origin) -> None:
    for mixer in mixers:
        for processes in counts:
            milliseconds = measure_together(mixer, processes, steps, device)
            print(f"{mixer:12} {processes:2} processes {milliseconds:.2f} ms", flush=True)
            column = {"setting": "recall", "replayed": True, "processes": processes}
            replace_rows(path, make_rows(TASK, origin, {"step_ms": milliseconds}, mixer=mixer, column=column))


def make_step_rows(setting: str, mixer: str, times: dict[bool, list[float]], origin: Origin) -> list[Row]:
    """One row per part of a training."""
    return [
        row
        for replayed, parts in times.items()
        for part, milliseconds in enumerate(parts)
        for row in make_rows(
            TASK,
            origin,
            {"step_ms": milliseconds},
            mixer=mixer,
            column={"setting": setting, "replayed": replayed},
            run={"part": part},
        )
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="softmax,linear,gdn,pgdn,palimpsa-d,gka,lattice,vla")
    parser.add_argument("--steps", type=int, default=50, help="per part, of four")
    parser.add_argument("--together", help="numbers of processes, such as 1,8,16")
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    make_repeatable()
    device = find_gpu()
    path, origin = name_file(given.results, "recall-steps", device), describe(device)
    if given.together:
        counts = [int(count) for count in given.together.split(",")]
        measure_sharing(given.mixers.split(","), counts, given.steps, "cuda", path, origin)
        return
    for setting in SETTINGS:
        for mixer in given.mixers.split(","):
            times = measure(setting, mixer, given.steps)
            graphs, launches = (min(times[replayed]) for replayed in (True, False))
            print(f"{setting:8} {mixer:12} graphs {graphs:.2f} ms, launches {launches:.2f} ms", flush=True)
            replace_rows(path, make_step_rows(setting, mixer, times, origin))


if __name__ == "__main__":
    main()
