"""Which source every row is of: exact shares, a function of seed and position."""

import numpy as np
import pytest

from fastweights.data.text.mixing import BLOCK, Mixture


def test_shares_are_exact_in_every_block():
    mixture = Mixture([5, 3, 2], seed=1)
    places = [mixture.place(row) for row in range(3 * BLOCK)]
    for block in range(3):
        sources = [source for source, _ in places[block * BLOCK : (block + 1) * BLOCK]]
        assert np.bincount(sources).tolist() == [500, 300, 200]
    for source in range(3):
        assert [place for number, place in places if number == source] == list(
            range(len(places) * (5, 3, 2)[source] // 10)
        )
    assert [source for source, _ in places[:BLOCK]] != [source for source, _ in places[BLOCK : 2 * BLOCK]]


def test_a_place_depends_on_seed_and_row_alone():
    rows = [2500, 3, 999, 1000, 0, 2500]
    mixture = Mixture([1, 1], seed=7)
    again = Mixture([1, 1], seed=7)
    assert [mixture.place(row) for row in rows] == [again.place(row) for row in rows[::-1]][::-1]
    other = Mixture([1, 1], seed=8)
    assert [mixture.place(row) for row in range(50)] != [other.place(row) for row in range(50)]


@pytest.mark.parametrize("row", [0, 1, 777, BLOCK, 2 * BLOCK + 13])
def test_rows_before_are_counted(row):
    mixture = Mixture([2, 1, 1], seed=0)
    sources = [mixture.place(number)[0] for number in range(row)]
    assert mixture.rows_before(row) == np.bincount(sources, minlength=3).tolist()


def test_a_single_source_has_all_rows_in_order():
    assert [Mixture([1.0], seed=3).place(row) for row in (0, 5, 12_345)] == [(0, 0), (0, 5), (0, 12_345)]


def test_a_source_without_rows_is_refused():
    assert Mixture([999, 1], seed=0).counts.tolist() == [999, 1]
    with pytest.raises(ValueError, match="weight of every source must be at least a thousandth of all, got 1 of 10001"):
        Mixture([10_000, 1], seed=0)
