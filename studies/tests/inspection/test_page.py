"""The files of an inspection."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
from fastweights_studies.inspection import inspect_model, save_inspection

from tests.evaluation.small import model

HYBRID = ["pgdn", "softmax", "gka"]


@pytest.mark.slow
def test_arrays_pictures_and_a_page_that_needs_nothing_else(tmp_path):
    found = inspect_model(model(HYBRID), list(range(20)), every=8)
    (tmp_path / "notes.txt").write_text("kept")
    paths = save_inspection(found, tmp_path, title="a <b> & c", facts={"model": "<m>", "tokens": 20})
    assert {path.name for path in paths} == {
        *("arrays.npz", "index.html", "inspection.json"),
        *(f"{name}.png" for name in found.panels),
    }
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in paths} | {"notes.txt"}

    arrays = np.load(tmp_path / "arrays.npz")
    described = json.loads((tmp_path / "inspection.json").read_text())
    assert described["tokens"] == 20 and described["layers"]["2"] == "layer 2, gka"
    assert {key.rpartition("/")[0] for key in arrays} == set(described["panels"])
    panel = found.panels["norms"][2][0]
    assert np.array_equal(arrays[f"norms/2/{panel.name}/y"], panel.y.numpy())

    page = (tmp_path / "index.html").read_text()
    assert "<h1>a &lt;b&gt; &amp; c</h1>" in page and "&lt;m&gt;" in page
    text = re.sub(r'src="data:[^"]*"', "", page)  # of a picture any letters may stand in a row
    assert "http" not in text and "<script" not in text and "<link" not in text
    sources = re.findall(r'src="([^"]*)"', page)
    assert len(sources) == len(found.panels)
    for name, source in zip(found.panels, sources):
        head, _, content = source.partition(",")
        assert head == "data:image/png;base64"
        assert base64.b64decode(content) == (tmp_path / f"{name}.png").read_bytes()
        assert f'href="#{name}"' in page and f'id="{name}"' in page
    last = panel.y[-1].mean().item()
    assert f"<td>{panel.y_label}</td>" in page and f"<td>{last:.3g}</td>" in page
