"""Tables, numbers and the origin of a result file, as docs/performance.md has them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def anchor(heading: str) -> str:
    """The anchor that GitHub gives a heading, so that links work there and in the site."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def lines(items: Sequence[str]) -> list[str]:
    """One block of text, or none."""
    return ["\n".join(items) + "\n"] if items else []


def least_to_most(counts: Sequence[int]) -> str:
    """The first and the last of sorted counts, once where they are the same."""
    return " to ".join(map(str, sorted({*counts[:1], *counts[-1:]})))


def number(x: float | None, digits: int = 3) -> str:
    """So many significant digits, without an exponent."""
    if x is None or math.isnan(x):
        return "–"
    if x == 0:
        return "0"
    decimals = max(digits - 1 - math.floor(math.log10(abs(x))), 0)
    return f"{x:,.{decimals}f}"


def origin(content: Mapping[str, Any]) -> str:
    """Machine, versions and commit in a line or two; files: `source` in environment.py."""
    versions = [
        f"{title} {content[key]}"
        for key, title in {
            "torch": "torch", "triton": "triton", "fla": "flash-linear-attention", "python": "Python",
            "fastweights": "fastweights",
        }.items()
        if content.get(key)
    ]  # fmt: skip
    source = f", files {content['source']}" if "source" in content else ""
    return (
        f"Measured {content['time'][:10]} at commit {content['commit']}{source}; {', '.join(versions)}.{older(content)}"
    )


def older(content: Mapping[str, Any]) -> str:
    """Which rows are of an earlier run of other files."""
    found: dict[str, list[str]] = {}
    rows = content.get("rows", {})
    for key, row in rows.items():
        if "measured" in row:
            when = row["measured"]
            found.setdefault(f"{when['time'][:10]} at commit {when['commit']}, files {when['source']}", []).append(key)
    here = [key for key, row in rows.items() if "measured" not in row]
    said = [f" Of these files are the rows {'; '.join(here)}."] if found else []
    return "".join([*said, *(f" {len(keys)} rows were measured {when}." for when, keys in found.items())])
