"""Committed figures are of the committed results: each keeps a checksum of what it was drawn from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fastweights_studies.measure import serving_bench
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.rows import find_rows, replace_rows
from fastweights_studies.pages import (
    block,
    block_effects,
    decode_figure,
    performance,
    performance_models,
    recall_figure,
    serving_figure,
)
from fastweights_studies.pages.results import read_measured
from fastweights_studies.places import DOCS, RESULTS
from fastweights_studies.record import read_rows, select, write_rows
from PIL import Image

IMAGES = DOCS / "images"


def source(picture: Path) -> str:
    return Image.open(picture).info["Source"]


def test_recall_is_drawn_from_its_results() -> None:
    assert source(recall_figure.PICTURE) == recall_figure.source(recall_figure.read()), (
        "run python -m fastweights_studies.pages recall_figure"
    )


def test_effects_of_the_block_are_drawn_from_their_results() -> None:
    assert source(block.PICTURE) == block_effects.source(RESULTS), "run python -m fastweights_studies.pages.block"
    assert set(block_effects.SHORT) == set(block_effects.CHANGES) == set(block_effects.EFFECTS)


def test_decoding_is_drawn_from_its_results() -> None:
    devices = performance.by_device(read_measured("decode-table", "decode_table", RESULTS))
    assert devices
    for device, rows in devices.items():
        picture = IMAGES / performance_models.decode_image(device)
        assert source(picture) == decode_figure.source(rows), "run python -m fastweights_studies.pages.performance"


def test_throughput_of_servers_is_drawn_from_its_results() -> None:
    assert source(serving_figure.PICTURE) == serving_figure.source(serving_figure.read()), (
        "run python -m fastweights_studies.pages serving_figure"
    )


def test_every_figure_says_what_it_was_drawn_from() -> None:
    assert all(source(picture) for picture in IMAGES.iterdir())


@pytest.mark.slow
def test_other_results_give_another_figure(tmp_path: Path) -> None:
    """A line per rule from the smallest state on, and the checksum of just these results."""
    found = recall_figure.lines(recall_figure.read())
    assert len(found) == 12 and next(iter(found)) == "softmax"
    for own in found.values():
        states = [entry.count("state") for entry in own]
        assert len(states) == 3 and states == sorted(set(states)) and {len(entry.values) for entry in own} == {5}
    (tmp_path / "leaderboard").mkdir()
    rows = read_rows(RESULTS / "leaderboard" / "recall-full.json")
    chosen = select(rows, mixer="linear", measure="accuracy", seed=1, column={"task": "mqar-shuffled", "head_dim": 32})
    assert len(chosen) == 1
    changed = [replace(row, value=0.5) if row in chosen else row for row in rows]
    write_rows(tmp_path / "leaderboard" / "recall-full.json", changed)
    before, after = found["linear"][1], recall_figure.lines(recall_figure.read(tmp_path))["linear"][1]
    assert after.by_seed == {**before.by_seed, 1: 0.5} and after.mean < before.mean
    recall_figure.draw(tmp_path, tmp_path / "recall.png")
    drawn = source(tmp_path / "recall.png")
    assert drawn == recall_figure.source(recall_figure.read(tmp_path)) != source(recall_figure.PICTURE)


def test_throughput_of_servers_is_drawn_for_every_mixer_and_length(tmp_path: Path) -> None:
    file, origin = tmp_path / "rows.json", describe("a GPU")
    for mixer, slower in (("gdn", 1.0), ("softmax", 3.0)):
        for length in (16384, 65536):
            report = dict.fromkeys(serving_bench.KEPT.values(), slower * length) | {"completed": 8}
            rows = serving_bench.make_bench_rows("gdn-340m", mixer, length, 128, 8, 45.0, False, report, origin)
            replace_rows(file, rows)
    slow = serving_bench.make_bench_rows("gdn-340m", "gdn", 16384, 128, 8, 45.0, True, report, origin)
    replace_rows(file, slow)  # without torch.compile: not drawn
    serving_figure.draw(file, tmp_path / "serving.png")
    drawn = source(tmp_path / "serving.png")
    rows = serving_figure.read(file)
    assert drawn == serving_figure.source(rows) != serving_figure.source(find_rows(file))
    assert drawn != serving_figure.source([row for row in rows if row.column["prompt"] != 65536])
