"""All claims, in order: every module of `claims` declares one."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from ..checks import check_choice, check_text, closest
from . import claims
from .claim import PAPERS, Claim

__all__ = ["claim_names", "claims_of", "find_claim"]


@cache
def _ledger() -> dict[str, Claim]:
    found = {}
    for module in iter_modules(claims.__path__):
        claim = import_module(f"{claims.__name__}.{module.name}").CLAIM
        found[claim.name] = claim
    return {name: found[name] for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[str, int]:
    """C2 comes before C10."""
    letter, number = re.fullmatch(r"([CS])(\d+)", name).groups()  # type: ignore[union-attr]
    return letter, int(number)


def claim_names() -> tuple[str, ...]:
    return tuple(_ledger())


def claims_of(paper: str | None = None) -> tuple[Claim, ...]:
    """The claims of one paper, or all.

    Raises:
        ValueError: an unknown paper; the message lists the known ones.
    """
    if paper is not None:
        check_choice("paper", paper, PAPERS)
    return tuple(claim for claim in _ledger().values() if paper in (None, claim.paper))


def find_claim(name: str) -> Claim:
    """The claim of a name, in upper or lower case.

    Raises:
        ValueError: an unknown name; the message names the nearest.
    """
    check_text("claim", name, what="the name of a claim", empty=False)
    if name.upper() not in _ledger():
        raise ValueError(
            f"claim must be one that `fastweights reproduce --list` shows, got {name!r}{closest(name.upper(), _ledger())}"
        )
    return _ledger()[name.upper()]
