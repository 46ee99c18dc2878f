"""The tables and measured sentences of README.md are generated."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.pages import block_effects, page_parts
from fastweights_studies.places import ROOT
from fastweights_studies.record import read_rows, select, write_rows

README = (ROOT / "README.md").read_text()


def test_other_results_are_other_words(tmp_path: Path) -> None:
    """Every number is that of its row in its result file."""
    shutil.copytree(page_parts.RESULTS, tmp_path, dirs_exist_ok=True)

    def change(name: str, value: float, number: int = 1, **fields: Any) -> None:
        path = tmp_path / f"{name}.json"
        rows = read_rows(path)
        changed = select(rows, **fields)
        assert len(changed) == number
        write_rows(path, [replace(row, value=value) if row in changed else row for row in rows])

    table, steps = "decode-table-nvidia-h200", "training-steps-nvidia-h200"
    change(table, 123.0, mixer="gdn", measure="tokens_per_second", column={"batch": 1})
    speed = {"mixer": "softmax", "measure": "tokens_per_second"}
    change(table, 54321.0, **speed, column={"batch": 64, "context": 16384})
    path = tmp_path / f"{table}.json"
    rows = read_rows(path)
    (long,) = select(rows, mixer="softmax", measure="fits", column={"batch": 64, "context": 131072})
    write_rows(path, [*rows, replace(long, measure="tokens_per_second", value=1234.0)])
    served = {"mixer": "softmax", "measure": "tokens_per_second", "column": {"launched": False, "prompt": 65536}}
    change("serving-bench-nvidia-h200", 1000.0, **served)
    fast = {"compiled": "blocks", "replayed": True}
    (vla,) = select(read_rows(tmp_path / f"{steps}.json"), mixer="vla", measure="step_ms", column=fast)
    (base,) = select(
        read_rows(tmp_path / f"{steps}.json"), mixer="gdn", measure="step_ms", run={**vla.run, "side": "base"}
    )
    change(steps, 9.87 * base.value, mixer="vla", measure="step_ms", column=fast)
    gated = {"mixer": "gdn", "options": {"output_gate": "silu"}, "measure": "step_ms"}
    change(steps, 333.0, **gated, column=fast)
    phase = {"model": "qwen3_next", "phase": "training_step"}
    for accelerated, ms in ((True, 4.0), (False, 5.0)):
        column = {**phase, "accelerated": accelerated}
        change("transformers-models-nvidia-h200", ms, 5, measure="phase_ms", column=column)
    skip = {"effect": "palimpsa-d-skip", "side": "after"}
    change("block-effects-nvidia-h200", 0.75, 10, measure="accuracy", column=skip)
    text = " ".join(page_parts.measured(tmp_path).split())
    for said in (
        "`gdn` generates 120 tokens per second for one sequence", "and 54,300 at 16,384",
        "and 1,200 at 131,072.", "9.87 with `vla`", "`gdn` takes 333 ms, and",
        "train 1.2 times as fast", "and 374.2 times as many", "0.75 without its skip connection",
    ):  # fmt: skip
        assert said in text and said not in " ".join(README.split()), said


def test_the_table_of_layers_says_which_decays_there_are() -> None:
    found = [page_parts.decay(name) for name in ("softmax", "deltanet", "retnet", "gdn", "kda", "palimpsa-d")]
    assert found == ["", "none", "per head, not learned", "per head", "per key channel", "per head"]
    row = "| `pgdn` | gated DeltaNet with preconditioned write keys, as pdn has | per head | H K (V + 1) |"
    assert row in page_parts.LAYERS.read_text()


def test_effects_of_the_block_are_those_of_their_rows(tmp_path: Path) -> None:
    """Means of the seeds, and the interval of the family: a difference that all seeds share is no tie."""
    rows = read_rows(page_parts.RESULTS / "block-effects-nvidia-h200.json")
    given = {"before": 0.25, "after": 0.5}
    changed = [
        replace(row, value=given[str(row.column["side"])] + 0.001 * (row.seed or 0) * (row.column["side"] == "after"))
        if row.column["effect"] == "palimpsa-d-skip" and row.measure == "accuracy"
        else row
        for row in rows
    ]
    write_rows(tmp_path / "block-effects-nvidia-h200.json", changed)
    line = next(line for line in block_effects.measured(tmp_path).splitlines() if "skip_init" in line)
    assert line.split(" | ")[1:] == ["0.25", "0.50", "+0.25 [+0.25, +0.26] |"]


def test_the_families_of_the_readme_have_every_mixer_once() -> None:
    listed = [name for names, _ in page_parts.FAMILIES.values() for name in names.split()]
    assert sorted(listed) == sorted(page_parts.own_mixers())
    assert len(page_parts.FAMILIES) < 20  # the table fits a screen


def test_a_page_without_the_marks_of_a_part_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text("no marks")
    monkeypatch.setitem(page_parts.PARTS, page, {"layers": page_parts.layers})
    with pytest.raises(ValueError, match="the page needs the lines <!-- layers: written by"):
        page_parts.render(page)
