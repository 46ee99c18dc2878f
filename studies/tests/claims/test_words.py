"""Numbers are selected by their fields, and named by one set of words."""

import dataclasses

import pytest
from fastweights_studies.claims import Measurement, Number, Quantity, Words, committed_records, find_claim
from fastweights_studies.claims.tables import name_number, number_lines

from fastweights.layers import MixerChoice

from .made import make_numbers

FIXED = MixerChoice("vla", {"adaptive": False}, "A fixed")
RECORDS = committed_records()
FOUND = Measurement(
    (
        *make_numbers("accuracy", [0.5, 0.7], "vla", pairs=4, weights=0.02),
        *make_numbers("accuracy", [0.1, 0.2], FIXED, pairs=4, weights=0.05),
        *make_numbers("accuracy", [0.3], "gdn", pairs=8),
    )
)


def test_numbers_are_selected_by_fields() -> None:
    assert FOUND.values("accuracy", "gdn") == FOUND.values("accuracy", pairs=8) == [0.3]
    assert FOUND.values("accuracy", MixerChoice("vla")) == FOUND.values("accuracy", weights=0.02) == [0.5, 0.7]
    assert FOUND.values("accuracy", FIXED) == FOUND.values("accuracy", options={"adaptive": False}) == [0.1, 0.2]
    assert FOUND.largest("accuracy") == 0.7 and FOUND.smallest("accuracy", "vla") == 0.1
    assert FOUND.select("accuracy", pairs=9) == FOUND.select("loss") == []
    assert [len(group) for group in FOUND.by_number()] == [2, 2, 1]


def test_values_are_those_of_one_number() -> None:
    with pytest.raises(KeyError, match="one number of accuracy with mixer vla, pairs 4"):
        FOUND.values("accuracy", "vla", pairs=4)
    for select in (FOUND.values, FOUND.largest, FOUND.smallest):
        with pytest.raises(KeyError, match="a number of accuracy"):
            select("accuracy", pairs=9)


def test_words_are_those_of_the_fields() -> None:
    words = Words(
        subject="{mixer}, {pairs} pairs, {weights}",
        terms={"weights": {0.02: "", 0.05: "first weights 0.05"}, "mixer": {"gdn": "GDN"}},
        choices=(MixerChoice("vla"), FIXED),
    )
    names = [words.name_number(Quantity("{subject}"), group[0]) for group in FOUND.by_number()]
    assert names == ["vla, 4 pairs", "A fixed, 4 pairs, first weights 0.05", "GDN, 8 pairs"]
    more = dataclasses.replace(FOUND.select("accuracy", FIXED)[0], options={"adaptive": False, "ridge": 0.1})
    assert words.label_mixer(more) == "A fixed"  # the choice with most of its options
    share = Number("share", 0.5, {"share": 0.2})
    assert words.name_number(Quantity("{share:.0%} routed"), share) == "20% routed"


@pytest.mark.parametrize("name", RECORDS)
def test_committed_numbers_have_names_of_their_own(name: str) -> None:
    """Each with the unit that the claim declares."""
    record = RECORDS[name]
    claim = find_claim(record.claim)
    lines = number_lines(claim, record.measurement)
    assert len({line.name for line in lines}) == len(lines) and all(line.mean for line in lines)
    for row, number in zip(record.rows, record.measurement.numbers, strict=True):
        assert row.unit == claim.numbers[row.measure].unit and row.task == claim.name
        assert "{" not in name_number(claim, number)
