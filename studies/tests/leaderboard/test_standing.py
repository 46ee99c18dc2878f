"""Places: ties by paired differences, single seeds, both directions."""

from fastweights_studies.leaderboard import PARTS, places
from fastweights_studies.leaderboard.cells import LEARNING, UNMARKED
from fastweights_studies.leaderboard.standing import compare_entries, visible_difference
from fastweights_studies.leaderboard.tables import NOT_RUN, part_table

from .toy import make_row

TITLES = ["shuffled, 8 pairs, heads of 16", "shuffled, 8 pairs, heads of 32"]


def entries(part="mqar", **values):
    return PARTS[part].entries(row for mixer, seeds in values.items() for row in rows(mixer, seeds, part=part))


def rows(mixer, values, part="mqar", **run):
    """Of a mixer, a row per seed."""
    return [make_row(part, size="full", mixer=mixer, seed=seed, value=x, **run) for seed, x in enumerate(values)]


def shown(found):
    return {one.entry.label: (one.place, one.tied) for one in found}


def test_lower_is_better_where_the_part_says_so():
    assert [one.entry.label for one in places(entries(a=(2.0, 2.1), b=(1.0, 1.1)), "lower")] == ["b", "a"]


def test_places_see_what_the_spread_of_seeds_hides():
    """All seeds of a are as far ahead of b as of one another: the ranges overlap, the differences do not hold zero."""
    found = entries(a=(0.60, 0.70, 0.80, 0.90), b=(0.55, 0.652, 0.751, 0.849), c=(0.9, 0.5, 0.6, 0.8))
    assert shown(places(found, "higher")) == {"a": (1, True), "b": (2, True), "c": (1, True)}
    assert [one.entry.label for one in places(found, "lower")] == ["c", "b", "a"]
    assert shown(places(found, "lower"))["a"] == (2, True)
    assert not compare_entries(found)[0, 1].tied and len(compare_entries(found)) == 3


def test_holms_correction_is_over_all_pairs_of_the_column():
    two = entries(a=(0.60, 0.61, 0.62), b=(0.50, 0.53, 0.51))
    many = entries(a=(0.60, 0.61, 0.62), b=(0.50, 0.53, 0.51), c=(0.1, 0.9, 0.5), d=(0.8, 0.2, 0.6), e=(0.3, 0.6, 0.1))
    assert not compare_entries(two)[0, 1].tied and compare_entries(many)[0, 1].tied
    assert visible_difference(many) > visible_difference(two) > 0.01


def test_mixers_with_fewer_seeds_leave_the_others_their_intervals():
    full = entries(a=(0.60, 0.61, 0.62), b=(0.50, 0.53, 0.51))
    few = entries(a=(0.60, 0.61, 0.62), b=(0.50, 0.53, 0.51), c=(0.1, 0.9), d=(0.8, 0.2), e=(0.3, 0.6))
    assert compare_entries(few)[0, 1] == compare_entries(full)[0, 1] and not compare_entries(full)[0, 1].tied
    assert list(compare_entries(few)) == [(0, 1), *((x, y) for x in range(5) for y in range(x + 1, 5) if y > 1)]
    assert compare_entries(few)[0, 2].confidence > compare_entries(few)[0, 1].confidence
    more = entries(a=(0.60, 0.61, 0.62), b=(0.50, 0.53, 0.51), own=(0.1, 0.9, 0.2, 0.3), other=(0.8, 0.2, 0.6, 0.4))
    assert compare_entries(more)[0, 1].confidence < 0.992  # five comparisons have three seeds, the sixth has four


def test_single_seeds_have_no_paired_place():
    found = entries(a=(0.9,), b=(0.1, 0.2), c=(0.1, 0.2))
    assert shown(places(found, "higher")) == {"a": (None, False), "b": (1, True), "c": (1, True)}
    assert visible_difference(entries(a=(0.9,), b=(0.1, 0.2))) is None
    found = entries(a=(0.9,), b=(0.8,), c=(0.7,), d=(0.1, 0.2), e=(0.1, 0.2))
    assert {place for place, _ in shown(places(found, "higher")).values()} == {None}  # d is compared with one of four


def test_the_table_marks_ties_undertrained_and_diverged_runs_and_what_was_not_run():
    found = [
        *rows("gdn", [0.9, 0.94], undertrained=True), *rows("softmax", [0.91, 0.93]), *rows("kda", [0.5, 0.54], diverged=1),
        *rows("gdn", [0.6, 0.6], column=1, state=1024),
    ]  # fmt: skip
    head, lines = part_table(PARTS["mqar"], PARTS["mqar"].entries(found), ["softmax", "gdn", "kda", "vla"])
    assert head == ["mixer", "state", "parameters", *TITLES]
    assert {line[0]: line[3:] for line in lines} == {
        "gdn": ["0.920 ±0.020 (1=)*", "0.600 ±0.000 (1)"],
        "softmax (keeps every token)": ["0.920 ±0.010 (1=)", NOT_RUN],
        "kda": ["0.520 ±0.020 (3)!", NOT_RUN],
        "vla": [NOT_RUN, NOT_RUN],
    }
    assert {line[0]: line[1:3] for line in lines}["gdn"] == ["9 to 1,024", "1,234"]


def test_the_table_has_the_exact_regression_and_perplexities():
    found = [*rows("gdn", [0.5, 0.6], part="regression", chance=1.0)]
    found += [
        make_row("regression", size="full", value=x, seed=n, measure="exact_error") for n, x in enumerate((0.2, 0.3))
    ]
    _, lines = part_table(PARTS["regression"], PARTS["regression"].entries(found), [])
    assert lines[0] == ["*exact ridge regression*", "", "", "0.250"] and lines[1][3] == "0.550 ±0.050 (1)"
    _, lines = part_table(PARTS["language"], entries("language", gdn=[2.0]), [])
    assert lines[0][-1] == "7.389"
    _, lines = part_table(PARTS["language"], entries("language", gdn=[1.9, 2.1]), [])
    assert lines[0][-1] == "7.389 ±0.777 (1)"


def test_language_models_are_not_marked_as_still_learning():
    found = [
        *rows("gdn", [2.0], part="language", undertrained=True),
        *rows("kda", [3.0], part="language", undertrained=True, diverged=1),
    ]
    _, lines = part_table(PARTS["language"], PARTS["language"].entries(found), [])
    assert lines[0][-1] == "7.389" and lines[1][-1].endswith("!") and "*" not in lines[1][-1]
    for part in ("language", "language-matched"):
        assert UNMARKED in PARTS[part].explanation() and LEARNING not in PARTS[part].explanation()
    assert LEARNING in PARTS["mqar"].explanation() and UNMARKED not in PARTS["mqar"].explanation()


def test_the_best_mean_of_all_columns_stands_first_and_lacking_columns_last():
    for part, order in (("mqar", "bac"), ("regression", "abc")):
        found = [
            row
            for column, values in enumerate(({"a": 0.9, "b": 0.8, "c": 1.0}, {"a": 0.1, "b": 0.3}))
            for mixer, value in values.items()
            for row in rows(mixer, [value], part=part, column=column)
        ]
        _, lines = part_table(PARTS[part], PARTS[part].entries(found), [])
        assert "".join(line[0] for line in lines) == order


def test_a_row_counts_as_long_as_its_own_column_is_the_declared_one():
    part = PARTS["mqar"]
    row, other = make_row(size="full"), make_row(size="full", column=1)
    assert part.counted([row, other], "full") == [row, other]
    changed = make_row(size="full", steps=1)
    assert part.differing(changed, part.setting("full")) == ["steps"] and part.counted([changed, other], "full") == [
        other
    ]
    assert part.differing(row, part.setting("small")) is None and part.counted([row], "small") == []
