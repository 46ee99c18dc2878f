"""own-2b: memories that are trained together with the softmax attention which answers a share of the queries."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.data import RecallTask, make_task
from fastweights.data.task import IGNORE_INDEX
from fastweights.evaluation.reading import evaluating
from fastweights.training import RecallRun
from fastweights.training.recall.objectives import Measured, Objective, make_objective
from fastweights.training.recall.train import Training

from ..claims.claim import OWN, Claim
from ..claims.conditions import Conditions
from ..claims.measurement import UNDERTRAINED, Column, Measurement, Number, mark_undertrained
from ..claims.verdict import INTERVALS, Status, Verdict, compare_seeds, settle
from ..claims.watched import in_processes, train_watched
from ..claims.words import Quantity, Words
from ..paired import Difference
from .confidence import auroc
from .memory_variance import layer_variances, lookup_in_place_of_memory
from .o2_confidence_of_memories import LOADS, MIXERS, ORDERS, ROUTED, SHARPNESS, make_mixers

RATE = 1e-2
PAIRS = 16
TRAINED: dict[str, Any] = {
    "task": "mqar-shuffled",
    "pairs": PAIRS,
    "vocab_size": 128,
    "width": 32,
    "heads": 4,
    "layers": 1,
    "steps": 600,
    "batch_size": 16,
    "test_examples": 256,
    "evaluations": 1,
}
SEQUENCES = 128  # per load
SHARE = 0.2
# What is answered by attention in training: nothing, random queries, the most uncertain ones, everything.
TRAININGS = {"memory_alone": 0.0, "random_queries": SHARE, "uncertain_queries": SHARE, "attention_alone": 1.0}
HYBRID_WORDS = Words(
    subject="{mixer}, {training}",
    terms={
        "training": {
            "memory_alone": "memory alone",
            "random_queries": "random queries",
            "uncertain_queries": "uncertain queries",
            "attention_alone": "attention alone",
        },
        "order": {"fitted_variance": "fitted variance"},
        "score": {"fitted_variance": "the fitted variance", "mean_log_variance": "the mean log variance"},
    },
)
ROUTED_ACCURACY = Quantity("{subject}: accuracy with {share:.0%} routed by {order}")
# One training: the names of its mixer and of its kind, its seed and device. Found: its numbers, and whether it was still
# learning.
Job = tuple[str, str, int, str]
Found = tuple[list[Number], bool]


def find_log_variances(model: Any, ids: Tensor) -> Tensor:
    """Of all heads, [B, T, F]."""
    return layer_variances(model, ids).clamp_min(1e-12).log()


def find_uncertainty(model: Any, ids: Tensor) -> Tensor:
    """The mean logarithm of the variances of all heads, [B, T]."""
    return find_log_variances(model, ids).mean(-1)


def choose_highest(order: Tensor, share: float) -> Tensor:
    """Which of N places are the share of them with the highest values."""
    chosen = torch.zeros_like(order, dtype=torch.bool)
    chosen[order.argsort(descending=True, stable=True)[: round(share * len(order))]] = True
    return chosen


@dataclass(frozen=True)
class Routed:
    """The objective of a task where attention answers some of the queries, with a sharpness that is learned."""

    plain: Objective
    training: str

    def build(self, config: Any) -> Any:
        return self.plain.build(config)

    def inputs(self, batch: Any) -> tuple[Tensor, ...]:
        return self.plain.inputs(batch)

    def loss(self, model: Any, *inputs: Tensor) -> Tensor:
        ids, positions, _ = inputs
        order = torch.rand(len(positions), device=ids.device)
        if self.training == "uncertain_queries":
            order = find_uncertainty(model, ids).flatten()[positions]
        places = torch.zeros_like(ids, dtype=torch.bool)
        places.view(-1)[positions] = choose_highest(order, TRAININGS[self.training])
        with lookup_in_place_of_memory(model, places, model.log_sharpness.exp()):
            return self.plain.loss(model, *inputs)

    def measure(self, model: Any, *, seed: int, examples: int, device: str) -> Measured:
        return self.plain.measure(model, seed=seed, examples=examples, device=device)


def add_sharpness(model: Any) -> None:
    model.log_sharpness = nn.Parameter(torch.tensor(math.log(SHARPNESS[0])))


class Queries:
    """The queries of test sequences of several loads, one after the other, and what a model answers to them."""

    def __init__(self, run: RecallRun, index: int) -> None:
        self.batches = []
        for load in LOADS:
            task = make_task(run.task, pairs=int(load * run.pairs), vocab_size=run.vocab_size)
            assert isinstance(task, RecallTask)
            batch = task.batch("test", seed=run.seed, index=index, batch_size=SEQUENCES)
            self.batches.append([x.to(run.device) for x in batch])

    def log_variances(self, model: Any) -> Tensor:
        return torch.cat([find_log_variances(model, ids)[labels != IGNORE_INDEX] for ids, labels in self.batches])

    def uncertainty(self, model: Any) -> Tensor:
        return self.log_variances(model).mean(-1)

    def right(self, model: Any, routed: Tensor, sharpness: float) -> Tensor:
        """Whether each answer is right where attention answers the routed queries."""
        sizes = [int((labels != IGNORE_INDEX).sum()) for _, labels in self.batches]
        found = []
        for (ids, labels), chosen in zip(self.batches, routed.split(sizes), strict=True):
            asks = labels != IGNORE_INDEX
            places = torch.zeros_like(asks)
            places[asks] = chosen
            with lookup_in_place_of_memory(model, places, sharpness):
                found.append((model(ids).logits.argmax(-1) == labels)[asks])
        return torch.cat(found).double()


def train_hybrid(mixer: str, training: str, seed: int, device: str, settings: dict[str, Any]) -> Training:
    choice = next(choice for choice in make_mixers() if choice.label == mixer)
    run = RecallRun(mixer=choice, learning_rate=RATE, seed=seed, device=device, **settings)
    plain = make_objective(run.make_task())
    trained, _ = train_watched(run, add_sharpness, plain if training == "memory_alone" else Routed(plain, training))
    return trained


def train(job: Job) -> Found:
    trained = train_hybrid(*job, TRAINED)
    with evaluating(trained.model):
        return measure_model(trained.model, trained.run, job[1]), trained.result().undertrained


def find_sharpness(model: Any, run: RecallRun, training: str) -> float:
    """The learned one; for the memory alone, which was not trained with attention, the best one on other sequences."""
    if training != "memory_alone":
        return float(model.log_sharpness.exp())
    fits = Queries(run, 1)
    everything = torch.ones_like(fits.uncertainty(model), dtype=torch.bool)
    return max(SHARPNESS, key=lambda x: fits.right(model, everything, x).mean().item())


def measure_model(model: Any, run: RecallRun, training: str) -> list[Number]:
    """Accuracies by share and order of routing."""
    sharpness = find_sharpness(model, run, training)
    queries = Queries(run, 0)
    order = {"variance": queries.uncertainty(model)}
    order["chance"] = torch.rand(len(order["variance"]), generator=torch.Generator().manual_seed(run.seed))
    found = [Number("sharpness", sharpness)]
    for name in ORDERS:
        for share in ROUTED:
            right = queries.right(model, choose_highest(order[name].to(run.device), share), sharpness)
            found.append(Number("routed_accuracy", right.mean().item(), {"share": share, "order": name}))
            if share == 0 and name == ORDERS[0]:
                found.append(Number("wrong_auroc", auroc(order["variance"], right == 0)))
    return found


def measure(conditions: Conditions) -> Measurement:
    return measure_kinds(train, TRAININGS, conditions)


def measure_kinds(train: Callable[[Job], Found], trainings: Iterable[str], conditions: Conditions) -> Measurement:
    """Numbers of every mixer, kind of training and seed."""
    kinds = [(mixer, training) for mixer in MIXERS for training in trainings]
    jobs = [(*kind, seed, conditions.device) for kind in kinds for seed in conditions.seeds]
    trained = dict(zip(jobs, in_processes(train, jobs, conditions)))
    fields: dict[str, dict[str, Any]] = {
        choice.label: {"mixer": choice.name, "options": choice.options} for choice in make_mixers()
    }
    found: list[Number] = []
    for mixer, training in kinds:
        column: Column = {"training": training}
        learning = False
        for seed in conditions.seeds:
            numbers, undertrained = trained[mixer, training, seed, conditions.device]
            learning = learning or undertrained
            found += [
                replace(number, column={**column, **number.column}, **fields[mixer], seed=seed) for number in numbers
            ]
        if learning:
            found.append(mark_undertrained(column, **fields[mixer]))
    return Measurement(tuple(found))


Accuracies = Mapping[int, float]  # by seed


def accuracies_of(
    found: Measurement, mixer: str, training: str, share: float, order: str = "variance"
) -> dict[int, float]:
    return found.by_seed("routed_accuracy", mixer, training=training, share=share, order=order)


def compare_hybrids(
    hybrids: Mapping[str, tuple[Accuracies, Mapping[str, Accuracies]]],
) -> dict[str, dict[str, Difference]]:
    """How far the hybrid of each mixer is above what it is compared with, by its names, as one family.

    hybrids: by mixer, the hybrid and the others.
    """
    pairs = {(mixer, name): (ours, own) for mixer, (ours, others) in hybrids.items() for name, own in others.items()}
    found = compare_seeds(pairs)
    return {mixer: {name: found[mixer, name] for name in others} for mixer, (_, others) in hybrids.items()}


def describe_hybrid(ours: Accuracies, others: Mapping[str, Accuracies], gains: Mapping[str, Difference]) -> str:
    shown = ", ".join(f"{name} {statistics.fmean(own.values()):.3f} ({gains[name]})" for name, own in others.items())
    return f"the hybrid {statistics.fmean(ours.values()):.3f}, {shown}"


def decide(found: Measurement) -> Verdict:
    hybrids = {
        mixer: (
            accuracies_of(found, mixer, "uncertain_queries", SHARE),
            {
                "a random share": accuracies_of(found, mixer, "random_queries", SHARE, "chance"),
                "memory alone": accuracies_of(found, mixer, "memory_alone", 0.0),
                "routing in the test alone": accuracies_of(found, mixer, "memory_alone", SHARE),
            },
        )
        for mixer in MIXERS
    }
    gains = compare_hybrids(hybrids)
    rows, halfway = [], []
    for mixer, (ours, others) in hybrids.items():
        memory = statistics.fmean(others["memory alone"].values())
        attention = statistics.fmean(accuracies_of(found, mixer, "attention_alone", 1.0).values())
        halfway.append(statistics.fmean(ours.values()) - memory >= (attention - memory) / 2)
        rows.append(f"{mixer}: {describe_hybrid(ours, others, gains[mixer])}, attention alone {attention:.3f}")
    status = settle(judge(halfway), *(gain.sign for own in gains.values() for gain in own.values()))
    return Verdict(status, ["accuracy with 20% of the queries answered by attention", *rows])


def judge(enough: Sequence[bool]) -> Callable[..., Status]:
    """What hybrids come to, given whether each is better than the three that it is compared with. enough: by mixer, whether it
    has what else the claim asks for."""

    def outcome(*better: bool) -> Status:
        of_mixer = [better[first : first + 3] for first in range(0, len(better), 3)]
        if all(map(all, of_mixer)) and all(enough):
            return "holds"
        return "holds weakly" if any(own[0] and own[1] for own in of_mixer) else "does not hold"

    return outcome


CLAIM = Claim(
    name="own-2b",
    paper=OWN,
    source="own-2, in which models were not trained with the attention that they are routed to",
    says=(
        "A hybrid whose memory sends its most uncertain fifth of the queries to softmax attention, trained so, recalls more "
        "than one that sends a random fifth, than the memory alone and than one that was routed in the test alone, and has at "
        "least half of what attention alone is better by."
    ),
    printed="none; hybrids of the papers choose layers and not queries",
    setting=(
        "Shuffled recall of 16 pairs, 128 tokens; one layer of width 32 with 4 heads of 8 channels, so that the memory cannot "
        "hold every pair; 600 steps of 16, rate 1e-2 for all (with another seed rls recalled 53% of 16 pairs when the sizes "
        "were chosen). In training nothing, a random fifth of the queries, the fifth of a batch with the highest mean log "
        "variance, or all of them are answered by softmax attention over the layer's own keys and values, with a learned "
        "sharpness (for the memory alone the best of 10, 30 and 100 on other sequences). Tested on half, all and twice the pairs "
        "together, where 0 to 100% of the queries are routed by the mean log variance of the heads or by chance."
    ),
    expected="holds weakly",
    forecast=(
        "rls: memory alone 0.45, a random fifth 0.55, the hybrid 0.62, routed in the test alone 0.55, attention alone 0.95, so "
        "that a fifth is not half of the way; palimpsa-d: the hybrid beats a random fifth by 0.03 at most, because its variance "
        "ranks badly (own-2)"
    ),
    rule=(
        "Of differences paired by seed: holds if for both mixers the hybrid is clearly better than a random share (trained and "
        "tested so), than the memory alone and than routing in the test alone, and is at least halfway from the memory alone to "
        "attention alone; weakly if for one mixer it is better than a random share and the memory alone; not resolved where ties "
        f"leave that open. {INTERVALS}"
    ),
    measure=measure,
    decide=decide,
    numbers={
        "sharpness": Quantity("{subject}: sharpness"),
        "routed_accuracy": ROUTED_ACCURACY,
        "wrong_auroc": Quantity("{subject}: AUROC of wrong answers of the memory"),
        UNDERTRAINED: Quantity("{subject}"),
    },
    words=HYBRID_WORDS,
    seeds=(0, 1, 2),
    cost="10 minutes of two cores",
)
