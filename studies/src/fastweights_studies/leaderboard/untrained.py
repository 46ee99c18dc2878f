"""The rules without training: how far from exact least squares is a memory of a given size on each stream?

No paper has run this. Setting and expectations stand here as they were before the first run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from torch import Tensor

from fastweights.layers import MIXERS, MixerChoice

from ..origin import find_origin
from ..record import Plain, Row
from .entries import EXACT, Entry
from .part import BoardPart, Column
from .request import Request
from .rules import GRID, LEFT_OUT, RULES, SAME_RULE, Gates, Rule, known_rules
from .streams import ROWS, STREAMS, Stream, StreamKind, exact_answers, first_compared

__all__ = [
    "ERROR",
    "EXPECTATIONS",
    "INFINITE",
    "SEEDS",
    "SIZES",
    "TUNING_SEED",
    "Expectation",
    "Found",
    "Measurement",
    "RulesPart",
    "find_rules",
    "gates_of",
    "measure_rule",
]

ERROR = "error"  # the measure of rows with the distance from the truth
INFINITE = 1e9  # what a distance that is not finite counts as
NOT_DECLARED = "has no declared rule (fastweights_studies.leaderboard.register_rule declares one)"
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


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """What was measured of a rule on the streams of some seeds.

    Attributes:
        gates, scale: those that were chosen, and the factor of all answers.
        distance, error: from the answers of exact least squares, and from the truth, per seed; None where they are not finite.
        exact_error: of exact least squares, from the truth.
    """

    gates: Gates
    scale: float | None
    distance: list[float | None]
    error: list[float | None]
    exact_error: list[float | None]


def measure_rule(kind: StreamKind, rule: Rule, size: int, seeds: Sequence[int] = SEEDS) -> Measurement:
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
    return Measurement(gates=gates, scale=_rounded(scale), distance=distances, error=errors, exact_error=exact_errors)


def _rounded(x: float) -> float | None:
    """To six digits, which is more than the spread over seeds leaves; None for infinite."""
    return float(f"{x:.6g}") if math.isfinite(x) else None


@dataclass(frozen=True, kw_only=True)
class RulesPart(BoardPart):
    """The part of the rules without training, whose columns are a stream at a number of channels."""

    def setting(self, size: str) -> list[Column]:
        return [
            Column(
                parameters={"stream": kind.name, "channels": channels},
                setting={
                    "tokens": kind.tokens,
                    "sequences": ROWS,
                    "exact_ridge": kind.ridge,
                    "latest_only": kind.latest_only,
                    "tuning_seed": TUNING_SEED,
                },
            )
            for kind in STREAMS.values()
            for channels in SIZES
        ]

    def differing(self, row: Row, columns: Sequence[Column]) -> list[str] | None:
        """With the gates of the rule, and the values that they may have."""
        found, rule = super().differing(row, columns), RULES.get(self.label(row))
        if found is None or rule is None:
            return found
        wanted = _grid_of(rule)
        return [*found, *(name for name in map(_grid_name, GRID) if row.run.get(name) != wanted.get(name))]

    def name_column(self, parameters: Mapping[str, Plain]) -> str:
        return f"{parameters['stream']}, d = {parameters['channels']}"

    def label(self, row: Row) -> str:
        return " ".join([str(row.mixer), *map(str, row.options.values())])

    def number(self, row: Row) -> float | None:
        return INFINITE if row.measure == self.value and row.value is None else super().number(row)

    def board_size(self, size: str) -> str:
        return "cpu"

    def cost(self, size: str) -> str:
        return "2 minutes of one core"

    def participants(self, mixers: Sequence[MixerChoice]) -> list[str]:
        return list(find_rules([choice.name for choice in mixers]))

    def listed(self, mixers: Sequence[str]) -> Sequence[str]:
        return tuple(known_rules())

    def how_to_read(self) -> str:
        return "Means over seeds, with half the spread after ±, and the place."

    def run(self, request: Request) -> Path:
        """Measure the rules of the mixers on every stream at every size, but for those of the library's that are on the board."""
        rules = {name: known_rules()[name] for name in self.participants(request.mixers)}
        board = self.board(request)
        entries = self.entries(self.counted(board.rows, request.size))
        there = {(entry.column, entry.label) for entry in entries if entry.seeds == SEEDS}
        for column in self.setting(request.size):
            title = self.name_column(column.parameters)
            for name, rule in rules.items():
                if name not in RULES or (title, name) not in there:  # a rule of the user may have changed
                    board.add(self._rows(column, rule))
            request.reporter.note(f"{title}: {len(rules)} rules")
        return board.path

    def _rows(self, column: Column, rule: Rule) -> list[Row]:
        """The rows of a rule in a column, and of exact least squares there."""
        channels = int(column.parameters["channels"])  # type: ignore[arg-type]
        found = measure_rule(STREAMS[str(column.parameters["stream"])], rule, channels)
        gates = {name: getattr(found.gates, name) for name in rule.gates}
        make = partial(Row, task=self.name, unit="1", column=column.parameters, origin=find_origin("cpu"))
        own = partial(
            make,
            mixer=rule.mixer,
            options=rule.options,
            run={**column.setting, **_grid_of(rule), **gates, "scale": found.scale, "state": rule.state(channels)},
        )
        return [
            row
            for seed, distance, error, exact in zip(SEEDS, found.distance, found.error, found.exact_error)
            for row in (
                own(measure=self.value, seed=seed, value=distance),
                own(measure=ERROR, seed=seed, value=error),
                make(measure=EXACT, seed=seed, value=exact, run=column.setting),
            )
        ]


def _grid_name(gate: str) -> str:
    return f"{gate}_grid"


def _grid_of(rule: Rule) -> dict[str, Plain]:
    """What the gates of a rule may be, as its rows say it."""
    return {_grid_name(gate): [*GRID[gate]] for gate in rule.gates}


def find_rules(mixers: Sequence[str]) -> tuple[str, ...]:
    """The rules of these mixers, each once; all where they are the whole registry.

    Raises:
        ValueError: a mixer whose rule cannot be measured without training, unless others can.
    """
    rules = known_rules()
    if set(mixers) >= set(MIXERS):
        return tuple(rules)
    wanted = dict.fromkeys(SAME_RULE.get(name, name) for name in mixers)
    found = tuple(name for name in wanted if name in rules)
    if not found:
        reasons = "; ".join(f"{name} {LEFT_OUT.get(name, NOT_DECLARED)}" for name in wanted)
        raise ValueError(
            f"mixers must name at least one whose rule runs without training, of {', '.join(rules)}: {reasons}"
        )
    return found


class Found:
    """What was measured of rules, looked up by stream, rule and channels."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = {(*entry.rows[0].column.values(), entry.label): entry for entry in entries}

    def mean(self, stream: str, rule: str, channels: int) -> float:
        """The mean distance over seeds; `INFINITE` and more where one is not finite."""
        return self._entries[stream, channels, rule].mean

    def gates(self, stream: str, rule: str, channels: int) -> dict[str, float]:
        """Those of the best choice."""
        return gates_of(self._entries[stream, channels, rule])


def gates_of(entry: Entry) -> dict[str, float]:
    """The gates that were chosen for a rule."""
    return {name: value for name, value in entry.run.items() if name in GRID and isinstance(value, float)}


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
