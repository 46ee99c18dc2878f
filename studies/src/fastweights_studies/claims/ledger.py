"""All claims, in order: those that modules of `papers` declare, and as results of our own those of `fastweights_studies.own`."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from fastweights.checks import check_choice, check_text, closest, describe_value
from fastweights.kinds import checked

from .. import own
from . import papers
from .claim import OWN, SOURCES, Claim

__all__ = ["claim_names", "claims_of", "find_claim"]


@cache
def _ledger() -> dict[str, Claim]:
    found = {}
    for package in (papers, own):
        for module in iter_modules(package.__path__):
            claim = getattr(import_module(f"{package.__name__}.{module.name}"), "CLAIM", None)
            if claim is not None:
                found[claim.name] = claim
    return {name: found[name] for name in sorted(found, key=_order)}


def _order(name: str) -> tuple[str, int, str]:
    """C2 comes before C10, results of our own last, each with its later parts."""
    kind, number, part = re.fullmatch(r"(C|S|own-)(\d+)([b-z]?)", name).groups()  # type: ignore[union-attr]
    return kind, int(number), part


def claim_names() -> tuple[str, ...]:
    return tuple(_ledger())


@checked
def claims_of(paper: str | None = None) -> tuple[Claim, ...]:
    """The claims of one paper, of all papers, or with `OWN` the results of our own.

    Raises:
        ValueError: an unknown paper; the message lists the known ones.
    """
    if paper is None:
        return tuple(claim for claim in _ledger().values() if claim.paper != OWN)
    check_choice("paper", paper, SOURCES)
    return tuple(claim for claim in _ledger().values() if claim.paper == paper)


def find_claim(name: str) -> Claim:
    """The claim of a name, in upper or lower case.

    Raises:
        ValueError: an unknown name; the message names the nearest.
    """
    check_text("claim", name, what="the name of a claim", empty=False)
    known = {claim.upper(): claim for claim in _ledger()}
    if name.upper() not in known:
        nearest = closest(name.upper(), known)
        raise ValueError(
            f"claim must be one that `fastweights reproduce --list` shows, got {describe_value(name)}{nearest}"
        )
    return _ledger()[known[name.upper()]]
