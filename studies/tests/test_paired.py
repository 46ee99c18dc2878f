"""Paired differences against values of tables and of scipy: intervals, Holm's correction, power."""

import numpy as np
import pytest
from fastweights_studies.paired import adjust_holm, compare, compare_family, smallest_visible
from scipy import stats

# Student's sleep data (1908): hours gained by ten patients with each of two drugs.
FIRST = dict(enumerate((0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0)))
SECOND = dict(enumerate((1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4)))


def test_students_own_data_give_the_published_interval():
    found = compare(SECOND, FIRST)  # R: t.test(paired = TRUE): 1.58, 95% from 0.7001142 to 2.4598858, p 0.002833
    assert (found.mean, found.low, found.high, found.p) == pytest.approx(
        (1.58, 0.7001142, 2.4598858, 0.002833), rel=2e-4
    )
    assert found.sign == 1 and compare(FIRST, SECOND).sign == -1 and not found.tied and found.seeds == 10
    wider = compare(SECOND, FIRST, confidence=0.999)
    assert wider.tied and wider.sign == 0 and "a tie (visible from" in str(wider) and "tie" not in str(found)


def test_differences_are_taken_seed_by_seed_and_only_over_seeds_of_both():
    left, right = {0: 1.0, 1: 5.0, 2: 9.0, 7: 100.0}, {2: 8.9, 1: 4.88, 0: 0.9, 8: -100.0}
    found = compare(left, right)
    test = stats.ttest_rel([1.0, 5.0, 9.0], [0.9, 4.88, 8.9])
    assert found.seeds == 3 and found.p == pytest.approx(test.pvalue) and not found.tied
    assert compare({0: 1.0, 1: 5.0, 2: 9.0}, {0: 8.9, 1: 0.9, 2: 4.88}).tied  # the same values, other seeds


def test_equal_differences_and_too_few_seeds():
    same = compare({0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert same.tied and same.p == 1 and same.visible == 0
    apart = compare({0: 0.3, 1: 0.5}, {0: 0.1, 1: 0.3})
    assert not apart.tied and apart.p == 0 and apart.low == apart.high == pytest.approx(0.2)
    with pytest.raises(ValueError, match="at least two seeds, got 1"):
        compare({0: 1.0, 1: 2.0}, {0: 1.0})
    with pytest.raises(ValueError, match="finite"):
        compare({0: 1.0, 1: float("inf")}, {0: 1.0, 1: 2.0})


def test_the_bootstrap_agrees_with_t_for_many_seeds_and_repeats_itself():
    draws = np.random.default_rng(3).normal(0.3, 1.0, 80)
    left, right = dict(enumerate(draws)), dict.fromkeys(range(80), 0.0)
    by_t, drawn = compare(left, right), compare(left, right, method="bootstrap")
    assert (drawn.low, drawn.high) == pytest.approx((by_t.low, by_t.high), abs=0.03)
    assert drawn.tied == by_t.tied and drawn == compare(left, right, method="bootstrap")


def test_holm_as_in_textbooks():
    # statsmodels multipletests(method="holm"), R p.adjust: the same example
    assert adjust_holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert adjust_holm([0.5, 0.9]) == [1.0, 1.0] and adjust_holm([]) == []


def test_a_family_ties_exactly_where_holms_method_says_so():
    rng = np.random.default_rng(1)
    zeros = dict.fromkeys(range(5), 0.0)
    ties = []
    for effects in ((3.0, 2.0, 1.5, 1.0, 0.0), (1.2, 1.1, 1.0, 0.9, 0.8), (9.0, 8.0, 7.0, 6.0, 5.0)):
        pairs = {e: (dict(enumerate(rng.normal(e, 0.6, 5))), zeros) for e in effects}
        single = {e: compare(*pair) for e, pair in pairs.items()}
        family = compare_family(pairs)
        holm = adjust_holm([one.p for one in single.values()])
        for (e, found), p in zip(family.items(), holm, strict=True):
            assert found.p == p and found.tied == (p > 0.05) and found.confidence >= 0.95
            assert found.low <= single[e].low and found.visible >= single[e].visible
        ties.append((sum(one.tied for one in single.values()), sum(one.tied for one in family.values())))
    assert all(alone <= together for alone, together in ties) and any(alone < together < 5 for alone, together in ties)


def test_the_smallest_visible_difference_is_that_of_tables_of_power():
    # G*Power, paired t test, two-sided 5%, power .8: an effect of 0.5 takes 34 pairs (33.37), one of 0.8 takes 15 (14.30)
    assert smallest_visible(1.0, 33) > 0.5 > smallest_visible(1.0, 34)
    assert smallest_visible(1.0, 14) > 0.8 > smallest_visible(1.0, 15)
    assert smallest_visible(2.0, 5) == pytest.approx(2 * smallest_visible(1.0, 5))
    draws = np.random.default_rng(0).normal(smallest_visible(1.0, 5), 1.0, (4000, 5))
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.02)
