"""What blocks explain of the differences between mixers."""

import numpy as np
import pytest
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.leaderboard.confound import (
    BASELINES,
    BlockParts,
    at_upper_edge,
    block_parts,
    explain,
    explain_columns,
)

from fastweights.layers import MIXERS

from .toy import make_row


@pytest.mark.parametrize(
    ("name", "parts"),
    (
        ("softmax", BlockParts(False, False, "none")),
        ("linear", BlockParts(False, True, "none")),
        ("retnet", BlockParts(True, True, "fixed")),
        ("mamba2", BlockParts(True, True, "drawn")),
        ("gla", BlockParts(True, True, "bias")),
        ("pdn", BlockParts(False, True, "none")),
        ("gdn", BlockParts(False, True, "drawn")),
        ("palimpsa-d", BlockParts(True, True, "drawn")),
        ("vla", BlockParts(False, False, "none")),
        ("rwkv7", BlockParts(True, False, "bias")),
    ),
)
def test_parts_are_those_of_the_published_layer(name, parts):
    assert block_parts(name) == parts


def test_every_mixer_has_parts():
    found = {name: block_parts(name) for name in MIXERS}
    assert {one.decay for one in found.values()} == {"none", "drawn", "bias", "fixed"}


def test_numbers_that_are_the_blocks_are_explained_whole_and_others_by_chance():
    numbers = {name: 2.0 * block_parts(name).gate - block_parts(name).convolution for name in MIXERS}
    share, by_chance, p = explain(numbers)
    assert share == pytest.approx(1) and p == pytest.approx(1e-4) and 0.1 < by_chance < 0.2
    draws = np.random.default_rng(1)
    chances = [explain(dict(zip(MIXERS, draws.normal(size=len(MIXERS)))))[2] for _ in range(20)]
    assert min(chances) > 1e-3 and max(chances) > 0.5


def test_columns_are_one_family_and_means_over_seeds_count():
    gates = {name: float(block_parts(name).gate) for name in MIXERS}
    rows = [
        make_row("mqar", size="full", mixer=name, seed=seed, value=gate + noise)
        for name, gate in gates.items()
        for seed, noise in ((0, 0.25), (1, -0.25))
    ]
    entries = PARTS["mqar"].entries(rows)
    (one,) = explain_columns(entries).values()
    assert one.share == pytest.approx(1) and (one.mixers, one.fewest, one.most) == (len(MIXERS), 2, 2)
    assert one.without_baselines == pytest.approx(1) and set(BASELINES) < set(MIXERS)
    other = [entry.__class__(**{**vars(entry), "column": "another"}) for entry in entries]
    both = explain_columns([*entries, *other])
    assert [found.p for found in both.values()] == pytest.approx([2 * one.p] * 2)


def test_the_upper_edge_is_that_of_the_grid_of_a_cell():
    rows = [
        make_row("mqar", size="full", mixer=name, seed=0, value=0.5, learning_rate=rate)
        for name, rate in (("linear", 1e-3), ("gdn", 3e-3), ("mesa", None))
    ]
    assert at_upper_edge(PARTS["mqar"].entries(rows)) == (1, 2)
