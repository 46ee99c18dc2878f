"""docs/leaderboard.md, docs/untrained.md and their figures are what their generator makes of the results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fastweights_studies.leaderboard import PARTS, SIZES, load_board, part_rows
from fastweights_studies.leaderboard.measured import ReadPart
from fastweights_studies.leaderboard.trainings import TaskPart
from fastweights_studies.leaderboard.untrained import EXPECTATIONS
from fastweights_studies.pages import leaderboard
from fastweights_studies.record import Row, write_rows

from studies.tests.leaderboard.toy import NOWHERE, make_row


@pytest.mark.parametrize(("page", "render"), [("leaderboard", "render"), ("untrained", "render_untrained")])
def test_the_pages_are_generated(page: str, render: str) -> None:
    command = "python -m fastweights_studies.pages.leaderboard"
    assert leaderboard.PAGES[page].read_text() == getattr(leaderboard, render)(), f"run {command}"
    assert command in leaderboard.PAGES[page].read_text()


@pytest.mark.parametrize(("figure", "rows"), [("leaderboard", "drawn_rows"), ("untrained", "rules_rows")])
def test_the_figures_are_of_the_results(figure: str, rows: str) -> None:
    """A figure keeps a checksum of the rows that it shows."""
    image = pytest.importorskip("PIL.Image").open(leaderboard.FIGURES[figure])
    drawn = getattr(leaderboard, rows)()
    shown = drawn if isinstance(drawn, list) else [row for own in drawn.values() for row in own]
    assert image.text["Source"] == leaderboard.digest_rows(shown), "run python -m fastweights_studies.pages.leaderboard"


NOT_MEASURED = {  # at one of the sizes
    "recall", "recall-published", "recall-blocks", "tasks", "regression-matched", "language-proxies", "language-matched",
    "hybrids",
}  # fmt: skip


@pytest.mark.parametrize("path", sorted(leaderboard.FOLDER.iterdir()), ids=lambda path: path.stem)
def test_results_are_of_the_declared_setting(path: Path) -> None:
    name, _, size = path.stem.rpartition("-")
    rows = load_board(path).rows
    if name.endswith("-curves"):  # of the models whose numbers are in the columns of the part
        setting = PARTS[name.removesuffix("-curves")].setting(size)[0].setting
        assert rows and all(setting.items() <= row.run.items() for row in rows)
    else:
        assert rows and PARTS[name].counted(rows, size if size in SIZES else "small") == rows


def test_committed_results_are_those_that_the_library_shows() -> None:
    """A mixer of a user stands beside them."""
    for part in (part for part in PARTS.values() if not isinstance(part, ReadPart) and part.name not in NOT_MEASURED):
        for size in SIZES:
            rows = part.library(size, ())
            assert rows == part_rows(part, size, leaderboard.FOLDER, leaderboard.RESULTS) != [], (part.name, size)
            assert rows[0].mixer not in {row.mixer for row in part.library(size, rows[:1])}


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    page = leaderboard.render(tmp_path, tmp_path)
    assert page.count("**Not run.**") == 2 * 12 + 3
    assert "**Not run.**" in leaderboard.render_untrained(tmp_path)
    commands = [
        f"fastweights leaderboard {part.name} --device cuda" for part in PARTS.values() if isinstance(part, TaskPart)
    ]
    assert all(command in page for command in commands)


def write_board(folder: Path, part: str, rows: list[Row]) -> None:
    write_rows(folder / f"{part}-small.json", rows)


def test_a_board_becomes_a_table(tmp_path: Path) -> None:
    rows = [make_row("tracking", value=value, seed=seed, undertrained=True) for seed, value in enumerate((0.5, 0.7))]
    write_board(tmp_path, "tracking", rows)
    page = leaderboard.render(tmp_path, tmp_path)
    assert (
        "| gdn | 9 | 1,234 | 0.600 ±0.100 (1)\\* |" in page and "Measured on A machine, torch 2.0, 2026-01-02" in page
    )
    assert (
        leaderboard.seeds([1, 3], (0, 1, 2)) == "1 to 3 of 3 seeds so far"
        and leaderboard.seeds([], (0, 1)) == "2 seeds"
    )
    assert "2 seeds.\n" in page and "1 of 2 seeds so far" not in page
    write_board(tmp_path, "tracking", rows[:1])
    assert "1 of 2 seeds so far.\n" in leaderboard.render(tmp_path, tmp_path)
    (missing,) = (line for line in page.splitlines() if line.startswith("Not run: "))
    assert "`pgdn`" in missing and missing.count("`") == 2 * (len(leaderboard.OWN) - 1) and "not run |" not in page


def test_every_machine_of_a_mixer_is_named() -> None:
    rows = [replace(make_row(seed=seed), origin=replace(NOWHERE, device=name)) for seed, name in enumerate("ba")]
    assert leaderboard.list_origins(rows) == "Measured on a, torch 2.0, 2026-01-02; b, torch 2.0, 2026-01-02.\n"


def test_rows_with_more_seeds_keep_where_the_first_one_was_measured() -> None:
    """Of the committed rows: seeds that joined are from another run than the first seed."""
    entries = PARTS["language"].entries(load_board(leaderboard.FOLDER / "language-full.json").rows)
    joined = [entry for entry in entries if len(entry.seeds) > 1]
    at_once = {entry.label for entry in joined if len(entry.origins) == 1}
    assert joined and at_once == {"longhorn-elementwise"}
    assert all(len({origin.date for origin in entry.origins}) == 2 for entry in joined if entry.label not in at_once)
    assert {entry.rows[0].origin.device for entry in joined} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}


def test_expectations_that_did_not_come_out_are_shown_first() -> None:
    page = leaderboard.PAGES["untrained"].read_text()
    lines = [line for line in page.splitlines() if line.endswith(("| yes |", "| **no** |"))]
    assert len(lines) == len(EXPECTATIONS)
    assert lines == sorted(lines, key=lambda line: line.endswith("| yes |"))
    assert all(expectation.says in page for expectation in EXPECTATIONS)
