"""Every table of the studies' commands on a narrow terminal: no number is split over two lines, and none is lost."""

import pytest
from fastweights_studies.claims import claims_of, committed_records
from fastweights_studies.claims.tables import claim_page, claims_table
from fastweights_studies.leaderboard import PARTS, part_rows, table_of
from fastweights_studies.leaderboard.terminal import make_table, parts_table
from fastweights_studies.places import RESULTS as MEASUREMENTS

from fastweights.layers import MIXERS
from tests.analysis.terminal_tables import check_no_number_is_split
from tests.fast_set import fast_where


def board(name, size, tmp_path):
    part = PARTS[name]
    rows = part_rows(part, size, tmp_path, MEASUREMENTS)
    rows = [*part.library(size, rows), *rows]
    if not rows:
        pytest.skip(f"no {size} trainings of the part {name} are kept yet")
    return [make_table(part, *table_of(part, size, rows, list(MIXERS)))]


def claims():
    records = committed_records()
    for claim in [*claims_of(None), *claims_of("own")]:
        if claim.name in records:
            yield claim_page(claim, records[claim.name])


def every_table(name, tmp_path):
    if name in PARTS:
        for size in ("small", "full"):
            yield from board(name, size, tmp_path)
    elif name == "leaderboard --list":
        yield parts_table(list(PARTS.values()), "full", tmp_path, MEASUREMENTS)
    elif name == "reproduce --list":
        yield claims_table(list(claims_of(None)), committed_records())
    else:
        yield from claims()


FAST = ("mqar", "tracking", "leaderboard --list", "reproduce --list")


@fast_where(lambda given: given["width"] == 60 and given["name"] in FAST)
@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", [*PARTS, "leaderboard --list", "reproduce --list", "reproduce"])
def test_no_number_is_split(name, width, tmp_path):
    check_no_number_is_split(every_table(name, tmp_path), width)
