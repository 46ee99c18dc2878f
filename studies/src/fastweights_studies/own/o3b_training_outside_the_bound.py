"""own-3b: layers trained with steps within the bound of own-3, and with steps beyond it."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fastweights.data import make_task
from fastweights.layers import DeltaNet, MixerChoice
from fastweights.layers.gates import SigmoidGain
from fastweights.layers.norms import at_least_float32
from fastweights.results import RecallResult
from fastweights.results.experiment import best_results
from fastweights.training import RecallRun

from ..claims.claim import OWN, Claim
from ..claims.conditions import Conditions
from ..claims.measurement import UNDERTRAINED, Measurement, Number, mark_undertrained
from ..claims.trained import rate_field
from ..claims.verdict import INTERVALS, Status, Verdict, compare_seeds, settle
from ..claims.watched import in_processes, largest_spike, train_watched
from ..claims.words import Quantity, Words
from ..inspection.reading import read_layers
from ..inspection.transitions import transitions
from ..record import Plain
from .products import log_norms

RATES = (1e-2, 3e-2)
TRAINED: dict[str, Any] = {
    "task": "mqar-shuffled",
    "pairs": 8,
    "length": 256,
    "vocab_size": 64,
    "width": 32,
    "heads": 2,
    "layers": 1,
    "steps": 300,
    "batch_size": 8,
    "test_examples": 256,
    "evaluations": 1,
}
READ = 2  # sequences whose products are measured
SPIKE = 30.0
LEAST_LOSS = 0.05  # of accuracy
TROUBLED = 1 / 3  # of the trainings


class Setting(NamedTuple):
    """A rule, the largest c k^T D k that a step of it reaches (None: any), its mixer, and for learned gains the largest one and
    about the first one (None: those of the mixer)."""

    rule: str
    reach: int | None
    mixer: MixerChoice
    gains: tuple[float, float] | None = None

    @property
    def column(self) -> dict[str, Any]:
        return {"rule": self.rule} if self.reach is None else {"rule": self.rule, "reach": self.reach}


class Family(NamedTuple):
    """A rule within the bound, where every step is a contraction, and beyond it."""

    inside: Setting
    outside: Setting


def vary_gains(rule: str, mixer: MixerChoice, first: float) -> Family:
    """A rule with learned gains up to its reach over twice the first one, which `mixer` has at first."""
    return Family(*(Setting(rule, reach, mixer, (reach * first, first)) for reach in REACHES))


REACHES = (2, 8)  # up to 2 a step is a contraction
FAMILIES = {
    "delta rule": vary_gains("delta_rule", MixerChoice("deltanet"), 1.0),
    "pdn": vary_gains("pdn", MixerChoice("pdn", {"bound": 2.0}, "pdn"), 0.5),
    "vla": Family(
        *(
            Setting(
                "vla",
                reach,
                MixerChoice("vla-conv", {"normalize_writes": False, "ridge": 1 / reach, "refresh": 0.0}, "vla"),
            )
            for reach in REACHES
        )
    ),
    "free keys": Family(
        Setting("longhorn", 1, MixerChoice("longhorn")),
        Setting("any_keys", None, MixerChoice("deltanet", {"normalize_qk": False}, "free")),
    ),
}
SETTINGS = tuple(setting for family in FAMILIES.values() for setting in family)


WORDS = Words(
    subject="{rule}, up to {reach}",
    terms={"rule": {"delta_rule": "delta rule", "any_keys": "keys of any length"}},
)


class ShiftedGain(SigmoidGain):
    """beta = largest * sigmoid(y - shift), about `first` at first: gains of other ranges start alike."""

    def __init__(self, hidden_size: int, num_heads: int, largest: float, first: float) -> None:
        super().__init__(hidden_size, num_heads, largest)
        self.shift = math.log(largest / first - 1)

    def finish(self, y: Tensor) -> Tensor:
        return self.largest * torch.sigmoid(at_least_float32(y) - self.shift)


def change_gains(model: Any, gains: tuple[float, float] | None) -> None:
    """Gives the delta rules of a model other gains, with the weights that their own gains have."""
    for layer in model.modules():
        if gains is not None and isinstance(layer, DeltaNet):
            assert layer.gain is not None
            wider = ShiftedGain(layer.hidden_size, layer.heads.value_heads, *gains)
            wider.load_state_dict(layer.gain.state_dict())
            layer.gain = wider


class Steps(NamedTuple):
    """Of the layers of a model on test sequences: the largest c k^T D k of a step, the share of steps with more than 2, and the
    largest log norm of a product."""

    largest: float
    beyond: float
    log_norm: float


def read_steps(model: Any, run: RecallRun) -> Steps:
    task = make_task(run.task, pairs=run.pairs, length=run.length, vocab_size=run.vocab_size)
    rows = task.batch("test", seed=run.seed, index=0, batch_size=READ).input_ids.to(run.device)
    shares, norms = [], []
    for ids in rows:
        for layer in read_layers(model, ids, every=1):
            found = transitions(layer)
            assert found is not None and found.write is not None and found.read is not None
            write, read = (x.transpose(0, 1) for x in (found.write, found.read))
            shares.append((write * read).sum(-1))
            norms.append(log_norms(write, read))
    share = torch.cat(shares)
    return Steps(share.max().item(), (share > 2).double().mean().item(), torch.cat(norms).max().item())


class Trained(NamedTuple):
    result: RecallResult
    spike: float
    before: Steps
    after: Steps | None  # None where the loss was no longer finite

    @property
    def troubled(self) -> bool:
        return self.result.diverged or self.spike > SPIKE


def train(job: tuple[int, float, int, str]) -> Trained:
    """One training: the place of its setting in `SETTINGS`, its learning rate, seed and device."""
    place, rate, seed, device = job
    setting = SETTINGS[place]
    run = RecallRun(mixer=setting.mixer, learning_rate=rate, seed=seed, device=device, **TRAINED)
    first: list[Steps] = []

    def change(model: Any) -> None:
        change_gains(model, setting.gains)
        first.append(read_steps(model.to(device), run))

    training, norms = train_watched(run, change)
    result = training.result()
    after = None if result.diverged else read_steps(training.model, run)
    return Trained(result, largest_spike([x for x in norms if math.isfinite(x)]), first[0], after)


def measure(conditions: Conditions) -> Measurement:
    jobs = [
        (place, rate, seed, conditions.device)
        for place in range(len(SETTINGS))
        for rate in RATES
        for seed in conditions.seeds
    ]
    trained = dict(zip(jobs, in_processes(train, jobs, conditions)))
    found: list[Number] = []
    for place, setting in enumerate(SETTINGS):
        by_rate = {rate: [trained[place, rate, seed, conditions.device] for seed in conditions.seeds] for rate in RATES}
        found += count_setting(setting, by_rate)
    return Measurement(tuple(found))


def count_setting(setting: Setting, by_rate: dict[float, list[Trained]]) -> Iterator[Number]:
    """The numbers of one setting, from its trainings by rate, of every seed."""
    seeds = [one.result.run["seed"] for one in by_rate[RATES[0]]]

    def by_seed(
        measure: str, values: Sequence[float], run: Mapping[str, Plain] = {}, **column: Plain
    ) -> Iterator[Number]:
        for seed, value in zip(seeds, values, strict=True):
            yield Number(measure, value, {**setting.column, **column}, **mixer, run=run, seed=seed)

    mixer: dict[str, Any] = {"mixer": setting.mixer.name, "options": setting.mixer.options}
    for rate, trained in by_rate.items():
        yield from by_seed("rate_accuracy", [one.result.counted_value for one in trained], rate=rate)
    per_seed = list(zip(*by_rate.values()))
    yield from by_seed("diverged_share", [statistics.fmean(one.result.diverged for one in row) for row in per_seed])
    yield from by_seed("troubled_share", [statistics.fmean(one.troubled for one in row) for row in per_seed])
    yield from by_seed("largest_spike", [max(one.spike for one in row) for row in per_seed])
    best = best_results([one.result for trained in by_rate.values() for one in trained])
    yield from by_seed("accuracy", [result.counted_value for result in best], rate_field(best[0]))
    for when in ("before", "after"):
        of_rate = by_rate[best[0].run["learning_rate"]]
        steps = [getattr(one, when) or Steps(*[math.nan] * 3) for one in of_rate]
        yield from by_seed("largest_step", [x.largest for x in steps], when=when)
        yield from by_seed("beyond_share", [x.beyond for x in steps], when=when)
        yield from by_seed("log_norm", [x.log_norm for x in steps], when=when)
    if any(result.undertrained for result in best):
        yield mark_undertrained(setting.column, **mixer)


OUTCOMES = {1: " (harmed)", 0: " (perhaps harmed)", -1: ""}


def decide(found: Measurement) -> Verdict:
    rows, harmed = [], []
    accuracies: dict[str, tuple[dict[int, float], dict[int, float]]] = {
        name: (found.by_seed("accuracy", **family.inside.column), found.by_seed("accuracy", **family.outside.column))
        for name, family in FAMILIES.items()
    }
    losses = compare_seeds(accuracies)
    for name, family in FAMILIES.items():
        inside, outside = (statistics.fmean(own.values()) for own in accuracies[name])
        lost, lost_outside = (found.mean("troubled_share", **setting.column) for setting in family)
        less = losses[name]
        learns_less = 1 if less.sign > 0 and less.mean > LEAST_LOSS else -int(less.high < LEAST_LOSS)
        harmed.append(1 if lost_outside >= TROUBLED else learns_less)
        spikes = [found.largest("largest_spike", **setting.column) for setting in family]
        rows.append(
            f"{name}: accuracy {inside:.2f} inside, {outside:.2f} outside, inside - outside {less}, troubled {lost:.0%} and "
            f"{lost_outside:.0%}, largest spike {spikes[0]:.1f} and {spikes[1]:.1f}{OUTCOMES[harmed[-1]]}"
        )
    safe = all(found.largest("troubled_share", **family.inside.column) == 0 for family in FAMILIES.values())

    def outcome(*harmed: bool) -> Status:
        if not safe or not any(harmed):
            return "does not hold"
        return "holds" if all(harmed) else "holds weakly"

    return Verdict(settle(outcome, *harmed), rows)


CLAIM = Claim(
    name="own-3b",
    paper=OWN,
    source="own-3, in which nothing was trained outside of its bound",
    says=(
        "Training is safe where every step is a contraction, c k^T D k <= 2: no training diverges and no gradient spikes. "
        "Outside of it trainings diverge, gradients spike, or less is learnt."
    ),
    printed="VLA: NaN without normalised writes from 96 dimensions on (ridge 0.1)",
    setting=(
        "Shuffled recall of 8 pairs in 256 tokens, which all write to the memory; one layer of width 32 with 2 heads, 300 steps "
        "of 8, gradients scaled down to norm 1, rates 1e-2 and 3e-2. Delta rule with unit keys and pdn with x = 2: learned gains "
        "of other ranges, so that c k^T D k reaches 2 or 8, and starts at about 1 (for pdn at 1 with the largest factor). "
        "vla-conv without normalised writes and without refresh: ridge 1/2 or 1/8, so that it starts at 2 or 8. Keys of "
        "any length: deltanet without normalize_qk, beside longhorn, whose step stays below 1. A spike is the norm of the "
        "gradients over the median of the 20 steps before; a training is troubled if it diverges or has a spike above 30 (the "
        "plain delta rule had 2.1 and 7.6 at the two rates in 400 steps when the sizes were chosen)."
    ),
    expected="holds weakly",
    forecast=(
        "inside nothing is troubled, spikes stay below 15; vla with ridge 1/8 starts with products of e^20 or more and "
        "diverges or guesses, and keys of any length have spikes at 3e-2; the delta rule and pdn with gains up to 8 learn to "
        "keep steps near 1, and lose nothing at the rate that learns"
    ),
    rule=(
        "a family is harmed if outside at least a third of its trainings are troubled, or its accuracy at the best "
        "rate is lower than inside by more than 0.05 and clearly so; holds if no training "
        "inside is troubled and all four families are harmed; weakly if none inside is troubled and one family is harmed. "
        f"{INTERVALS}"
    ),
    measure=measure,
    decide=decide,
    numbers={
        "rate_accuracy": Quantity("{subject}: accuracy at rate {rate:g}"),
        "diverged_share": Quantity("{subject}: share of diverged trainings"),
        "troubled_share": Quantity("{subject}: share of troubled trainings"),
        "largest_spike": Quantity("{subject}: largest spike of gradients"),
        "accuracy": Quantity("{subject}: accuracy"),
        "largest_step": Quantity("{subject}: largest step {when} training"),
        "beyond_share": Quantity("{subject}: share of steps beyond 2 {when} training"),
        "log_norm": Quantity("{subject}: largest log norm of a product {when} training"),
        UNDERTRAINED: Quantity("{subject}"),
    },
    words=WORDS,
    seeds=(0, 1, 2),
    cost="15 minutes of two cores",
)
