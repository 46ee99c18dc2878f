"""What parts of the block around a rule do to recall: the measurement behind the layers' defaults.

    python -m fastweights_studies.measure.block_effects --device cuda --workers 8
    python -m fastweights_studies.measure.block_effects --effects gdn-windows,softmax-convolution --seeds 0,1,2

Each effect is a mixer with the first values of its authors beside the same mixer with one part changed, trained from the same
first weights outside the memory on the same data. On a GPU: two layers of width 128, two heads of 16, 64 sequences a step, 2,000
steps, ten seeds. On a CPU: width 64, 32 sequences, 2,000 steps, three seeds. The rate is the best of the grid on validation
sequences; accuracies are of test sequences. A training ends where 99% of the validation sequences are right. Workers are spread
over all GPUs of the machine. Prints the paired differences of all effects as one family, and writes
studies/results/block-effects-<device>.json. Runs continue where they stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from statistics import fmean
from typing import Any

from fastweights.layers import MixerChoice
from fastweights.results import RecallResult
from fastweights.results.experiment import best_results
from fastweights.training import RecallExperiment, run_recall_parts
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import name_file, replace_rows
from fastweights_studies.origin import find_origin
from fastweights_studies.paired import Difference, compare_family
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row, select

TASK = "block_effect"
HEAD = {"head_dim": 16}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "cuda": {"width": 128, "batch_size": 64, "steps": 2000, "learning_rates": (1e-3, 3e-3), "seeds": tuple(range(10))},
    "cpu": {"width": 64, "batch_size": 32, "steps": 2000, "learning_rates": (3e-3,), "seeds": (0, 1, 2)},
}
SETTINGS: Mapping[str, Any] = {
    "task": "mqar-shuffled", "vocab_size": 128, "heads": 2, "layers": 2, "initializer_range": 0.05, "test_examples": 512,
    "validation_examples": 256, "evaluations": 10, "stop_at": 0.99, "seed_by_name": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Effect:
    """A mixer with and without a change of its block, at a number of pairs."""

    mixer: str
    changed: Mapping[str, Any]
    pairs: int
    base: Mapping[str, Any] = field(default_factory=dict)
    module: str | None = None  # that registers the mixer

    def sides(self) -> dict[str, MixerChoice]:
        options = {"before": {**HEAD, **self.base}, "after": {**HEAD, **self.base, **self.changed}}
        return {side: MixerChoice(self.mixer, own, f"{self.mixer}-{side}") for side, own in options.items()}


WINDOWED = "fastweights_studies.measure.first_window"  # registers gdn-window
PALIMPSA_D: Mapping[str, Any] = {"long_memory": "own", "skip_init": 1.0}
EFFECTS: Mapping[str, Effect] = {
    "softmax-convolution": Effect(mixer="softmax", changed={"conv_size": 4, "activation": "silu"}, pairs=32),
    "palimpsa-d-skip": Effect(mixer="palimpsa-d", base=PALIMPSA_D, changed={"skip_init": 0.0}, pairs=16),
    "palimpsa-d-gate": Effect(mixer="palimpsa-d", base=PALIMPSA_D, changed={"output_gate": None}, pairs=16),
    "gdn-windows": Effect(mixer="gdn", base={"long_memory": "own"}, changed={"long_memory": "windows"}, pairs=16),
    "mamba2-epsilon": Effect(mixer="mamba2", base={"long_memory": "windows"}, changed={"norm_eps": 1e-12}, pairs=16),
    "mamba2-gate-and-windows": Effect(
        mixer="mamba2", base={"long_memory": "own"}, changed={"long_memory": "windows", "output_gate": None}, pairs=32
    ),
    "gdn-short-windows": Effect(
        mixer="gdn-window", base={"first_window": 100.0}, changed={"first_window": 4.0}, pairs=16, module=WINDOWED
    ),
}


def experiment_of(effect: Effect, device: str, seeds: Sequence[int] | None) -> RecallExperiment:
    """Both sides of an effect at all rates and seeds."""
    if effect.module is not None:
        import_module(effect.module)
    size = dict(SIZES["cpu" if device == "cpu" else "cuda"])
    size["seeds"] = tuple(seeds or size["seeds"])
    return RecallExperiment(
        **SETTINGS, **size, pairs=(effect.pairs,), mixers=tuple(effect.sides().values()), device=device
    )


def best_of(results: Sequence[RecallResult], label: str) -> list[RecallResult]:
    """Those of a side at its best rate, one per seed."""
    return best_results([result for result in results if result.mixer == label])


def rows_of(name: str, results: Sequence[RecallResult], origin: Origin) -> list[Row]:
    """Accuracy and steps to 90% of both sides, a row per seed."""
    effect, rows = EFFECTS[name], []
    for side, choice in effect.sides().items():
        for result in best_of(results, choice.label):
            run = {
                **{key: result.run[key] for key in ("width", "heads", "layers", "steps", "batch_size", "learning_rate")},
                "stopped_at": result.stopped_at, "diverged": result.diverged,
            }  # fmt: skip
            column: dict[str, Plain] = {"effect": name, "side": side, "pairs": effect.pairs}
            values = {"accuracy": result.counted_value, "steps_to_90": result.steps_to(0.9)}
            rows += [
                Row(
                    task=TASK, measure=measure, unit="1", column=column, mixer=effect.mixer, options=choice.options,
                    run=run, seed=result.run["seed"], value=value, origin=origin,
                )
                for measure, value in values.items()
            ]  # fmt: skip
    return rows


def sides_of(rows: Iterable[Row], name: str) -> tuple[dict[int, float], dict[int, float]]:
    """The accuracies by seed before and after an effect's change."""
    chosen = select(rows, measure="accuracy", column={"effect": name})
    before, after = (
        {
            row.seed: row.value
            for row in select(chosen, column={"side": side})
            if row.seed is not None and row.value is not None
        }
        for side in ("before", "after")
    )
    return before, after


def differences(rows: Sequence[Row]) -> dict[str, Difference]:
    """Of each effect that was measured, as one family."""
    names = dict.fromkeys(str(row.column["effect"]) for row in rows)
    return compare_family({name: sides_of(rows, name)[::-1] for name in names})


def report(rows: Sequence[Row]) -> list[str]:
    """A line per effect: both accuracies, and the paired difference with the confidence of all effects together."""
    lines = []
    for name, difference in differences(rows).items():
        before, after = (fmean(own.values()) for own in sides_of(rows, name))
        lines.append(f"{name:20} before {before:.3f}, after {after:.3f}, difference {difference}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--effects", default=",".join(EFFECTS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", help="such as 0,1,2; at least two")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/block-effects"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    given = parser.parse_args()
    seeds = [int(seed) for seed in given.seeds.split(",")] if given.seeds else None
    chosen = given.effects.split(",")
    experiments = {name: experiment_of(EFFECTS[name], given.device, seeds) for name in chosen}
    on_gpu = given.device != "cpu"
    path = name_file(given.results, "block-effects", find_gpu()) if on_gpu else given.results / "block-effects-cpu.json"
    origin = describe(find_gpu()) if on_gpu else find_origin("cpu")
    folders = {name: given.runs / given.device / name for name in chosen}
    modules = tuple(dict.fromkeys(effect.module for name in chosen if (effect := EFFECTS[name]).module is not None))
    results = run_recall_parts(experiments, folders, workers=given.workers, imports=modules)
    rows = [row for name in chosen for row in rows_of(name, results[name], origin)]
    replace_rows(path, rows, lambda row: (row.task, row.column["effect"]))
    print("\n".join(report(rows)))


if __name__ == "__main__":
    main()
