"""The rules without training: how far from exact least squares is a memory of a given size on each stream?

No paper has run this. Setting and expectations stand here as they were before the first run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from torch import Tensor

from .record import Board, measured_here
from .rules import GRID, RULES, Gates, Rule, known_rules
from .streams import STREAMS, Stream, StreamKind, exact_answers, first_compared

__all__ = [
    "EXPECTATIONS",
    "SEEDS",
    "SIZES",
    "TUNING_SEED",
    "Expectation",
    "Found",
    "declaration",
    "measure_rule",
    "measure_untrained",
]

SIZES = (8, 16, 32, 64)  # key channels, and as many value channels
SEEDS = (0, 1, 2, 3, 4)
TUNING_SEED = 1000  # the stream that gates and read scale are chosen on


@dataclass(frozen=True)
class Compared:
    """A stream's answers of the last part: what is right, and what exact least squares says."""

    kind: StreamKind
    stream: Stream
    truth: Tensor
    exact: Tensor

    def answers(self, rule: Rule, gates: Gates) -> Tensor:
        return rule.answers(self.stream, gates)[:, first_compared(self.kind.tokens) :]


@lru_cache(len(SEEDS) + 1)  # all rules are measured on one stream before the next
def compared(name: str, seed: int, size: int) -> Compared:
    kind = STREAMS[name]
    stream = kind.make(seed, size)
    return Compared(kind, stream, stream.truth[:, first_compared(kind.tokens) :], exact_answers(stream, kind))


def distance(answers: Tensor, wanted: Tensor) -> float:
    """|answers - wanted|^2 / |wanted|^2 over all tokens: 1 for answers of zero; infinite where an answer is not finite."""
    found = ((answers - wanted).square().sum() / wanted.square().sum()).item()
    return found if math.isfinite(found) else math.inf


def read_scale(answers: Tensor, wanted: Tensor) -> float:
    """The one number that brings the answers nearest to the wanted ones: a layer's norm and projection have it too."""
    power = answers.square().sum().item()
    scale = (answers * wanted).sum().item() / power if power > 0 else 0.0
    return scale if math.isfinite(scale) else 0.0


def measure_rule(kind: StreamKind, rule: Rule, size: int, seeds: Sequence[int] = SEEDS) -> dict[str, Any]:
    """Choose gates and read scale on the tuning stream, then measure on the streams of the seeds."""
    tuning = compared(kind.name, TUNING_SEED, size)
    tried = []
    for gates in rule.choices():
        answers = tuning.answers(rule, gates)
        scale = read_scale(answers, tuning.exact)
        tried.append((distance(scale * answers, tuning.exact), gates, scale))
    _, gates, scale = min(tried, key=lambda one: one[0])  # of equal ones the first of the grid
    rows = []
    for seed in seeds:
        test = compared(kind.name, seed, size)
        answers = scale * test.answers(rule, gates)
        rows.append((distance(answers, test.exact), distance(answers, test.truth), distance(test.exact, test.truth)))
    distances, errors, exact_errors = ([_rounded(x) for x in column] for column in zip(*rows, strict=True))
    return {
        "stream": kind.name, "rule": rule.name, "size": size, "state": rule.state(size), "seeds": list(seeds),
        "gates": {name: getattr(gates, name) for name in rule.gates}, "scale": _rounded(scale),
        "distance": distances, "error": errors, "exact error": exact_errors,
    }  # fmt: skip


def _rounded(x: float) -> float | None:
    """To six digits, which is more than the spread over seeds leaves; None for infinite."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


class Found:
    """The measured rows, looked up by stream, rule and size."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self.rows = {(row["stream"], row["rule"], row["size"]): row for row in rows}

    def mean(self, stream: str, rule: str, size: int, what: str = "distance") -> float:
        values = self.rows[stream, rule, size][what]
        return math.inf if None in values else statistics.fmean(values)

    def gates(self, stream: str, rule: str, size: int) -> dict[str, float]:
        return self.rows[stream, rule, size]["gates"]


@dataclass(frozen=True)
class Expectation:
    """An outcome expected before anything was run. came_out: whether the measured rows say so."""

    says: str
    came_out: Callable[[Found], bool]


def everywhere(check: Callable[[int], bool], sizes: Sequence[int] = SIZES) -> bool:
    return all(check(size) for size in sizes)


SUMS = ("linear", "gla", "pla", "pgla", "gka", "mesa")  # rules that add every value, whatever the memory answers

EXPECTATIONS = (
    Expectation(
        "interference: mesa and rls come within 0.1 of exact least squares at every size but the square one, d = 32",
        lambda found: (
            everywhere(
                lambda d: max(found.mean("interference", rule, d) for rule in ("mesa", "rls")) < 0.1, (8, 16, 64)
            )
            and max(found.mean("interference", rule, 32) for rule in ("mesa", "rls")) > 0.1
        ),
    ),
    Expectation(
        "interference: deltanet is nearer to exact least squares than linear at every size",
        lambda found: everywhere(
            lambda d: found.mean("interference", "deltanet", d) < found.mean("interference", "linear", d)
        ),
    ),
    Expectation(
        "interference: vla lies between deltanet and rls at every size",
        lambda found: everywhere(
            lambda d: (
                found.mean("interference", "rls", d)
                < found.mean("interference", "vla", d)
                < found.mean("interference", "deltanet", d)
            )
        ),
    ),
    Expectation(
        "interference: the diagonal preconditioner of pdn does not see a common direction that is no axis: within 10% of "
        "deltanet at every size",
        lambda found: everywhere(
            lambda d: abs(found.mean("interference", "pdn", d) / found.mean("interference", "deltanet", d) - 1) < 0.1
        ),
    ),
    Expectation(
        "overwrite: deltanet is nearer than every rule that adds values without looking (linear, gla, pla, pgla, gka, mesa), at "
        "16 channels and more",
        lambda found: everywhere(
            lambda d: found.mean("overwrite", "deltanet", d) < min(found.mean("overwrite", rule, d) for rule in SUMS),
            (16, 32, 64),
        ),
    ),
    Expectation(
        "overwrite: the best gain of deltanet is 1 at every size",
        lambda found: everywhere(lambda d: found.gates("overwrite", "deltanet", d)["gain"] == 1),
    ),
    Expectation(
        "forgetting: the best decay of gla, gdn and pgdn is none at every size",
        lambda found: everywhere(
            lambda d: all(found.gates("forgetting", rule, d)["decay"] == 1 for rule in ("gla", "gdn", "pgdn"))
        ),
    ),
    Expectation(
        "forgetting: palimpsa-d is nearer than gla at every size",
        lambda found: everywhere(
            lambda d: found.mean("forgetting", "palimpsa-d", d) < found.mean("forgetting", "gla", d)
        ),
    ),
    Expectation(
        "forgetting: mesa and rls come within 0.05 at 16 channels and more",
        lambda found: everywhere(
            lambda d: max(found.mean("forgetting", rule, d) for rule in ("mesa", "rls")) < 0.05, (16, 32, 64)
        ),
    ),
    Expectation(
        "noise: the best gain of deltanet is at most 0.2 at every size",
        lambda found: everywhere(lambda d: found.gates("noise", "deltanet", d)["gain"] <= 0.2),
    ),
    Expectation(
        "noise: deltanet at its best gain is more than twice as far as rls at every size",
        lambda found: everywhere(lambda d: found.mean("noise", "deltanet", d) > 2 * found.mean("noise", "rls", d)),
    ),
    Expectation(
        "noise, a control: rls and mesa at ridge 1 are the best linear predictor and come within 1e-6 at every size",
        lambda found: everywhere(lambda d: max(found.mean("noise", rule, d) for rule in ("mesa", "rls")) < 1e-6),
    ),
    Expectation(
        "no rule is the nearest on all four streams at 16 channels",
        lambda found: len({min((found.mean(stream, rule, 16), rule) for rule in RULES)[1] for stream in STREAMS}) > 1,
    ),
)


def declaration() -> dict[str, Any]:
    """What was written before the run, as a result repeats it."""
    return {
        "streams": {kind.name: kind.says for kind in STREAMS.values()},
        "rules": {rule.name: list(rule.gates) for rule in RULES.values()},
        "grid": {name: list(values) for name, values in GRID.items()},
        "first gates": asdict(Gates()),
        "sizes": list(SIZES),
        "tuning seed": TUNING_SEED,
        "expected": [expectation.says for expectation in EXPECTATIONS],
    }


def measure_untrained(
    output: Path, rules: Sequence[str] = tuple(RULES), report: Callable[[str], None] = lambda line: None
) -> Board:
    """Measure the rules on every stream at every size, but for the rows of the library's rules that the folder `output` has."""
    board = Board.opened(output, "rules", "cpu", declaration())
    where = measured_here("cpu")
    for kind in STREAMS.values():
        for size in SIZES:
            for name in rules:
                key = f"{kind.name}, d = {size}, {name}"
                if key not in board.rows or name not in RULES:  # a rule of the user may have changed
                    board.add(key, {**measure_rule(kind, known_rules()[name], size), "measured": where})
            report(f"{kind.name}, d = {size}: {len(rules)} rules")
    return board
