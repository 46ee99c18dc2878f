"""Recall of 4 pairs at the defaults of `fastweights recall --block published` by every mixer, with other first values by mamba2
and palimpsa-m, and with other sizes by attention. Rows of the defaults say which rate the command chooses.

    python -m fastweights_studies.measure.first_values

Writes studies/results/first_values.json. Runs that have ended stay in the folder of --runs: an interrupted command continues
when it is given again.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fastweights.layers import MIXERS, MixerChoice, PalimpsaM, register_mixer
from fastweights.layers.options import one_of, option
from fastweights.layers.posterior import PalimpsaMOptions
from fastweights.results import summarize
from fastweights.training import RecallExperiment, RecallRun, run_recall_parts
from fastweights.training.progress import RunsProgress
from fastweights.training.recall.run_file import WITHOUT_FILE
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.recall import setting_column
from fastweights_studies.measure.rows import make_rows, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "first_values"
RESULT = RESULTS / "first_values.json"
BUILT_IN = tuple(MIXERS)
# What a layer with Mamba-2's skip, D = 1, is given beside it.
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"skip_init": 0.0}, {"conv_init": "normal"})
# What other first decays are drawn from: the attribute of `decay`, and its least and largest value.
RANGES = {
    "rates_to_1": ("rates", (0.0, 1.0)),
    "steps_to_0.1": ("steps", (0.01, 0.1)),
    "steps_to_1": ("steps", (0.1, 1.0)),
}
INITIALIZER_RANGES = (0.02, 0.1)
SKIP = {"skip_init": 1.0}
DEFAULTS: dict[str, Any] = {"pairs": (4,), "validation_examples": WITHOUT_FILE["validation_examples"]}
BOTH = ("mamba2", "palimpsa-m")
WITH_RANGES = {f"{mixer}-ranges": mixer for mixer in BOTH}
SLOW = ("mamba2", "palimpsa-d", "palimpsa-m", "vla", "vla-softmax")  # again with the other seeds, beside attention
SEEDS = (0, 1, 2, 3, 4)


@dataclass(frozen=True, kw_only=True)
class OtherRangesOptions(PalimpsaMOptions):
    drawn: str = option("rates_to_1", one_of(*RANGES))


class OtherRanges(PalimpsaM):
    """Mamba-2's block with first decays from other ranges, which the layer has no options for.

    Args:
        drawn: what is drawn from where, a key of RANGES.
    """

    Options = OtherRangesOptions
    options: OtherRangesOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        setattr(self.decay, *RANGES[self.options.drawn])
        self.decay.reset_parameters()


def register_ranges() -> None:
    for name, mixer in WITH_RANGES.items():
        register_mixer(
            name, layer=OtherRanges, options=MIXERS[mixer].options, summary=f"{mixer} with other first decays",
            equation=MIXERS[mixer].equation, source="this file", state=MIXERS[mixer].state,
        )  # fmt: skip


def variants(mixer: str) -> list[MixerChoice]:
    """The mixer with each change."""
    ranges = [MixerChoice(f"{mixer}-ranges", {**SKIP, "drawn": name}) for name in RANGES]
    return [MixerChoice(mixer, {**SKIP, **own}) for own in OPTIONS] + ranges


def experiments() -> dict[str, RecallExperiment]:
    """The experiments by the name of their folder."""
    made = {"defaults": RecallExperiment(mixers=BUILT_IN, **DEFAULTS)}
    for seed in SEEDS[1:]:
        made[f"defaults_{seed}"] = RecallExperiment(mixers=("softmax", *SLOW), **DEFAULTS, seeds=(seed,))
    for layers, std in ((1, 0.05), (2, 0.02), (2, 0.1)):
        made[f"attention_{layers}_layers_{std}"] = RecallExperiment(
            mixers=("softmax",), pairs=(4,), layers=layers, initializer_range=std, seeds=SEEDS
        )
    grid: dict[str, Any] = {"pairs": (4,), "learning_rates": (0.003,), "seeds": SEEDS}
    made["one_change"] = RecallExperiment(mixers=tuple(one for mixer in BOTH for one in variants(mixer)), **grid)
    for std in INITIALIZER_RANGES:
        choices = tuple(MixerChoice(mixer, SKIP) for mixer in BOTH)
        made[f"first_weights_{std}"] = RecallExperiment(mixers=choices, initializer_range=std, **grid)
    return made


def describe_layer(choice: MixerChoice) -> tuple[str, dict[str, Any]]:
    """The mixer and the options that a row has; other first decays as the range of what is drawn."""
    options = dict(choice.options)
    if choice.name not in WITH_RANGES:
        return choice.name, options
    attribute, limits = RANGES[options.pop("drawn")]
    return WITH_RANGES[choice.name], {**options, attribute: list(limits)}


def make_accuracy_rows(run: RecallRun, accuracy: float | None, is_chosen: bool, origin: Origin) -> list[Row]:
    """is_chosen: whether validation sequences choose the rate of the run, where it has some."""
    mixer, options = describe_layer(run.choice)
    chosen = {} if run.validation_examples is None else {"chosen": is_chosen}
    return make_rows(
        TASK,
        origin,
        {"accuracy": accuracy},
        mixer=mixer,
        options=options,
        column=setting_column(run),
        run={"learning_rate": run.learning_rate, **chosen},
        seed=run.seed,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--runs", type=Path, default=Path("runs/first_values"))
    arguments = parser.parse_args()
    parts = experiments()
    folders = {name: arguments.runs / name for name in parts}
    found = run_recall_parts(parts, folders, reporter=RunsProgress(Console(stderr=True), 300), log_every=300)
    origin = describe()
    rates = {
        (name, row.mixer): row.learning_rate for name, results in found.items() for row in summarize(results)
    }  # one number of pairs each, and where a rate is chosen, one seed
    rows = [
        row
        for name, experiment in parts.items()
        for run, result in zip(experiment.runs(), found[name], strict=True)
        for row in make_accuracy_rows(run, result.accuracy, rates[name, result.mixer] == run.learning_rate, origin)
    ]
    replace_rows(arguments.output, rows)


if __name__ in ("__main__", "__mp_main__"):  # the latter in worker processes
    register_ranges()
if __name__ == "__main__":
    main()
