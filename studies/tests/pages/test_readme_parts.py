"""The tables and measured sentences of README.md are generated."""

from __future__ import annotations

import dataclasses
import functools
import json
import operator
import shutil
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.pages import page_parts
from fastweights_studies.places import ROOT
from fastweights_studies.record import read_rows, write_rows

README = (ROOT / "README.md").read_text()


def test_tables_and_measured_figures_are_generated() -> None:
    assert page_parts.render(page_parts.README) == README, f"run {page_parts.COMMAND}"


def test_other_results_are_other_words(tmp_path: Path) -> None:
    """Every number is that of its row in its result file."""
    shutil.copytree(page_parts.RESULTS, tmp_path, dirs_exist_ok=True)
    replayed, longer = ", compiled by blocks, replayed", [333.0, 333.0, 333.0]

    def change(name: str, *changes: tuple[tuple[str, ...], Any]) -> None:
        path = tmp_path / f"{name}.json"
        content = json.loads(path.read_text())
        for (*keys, last), value in changes:
            functools.reduce(operator.getitem, keys, content)[last] = value
        path.write_text(json.dumps(content))

    change(
        "decode-table-nvidia-h200", (("rows", "gdn, batch 1", "tokens/s"), 123.0),
        (("rows", "softmax, batch 64, context 16384", "tokens/s"), 54321.0),
        (("rows", "softmax, batch 64, context 131072"), {"tokens/s": 1234.0}),
    )  # fmt: skip
    change("generate-nvidia-h200", (("mixers", "gdn", "prefill of 16384", "ms"), 16.384))
    gated, vla = (f"24 layers of {name}{replayed}" for name in ("gated gdn", "vla"))
    change(
        "training-steps-nvidia-h200", (("comparisons", vla, "step of the base"), 9.87),
        (("comparisons", gated, "models", gated, "step, ms"), longer),
        (("comparisons", "24 layers of gdn, replayed", "models", "24 layers of gdn", "step, ms"), [444.0] * 3),
        (("comparisons", "palimpsa-d-170m", "step of the base"), 7.65),
    )  # fmt: skip
    change("scaling-nvidia-h100-80gb-hbm3", (("trainings", "gdn-1b", "2 GPUs, DDP", "share of one GPU"), 0.123))
    change(
        "transformers-models-nvidia-h200", (("models", "qwen3_next", "times", "training step", "times faster"), 1.25)
    )
    column = "shuffled, 32 pairs, heads of 16"
    path = tmp_path / "leaderboard" / "mqar-full.json"
    rows = {(PARTS["mqar"].title(row), row.mixer): row for row in read_rows(path)}
    for mixer, value in (("gdn", 0.5), ("mesa", 1.0), ("linear", 1.0)):
        rows[column, mixer] = dataclasses.replace(rows[column, mixer], value=value)
    more = dataclasses.replace(rows[column, "gdn"], seed=1, value=0.6)
    write_rows(path, [*rows.values(), more])
    text = " ".join(page_parts.measured(tmp_path).split())
    for said in (
        "with at most 2 seeds: 1.000 with `", "the best of 33, 1.000 with `", "0.550 with `gdn`, 0.463 with `gka`",
        "`gdn` generates 120 tokens per second for one sequence", "and 54,300 at 16,384",
        "and 1,200 at 131,072. `gdn` reads a prompt at 1,000,000 tokens", "9.87 with `vla`", "`gdn` takes 333 ms, where",
        "Called eagerly it takes 444 ms", "7.65 times at 170M", "each GPU processes .12 of", "train 1.2 times as fast",
    ):  # fmt: skip
        assert said in text and said not in " ".join(README.split())


def test_the_table_of_layers_says_which_decays_there_are() -> None:
    found = [page_parts.decay(name) for name in ("softmax", "deltanet", "retnet", "gdn", "kda", "palimpsa-d")]
    assert found == ["", "none", "per head, not learned", "per head", "per key channel", "per head"]
    assert "| `pgdn` | gated DeltaNet with preconditioned write keys, as pdn has | per head | H K (V + 1) |" in README


def test_a_page_without_the_marks_of_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("no marks")
    monkeypatch.setitem(page_parts.PARTS, page, {"layers": page_parts.layers})
    with pytest.raises(ValueError, match="README.md needs the lines <!-- layers: written by"):
        page_parts.render(page)
