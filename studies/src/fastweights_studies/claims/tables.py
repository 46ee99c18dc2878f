"""Claims as tables for the terminal, and the numbers of a claim in words, which pages show too."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fastweights.analysis.table_style import add_row, plain_table

from .claim import OWN, SOURCES, Claim
from .measurement import UNDERTRAINED, Measurement, Number
from .record import ClaimRecord

__all__ = ["NumberLine", "claim_page", "claims_table", "name_number", "name_undertrained", "number_lines"]


class NumberLine(NamedTuple):
    """One number of a claim in words: its name, its mean, its range over the seeds (empty with one value), and the learning
    rate of what was trained for it (empty without one)."""

    name: str
    mean: str
    smallest: str
    largest: str
    rate: str


def name_number(claim: Claim, number: Number) -> str:
    """What a number of a claim is, in words."""
    return claim.words.name_number(claim.numbers[number.measure], number)


def name_undertrained(claim: Claim, found: Measurement) -> list[str]:
    """What was still learning at the end of its training."""
    return [name_number(claim, number) for number in found.select(UNDERTRAINED)]


def number_lines(claim: Claim, found: Measurement) -> list[NumberLine]:
    """Every number of a measurement, in order."""
    return [
        NumberLine(name_number(claim, group[0]), *_describe_values(group), _describe_rate(group[0]))
        for group in found.by_number()
        if group[0].measure != UNDERTRAINED
    ]


def _describe_values(group: Sequence[Number]) -> tuple[str, str, str]:
    """Mean, smallest and largest over the seeds."""
    values = [number.value for number in group]
    mean = f"{statistics.fmean(values):.4g}"
    if len(values) == 1:
        return mean, "", ""
    ends = (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))
    return mean, f"{ends[0]:.4g}", f"{ends[1]:.4g}"


def _describe_rate(number: Number) -> str:
    return f"{number.run['learning_rate']:.4g}" if "learning_rate" in number.run else ""


def claims_table(claims: Sequence[Claim], records: Mapping[str, ClaimRecord]) -> Table:
    """Every claim: where it is from, what was expected, what was found, what it says."""
    table = plain_table(
        "Results of our own" if claims and claims[0].paper == OWN else "Claims of the papers",
        "`fastweights reproduce CLAIM` measures one. Found: of the results in the output folder, otherwise of those that "
        "come with the library.",
        text=("claim", "paper", "runs on", "expected", "found", "what it says"),
    )
    for claim in claims:
        found: str = records[claim.name].status if claim.name in records else "-"
        larger = claim.result_name("cuda")
        if larger != claim.name and larger in records:
            found += f", on a GPU {records[larger].status}"
        runs_on = claim.device if claim.measure is not None else "-"
        expected = claim.expected if claim.has_forecast else "no forecast"
        add_row(table, claim.name, claim.paper, runs_on, expected, found, claim.says)
    return table


def claim_page(claim: Claim, record: ClaimRecord) -> Group:
    """One measured claim: what was declared, what was found, and every number."""
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="bold")
    facts.add_column(overflow="fold")
    undertrained = name_undertrained(claim, record.measurement)
    sources = record.sources()
    for fact, text in (
        ("source", f"{SOURCES[claim.paper]}, {claim.source}"),
        ("paper's numbers", claim.printed),
        ("setting", claim.setting),
        ("expected", claim.expectation),
        ("rule", claim.rule),
        ("found", f"{record.status}: {record.reason}"),
        *((("undertrained", ", ".join(undertrained)),) if undertrained else ()),
        *((("measured", "; ".join(sources)),) if sources else ()),
    ):
        add_row(facts, fact, text)
    lines = number_lines(claim, record.measurement)
    rates = any(line.rate for line in lines)
    numbers = plain_table(
        text=("number",), numbers=("mean", "smallest", "largest", *(["learning rate"] if rates else []))
    )
    for line in lines:
        add_row(numbers, *(line if rates else line[:-1]))
    return Group(Text(f"{claim.name}: {claim.says}\n", style="bold"), facts, Text(), numbers)
