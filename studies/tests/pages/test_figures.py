"""Committed figures are of the committed results: each keeps a checksum of what it was drawn from."""

from __future__ import annotations

import json
from pathlib import Path

from fastweights_studies.measure.environment import digest
from fastweights_studies.pages import (
    block,
    block_effects,
    decode_figure,
    performance,
    performance_models,
    recall_figure,
)
from fastweights_studies.pages.results import read_measured
from fastweights_studies.places import DOCS, RESULTS
from PIL import Image

IMAGES = DOCS / "images"


def source(picture: Path) -> str:
    return Image.open(picture).info["Source"]


def test_recall_is_drawn_from_its_results() -> None:
    content = json.loads(recall_figure.RESULTS.read_text())
    assert source(recall_figure.PICTURE) == digest(content), "run python -m fastweights_studies.pages.recall_figure"


def test_effects_of_the_block_are_drawn_from_their_results() -> None:
    assert source(block.PICTURE) == block_effects.source(RESULTS), "run python -m fastweights_studies.pages.block"
    assert set(block_effects.SHORT) == set(block_effects.CHANGES) == set(block_effects.EFFECTS)


def test_decoding_is_drawn_from_its_results() -> None:
    devices = performance.by_device(read_measured("decode-table", "decode_table", RESULTS))
    assert devices
    for device, rows in devices.items():
        picture = IMAGES / performance_models.decode_image(device)
        assert source(picture) == decode_figure.source(rows), "run python -m fastweights_studies.pages.performance"


def test_every_figure_says_what_it_was_drawn_from() -> None:
    assert all(source(picture) for picture in IMAGES.iterdir())


def test_other_results_give_another_figure(tmp_path: Path) -> None:
    """A point per mixer and size, and the checksum of just these results."""
    content = json.loads(recall_figure.RESULTS.read_text())
    sizes = {
        mixer: [row.state_size for row in rows] for mixer, rows in recall_figure.lines(recall_figure.RESULTS).items()
    }
    assert {"linear", "deltanet", "rls"} <= set(sizes)
    assert all(len(rows) == 3 and rows == sorted(set(rows)) for rows in sizes.values())
    content["runs"][0]["accuracy"] = 0.0
    changed = tmp_path / "results.json"
    changed.write_text(json.dumps(content))
    recall_figure.draw(changed, tmp_path / "recall.png")
    assert source(tmp_path / "recall.png") == digest(content) != source(recall_figure.PICTURE)
