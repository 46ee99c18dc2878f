"""docs/block.md says what the boards, the effects of parts and claim C22 say."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from fastweights_studies.claims import load_record, save_record
from fastweights_studies.leaderboard import PARTS
from fastweights_studies.measure.block_effects import EFFECTS, SETTINGS, SIZES
from fastweights_studies.pages import added_parts, block, block_effects, leaderboard
from fastweights_studies.pages.evidence import RESULTS
from fastweights_studies.record import Row, read_rows, select, write_rows

from fastweights.layers.decay import HeadDecay
from fastweights.training import RecallExperiment
from fastweights.training.recall.train import Training


@pytest.mark.slow
def test_numbers_are_those_of_the_results(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    board = tmp_path / "leaderboard" / "mqar-full.json"
    rows = read_rows(board)
    write_rows(board, [replace(row, value=(len(str(row.mixer)) % 7) / 7) for row in rows])
    effects = tmp_path / "block-effects-nvidia-h200.json"
    rows = read_rows(effects)
    changed = select(rows, measure="accuracy", column={"effect": "gdn-windows", "side": "after"})
    assert len(changed) == 10
    write_rows(effects, [replace(row, value=0.123) if row in changed else row for row in rows])
    record = load_record(tmp_path / "claims" / "C22.json")
    fair = [row for row in record.rows if row.mixer == "linear" and row.column.get("setting") == "convolutions"]
    lower = [
        replace(row, value=row.value - 0.5) if row in fair and row.value is not None else row for row in record.rows
    ]
    save_record(tmp_path / "claims", replace(record, rows=lower))
    page, other = block.render(), block.render(tmp_path)
    assert "| recall: shuffled, 32 pairs, heads of 16 | 33 | 1 | 84% |" in page
    assert "| recall: shuffled, 32 pairs, heads of 16 | 33 | 1 | 84% |" not in other
    assert (
        "| language: held out | 32 | 1 to 3 | 55% |" in page and "| language: held out | 32 | 1 to 3 | 55% |" in other
    )
    assert "| 0.98 | 0.12 |" in other and "`linear` 1.000" in page and "`linear` 0.500" in other
    assert "28 of 32 cells of language" in page and "58 of 66 cells of regression" in page


@pytest.mark.slow
def test_the_smaller_size_has_a_table_of_its_own_once_it_is_measured(tmp_path: Path) -> None:
    without, having = (shutil.copytree(RESULTS, tmp_path / name) for name in ("without", "having"))
    for folder in (without, having):
        (folder / "block-effects-cpu.json").unlink(missing_ok=True)
    rows = read_rows(RESULTS / "block-effects-nvidia-h200.json")
    of_cpu = [replace(row, origin=replace(row.origin, device="a CPU")) for row in rows if row.seed in (0, 1, 2)]
    write_rows(having / "block-effects-cpu.json", of_cpu)
    assert block_effects.measured(without, large=False) == "" and "At width 64" not in block.render(without)
    assert "At width 64, with 32 sequences and one rate of .003, 3 seeds:" in block.render(having)
    assert block_effects.measured(having) == block_effects.measured(without) == block_effects.measured(RESULTS)


def test_parts_of_a_block_are_compared_with_the_column_of_their_size(tmp_path: Path) -> None:
    """The recall part has other sizes of state too, which do not count."""
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    board = tmp_path / "leaderboard" / "recall-blocks-full.json"
    rows = read_rows(board)
    of_gates = select(rows, measure="accuracy", mixer="gdn", column={"block": "with-gate"})
    same = {
        row.seed: row.value
        for row in select(read_rows(tmp_path / "leaderboard" / "recall-full.json"), measure="accuracy", mixer="gdn")
        if (row.column["task"], row.column["head_dim"]) == ("mqar-shuffled", 32)
    }
    assert len(of_gates) == len(same) == 5
    write_rows(board, [replace(row, value=(same[row.seed] or 0) - 0.125) if row in of_gates else row for row in rows])
    added = added_parts.find_added(tmp_path / "leaderboard", tmp_path)
    sections = (
        added_parts.render_added(added),
        leaderboard.section(PARTS["recall-blocks"], "full", tmp_path / "leaderboard", tmp_path),
    )
    for page in sections:
        assert "| `gdn` | -0.125 [-0.125, -0.125] |" in page
    gated = fmean(value - 0.125 for value in same.values() if value)
    seeds = ", ".join(f"{(same[seed] or 0) - 0.125:.2f}" for seed in sorted(same))
    assert f"| {gated:.3f} ({seeds}) |" in sections[0]
    clearest = added_parts.describe_clearest(added)
    assert f"block `gdn` recalls {gated + 0.125:.2f} of them (mean of 5 seeds; guessing has 0.024)" in clearest
    assert f"{gated:.2f} with an output gate" in clearest


@pytest.mark.slow
def test_rules_in_one_block_are_compared_by_their_seeds(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    board = tmp_path / "leaderboard" / "recall-full.json"
    mine = {"gdn": 0.9, "deltanet": 0.6}

    def value(row: Row) -> float:
        return mine.get(str(row.mixer), 0.5) + (row.seed or 0) / 1000

    rows = [replace(row, value=value(row)) for row in read_rows(board) if row.measure == "accuracy"]
    columns = len({str(row.column) for row in rows})
    write_rows(board, rows)
    page = block.render(tmp_path)
    assert "better than linear attention: `deltanet` and `gdn`.**" in page
    lines = [line for line in page.splitlines() if line.startswith(("| `gdn` | 0.902", "| `deltanet` | 0.602"))]
    assert lines[0].count("| all |") == lines[1].count("`softmax`, ") == columns and "`gdn`" not in lines[1]
    board.unlink()
    assert "The rules in one block" not in block.render(tmp_path)


@pytest.mark.slow
def test_language_models_in_one_block_are_compared_by_their_seeds(tmp_path: Path) -> None:
    shutil.copytree(RESULTS, tmp_path, dirs_exist_ok=True)
    board = tmp_path / "leaderboard" / "language-proxies-full.json"
    losses = {"softmax": 3.0, "gdn": 4.0, "kda": 4.5, "palimpsa-d": 5.5, "linear": 5.0}

    def value(row: Row) -> float:
        if row.measure == "found":
            return float((row.mixer, row.seed) == ("gdn", 1))
        longest = row.column["what"] == "context" and row.column["at"] == 65536
        worse = 3.0 if longest and row.mixer == "softmax" else 0.0
        wide = 2.0 * (row.seed or 0) * (row.mixer == "kda")
        return losses[str(row.mixer)] + worse + wide + (row.seed or 0) / 1000

    rows = [replace(row, value=value(row)) for row in read_rows(board) if row.mixer in losses]
    diverged = [replace(row, mixer="rls", value=None) for row in rows if row.mixer == "linear"]
    write_rows(board, [*rows, *diverged])
    page = block.render(tmp_path)
    section = " ".join(page.partition("## Language models in one block")[2].partition("\n## ")[0].split())
    cells = "4.001 ±0.001 | -1 [-1, -1] | {} |"
    assert f"| `gdn` | 0.003 | {cells.format('+1 [+1, +1]')} {cells.format('-2 [-2, -2]')}" in section
    assert "in rows of 2,048 tokens: `gdn`.** Ties: `kda`. Worse: `palimpsa-d`." in section
    assert "there, is better than `linear`, `gdn` and `palimpsa-d`, ties with `kda` and is worse than none." in section
    assert "it is better than none, ties with `kda` and is worse than `linear`, `gdn` and `palimpsa-d`." in section
    assert "`softmax` is better than `gdn`, `linear` and `palimpsa-d`; `gdn` is better than" in section
    assert "said by 1 of 15 models" in section and "and `rls-decay`" in section
    assert "`rls`" in section.partition("Nor have these rules")[2]
    board.unlink()
    assert "Language models in one block" not in block.render(tmp_path)


def test_what_the_page_says_of_claim_c22_is_decided() -> None:
    gains = block.paper_gains(RESULTS)
    assert [one.sign for one in gains.values()] == [1, 1, 1, 0] and {one.seeds for one in gains.values()} == {3}


def test_what_the_page_says_of_first_windows_is_so() -> None:
    small = block_effects.differences(block_effects._rows(RESULTS, large=False))
    short, mamba = small["gdn-short-windows"], small["mamba2-gate-and-windows"]
    assert short.sign == -1 and mamba.tied and mamba.deviation > abs(mamba.mean)
    large = block_effects.differences(block_effects._rows(RESULTS))
    assert large["gdn-windows"].tied and large["mamba2-epsilon"].tied and large["gdn-windows"].seeds == 10
    drawn = RecallExperiment(
        **SETTINGS,
        **{**SIZES["cuda"], "learning_rates": (1e-3,)},
        pairs=(16,),
        mixers=(EFFECTS["gdn-windows"].sides()["before"],),
        device="cpu",
    )
    for run in drawn.runs():
        decays = [part for part in Training(run).model.modules() if isinstance(part, HeadDecay)]
        windows = [1 / (1 - decay.convert_step(torch.zeros(1, 1, 2)).exp()) for decay in decays]
        assert len(windows) == 2 and torch.stack(windows).max() >= 4 * 4
