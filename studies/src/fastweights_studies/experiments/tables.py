"""Claims as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from fastweights.analysis.table_style import add_row, plain_table

from .claim import OWN, SOURCES, Claim
from .record import ClaimRecord

__all__ = ["claim_page", "claims_table", "numbers_text"]


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
    for fact, text in (
        ("source", f"{SOURCES[claim.paper]}, {claim.source}"),
        ("paper's numbers", claim.printed),
        ("setting", claim.setting),
        ("expected", claim.expectation),
        ("rule", claim.rule),
        ("found", f"{record.status}: {record.reason}"),
        *((("undertrained", ", ".join(record.undertrained)),) if record.undertrained else ()),
        *((("measured", record.origin),) if record.origin else ()),
    ):
        add_row(facts, fact, text)
    numbers = plain_table(text=("number",), numbers=("mean", "smallest", "largest"))
    for name in record.numbers:
        add_row(numbers, name, *numbers_text(record, name))
    return Group(Text(f"{claim.name}: {claim.says}\n", style="bold"), facts, Text(), numbers)


def numbers_text(record: ClaimRecord, name: str) -> tuple[str, str, str]:
    """Mean, smallest and largest over the seeds; the last two empty where there is one."""
    found = record.measurement
    mean = f"{found.mean(name):.4g}"
    if len(found.values[name]) == 1:
        return mean, "", ""
    return mean, f"{found.smallest(name):.4g}", f"{found.largest(name):.4g}"
