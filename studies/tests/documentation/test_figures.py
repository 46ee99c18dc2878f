"""Committed figures are of the committed results: each keeps a checksum of what it was drawn from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastweights_studies.measure.environment import digest
from fastweights_studies.pages import performance, performance_models, recall_figure
from PIL import Image

from .site import ROOT

IMAGES = ROOT / "docs" / "images"


def source(picture: Path) -> str:
    return Image.open(picture).info["Source"]


def test_recall_is_drawn_from_its_results() -> None:
    content = json.loads(recall_figure.RESULTS.read_text())
    assert source(recall_figure.PICTURE) == digest(content), "run python -m fastweights_studies.pages.recall_figure"


@pytest.mark.parametrize("path", sorted(performance.RESULTS.glob("decode-table-*.json")), ids=lambda path: path.name)
def test_decoding_is_drawn_from_its_results(path: Path) -> None:
    content = json.loads(path.read_text())
    picture = IMAGES / performance_models.decode_image(content)
    assert source(picture) == digest(content), "run python -m fastweights_studies.pages.performance"


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
