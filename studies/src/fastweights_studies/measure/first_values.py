"""Recall of 4 pairs at the defaults of `fastweights recall` by every mixer, with other first values by mamba2 and palimpsa-m, and
with other sizes by attention.

    python -m fastweights_studies.measure.first_values        writes studies/results/first_values.json

Runs that have ended stay in the folder of --runs: an interrupted command continues when it is given again.
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
from fastweights.results import RecallResult
from fastweights.training import RecallExperiment, run_recall_parts
from fastweights.training.progress import reporter_for
from fastweights_studies.measure.environment import write_json
from fastweights_studies.places import RESULTS

RESULT = RESULTS / "first_values.json"
BUILT_IN = tuple(MIXERS)
# What a layer with Mamba-2's skip, D = 1, is given beside it.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "D = 0 (the default)": {"skip_init": 0.0},
    "filters normal": {"conv_init": "normal"},
}
RANGES = {
    "A in [0, 1]": ("rates", (0.0, 1.0)),
    "dt in [.01, .1]": ("steps", (0.01, 0.1)),
    "dt in [.1, 1]": ("steps", (0.1, 1.0)),
}
INITIALIZER_RANGES = (0.02, 0.1)
SKIP = {"skip_init": 1.0}
BOTH = ("mamba2", "palimpsa-m")
SLOW = ("mamba2", "palimpsa-m", "vla", "vla-softmax")  # again with another seed


@dataclass(frozen=True, kw_only=True)
class OtherRangesOptions(PalimpsaMOptions):
    drawn: str = option("A in [0, 1]", one_of(*RANGES))


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
    for mixer in BOTH:
        register_mixer(
            f"{mixer}-ranges", layer=OtherRanges, options=MIXERS[mixer].options, summary=f"{mixer} with other first decays",
            equation=MIXERS[mixer].equation, source="this file", state=MIXERS[mixer].state,
        )  # fmt: skip


def variants(mixer: str) -> list[MixerChoice]:
    """The mixer with each change; its label is "mixer: change"."""
    ranges = [MixerChoice(f"{mixer}-ranges", {**SKIP, "drawn": name}, f"{mixer}: {name}") for name in RANGES]
    return [MixerChoice(mixer, {**SKIP, **own}, f"{mixer}: {name}") for name, own in OPTIONS.items()] + ranges


def experiments() -> dict[str, RecallExperiment]:
    """The experiments by the name of their part of the result."""
    made = {
        "defaults of every mixer": RecallExperiment(mixers=BUILT_IN, pairs=(4,)),
        "defaults of the slow ones": RecallExperiment(mixers=SLOW, pairs=(4,), seeds=(1,)),
    }
    for layers, std in ((1, 0.05), (2, 0.02), (2, 0.1)):
        made[f"attention, layers {layers}, initializer_range {std}"] = RecallExperiment(
            mixers=("softmax", "vla-softmax"), pairs=(4,), layers=layers, initializer_range=std
        )
    grid: dict[str, Any] = {"pairs": (4,), "learning_rates": (0.003,), "seeds": (0, 1)}
    changed = tuple(choice for mixer in BOTH for choice in variants(mixer))
    made["one change from skip_init 1"] = RecallExperiment(mixers=changed, **grid)
    for std in INITIALIZER_RANGES:
        choices = tuple(MixerChoice(mixer, SKIP, f"{mixer}: initializer_range {std}") for mixer in BOTH)
        made[f"initializer_range {std}, skip_init 1"] = RecallExperiment(mixers=choices, initializer_range=std, **grid)
    return made


def row(result: RecallResult) -> dict[str, Any]:
    accuracy = None if result.accuracy is None else round(result.accuracy, 4)
    run = {name: result.run[name] for name in ("learning_rate", "seed")}
    return {"mixer": result.mixer, **run, "accuracy": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=RESULT)
    parser.add_argument("--runs", type=Path, default=Path("runs/first_values"))
    arguments = parser.parse_args()
    parts = experiments()
    folders = {name: arguments.runs / str(number) for number, name in enumerate(parts)}
    found = run_recall_parts(parts, folders, reporter=reporter_for(Console(stderr=True), 300), log_every=300)
    first = found["defaults of every mixer"][0]
    made = {(tuple(x.versions.items()), x.machine["cpu"]): x for results in found.values() for x in results}
    content = {
        "what": "accuracy on 4 pairs; guessing among the values shown gives .25; see docs/rules.md, first values that learn",
        "settings": {
            name: value for name, value in first.run.items() if name not in ("mixer", "learning_rate", "seed")
        },
        "measured with": [{**result.versions, **result.machine} for result in made.values()],
        **{name: [row(result) for result in results] for name, results in found.items()},
    }
    write_json(arguments.output, content)


if __name__ in ("__main__", "__mp_main__"):  # the latter in worker processes
    register_ranges()
if __name__ == "__main__":
    main()
