"""How pages are written: tables, numbers, origins, marks of generated parts, and the check that a page is up to date."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastweights_studies.record import Origin, Row

__all__ = [
    "Page",
    "anchor",
    "describe_origins",
    "escape_cell",
    "join_spread",
    "least_to_most",
    "lines",
    "list_item",
    "number",
    "replace_part",
    "share",
    "short_commit",
    "table",
]

WIDTH = 130  # of a line of text
# The versions that the origin of a page names, in this order.
NAMED = {
    "torch": "torch",
    "triton": "triton",
    "fla": "flash-linear-attention",
    "python": "Python",
    "fastweights": "fastweights",
}


@dataclass(frozen=True)
class Page:
    """A file that a command writes, and what it holds. command: `python -m` before it."""

    path: Path
    render: Callable[[], str]
    command: str

    def write(self) -> None:
        self.path.write_text(self.render())
        print(f"written to {self.path}")

    def check(self) -> None:
        """AssertionError where the file is not what the command writes; it names the command."""
        assert self.path.read_text() == self.render(), (
            f"{self.path.name} is not up to date; run python -m {self.command}"
        )


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def escape_cell(text: str) -> str:
    """A text as a cell of a table."""
    return text.replace("|", "\\|")


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading, so that links work there and in the site."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def lines(items: Sequence[str]) -> list[str]:
    """One block of text, or none."""
    return ["\n".join(items) + "\n"] if items else []


def list_item(text: str) -> str:
    """An item of a list; no line breaks inside code."""
    whole = re.sub("`[^`]*`", lambda code: code[0].replace(" ", "\0"), text)
    filled = textwrap.fill(whole, WIDTH, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
    return filled.replace("\0", " ") + "\n"


def joined(names: Sequence[str]) -> str:
    """ "a, b and c"; a single name alone."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def least_to_most(counts: Sequence[int]) -> str:
    """The first and the last of sorted counts, once where they are the same."""
    return join_spread(*map(str, [*counts[:1], *counts[-1:]]))


def join_spread(*ends: str) -> str:
    """ "1.0 to 2.0"; a number once where both ends read the same."""
    return " to ".join(dict.fromkeys(ends))


def number(x: float | None, digits: int = 3) -> str:
    """So many significant digits, without an exponent."""
    if x is None or math.isnan(x):
        return "–"
    if x == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(x))), 0)
    return f"{x:,.{decimals}f}"


def share(x: float) -> str:
    """Two digits of a number below 1."""
    return f"{x:.2f}".removeprefix("0")


def replace_part(page: str, name: str, written: str, command: str) -> str:
    """The text of a page with other words between the marks of a generated part.

    Raises:
        ValueError: the page lacks the marks.
    """
    begin, end = f"<!-- {name}: written by `python -m {command}` -->", f"<!-- end of {name} -->"
    marks = re.compile(rf"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"the page needs the lines {begin} and {end}")
    return marks.sub(lambda _: f"{begin}\n\n{written}\n{end}", page)


def full_commit(origin: Origin) -> str:
    return origin.commit + " with uncommitted changes" * origin.changed


def short_commit(origin: Origin) -> str:
    return origin.commit[:7] + " with uncommitted changes" * origin.changed


def describe_origins(
    rows: Iterable[Row], subject: Callable[[Row], Hashable], name: Callable[[Row], str] = lambda row: ""
) -> str:
    """When, at which commit and with which versions rows were measured; of several runs first the newest.

    Args:
        subject: equal for rows that count as one. name: what such rows are called, where not all are of the newest run; without
            names their number is told.
    """
    runs: dict[tuple[str, ...], dict[Hashable, Row]] = {}
    newest = None
    for row in rows:
        if newest is None or row.origin.date > newest.date:
            newest = row.origin
        runs.setdefault(_run(row.origin), {}).setdefault(subject(row), row)
    if newest is None:
        return ""
    versions = [f"{title} {newest.versions[key]}" for key, title in NAMED.items() if key in newest.versions]
    said = [f"Measured {_when(newest)}; {', '.join(versions)}."]
    here = runs.pop(_run(newest))
    if runs:
        named = [title for row in here.values() if (title := name(row))]
        said.append(f"Of these files are the rows {'; '.join(named)}." if named else f"{_count(here)} measured then.")
    said += [f"{_count(older)} measured {_when(next(iter(older.values())).origin)}." for older in runs.values()]
    return " ".join(said)


def describe_runs(rows: Iterable[Row]) -> str:
    """Machines, days, commits and versions of rows that several runs have measured, none of which replaces another."""
    origins = {(row.origin.device, row.origin.date[:10], full_commit(row.origin)): row.origin for row in rows}
    devices, days, commits = (joined(sorted(set(names))) for names in zip(*origins))
    versions = {
        f"{title} {origin.versions[key]}"
        for origin in origins.values()
        for key, title in NAMED.items()
        if key in origin.versions
    }
    return f"Measured on {devices}, {days}, at commit {commits}; {', '.join(sorted(versions))}."


def _count(rows: Mapping[Hashable, Row]) -> str:
    return f"{len(rows)} row{'s were' if len(rows) > 1 else ' was'}"


def _run(origin: Origin) -> tuple[str, ...]:
    return origin.date[:10], full_commit(origin), origin.versions.get("files", "")


def _when(origin: Origin) -> str:
    files = f", files {origin.versions['files']}" if "files" in origin.versions else ""
    return f"{origin.date[:10]} at commit {full_commit(origin)}{files}"
