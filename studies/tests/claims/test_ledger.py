"""The ledger is complete, and every claim says what it must."""

from pathlib import Path

import pytest
from fastweights_studies import own
from fastweights_studies.claims import (
    OWN,
    PAPERS,
    SOURCES,
    STATUSES,
    claim_names,
    claims_of,
    find_claim,
    papers,
)

PAPERS_CLAIMS = (*(f"C{number}" for number in range(1, 36)), *(f"S{number}" for number in range(1, 7)))
OWN_RESULTS = ("own-1", "own-1b", "own-1c", "own-2", "own-2b", "own-2c", "own-3", "own-3b")
NAMES = (*PAPERS_CLAIMS, *OWN_RESULTS)


def test_the_ledger_has_every_claim_in_order():
    assert claim_names() == NAMES


def test_one_file_per_claim_named_after_it():
    files = sorted(path.name.split("_")[0] for path in Path(papers.__path__[0]).glob("[cs]*.py"))
    assert files == sorted([f"c{number:02}" for number in range(1, 36)] + [f"s{number}" for number in range(1, 7)])
    ours = sorted(path.name.split("_")[0] for path in Path(own.__path__[0]).glob("o*.py"))
    assert ours == [name.replace("own-", "o") for name in OWN_RESULTS]


@pytest.mark.parametrize("name", NAMES)
def test_a_claim_says_what_is_expected_and_what_decides(name):
    claim = find_claim(name)
    assert claim.paper in SOURCES and claim.expected in STATUSES and claim.seeds and claim.cost
    assert all(claim.declaration().values())
    assert (claim.measure is None) == (claim.decide is None) == (claim.needs is not None)


def test_claims_of_a_paper():
    assert {claim.name for claim in claims_of("lattice")} == {"C14", "C15", "C33", "C34"}
    assert sum(len(claims_of(paper)) for paper in PAPERS) == len(claims_of()) == 41
    assert tuple(claim.name for claim in claims_of()) == PAPERS_CLAIMS
    assert tuple(claim.name for claim in claims_of(OWN)) == OWN_RESULTS and find_claim("OWN-2").name == "own-2"


def test_unknown_names_are_refused():
    assert find_claim("c10").name == "C10"
    with pytest.raises(ValueError, match="claim must be one .* got 'C99' .*C9"):
        find_claim("C99")
    with pytest.raises(ValueError, match="paper must be one of"):
        claims_of("mamba")
    with pytest.raises(TypeError, match="claim must be the name"):
        find_claim(3)
