"""docs/leaderboard.md, docs/untrained.md and their figures are what their generator makes of the results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fastweights_studies.leaderboard import PARTS, SIZES, load_board, part_rows
from fastweights_studies.leaderboard.record import LATER, origins
from fastweights_studies.leaderboard.run import rows_beside
from fastweights_studies.leaderboard.untrained import EXPECTATIONS
from fastweights_studies.pages import leaderboard


@pytest.mark.parametrize(("page", "render"), [("leaderboard", "render"), ("untrained", "render_untrained")])
def test_the_pages_are_generated(page: str, render: str) -> None:
    command = "python -m fastweights_studies.pages.leaderboard"
    assert leaderboard.PAGES[page].read_text() == getattr(leaderboard, render)(), f"run {command}"
    assert command in leaderboard.PAGES[page].read_text()


@pytest.mark.parametrize(("figure", "rows"), [("leaderboard", "drawn_rows"), ("untrained", "rules_rows")])
def test_the_figures_are_of_the_results(figure: str, rows: str) -> None:
    """A figure keeps a checksum of the rows that it shows."""
    image = pytest.importorskip("PIL.Image").open(leaderboard.FIGURES[figure])
    assert image.text["Source"] == leaderboard.digest(getattr(leaderboard, rows)()), (
        "run python -m fastweights_studies.pages.leaderboard"
    )


def test_results_are_of_the_declared_setting() -> None:
    for path in [*leaderboard.FOLDER.glob("*-small.json"), *leaderboard.FOLDER.glob("*-full.json")]:
        board = load_board(path)
        size = SIZES[board.size]
        declared = size.tasks[board.part].setting() if board.part in size.tasks else size.language.setting()
        assert {**board.setting, **json.loads(json.dumps(declared))} == board.setting, path.name


def test_committed_results_are_those_that_the_library_shows() -> None:
    """A mixer of a user stands beside them as long as their setting is the declared one."""
    for part in (part for part in PARTS.values() if part.kind != "read"):
        for size in SIZES:
            rows = rows_beside(part, size, [])
            assert rows == part_rows(part, size, leaderboard.FOLDER, leaderboard.RESULTS) != [], (part.name, size)
            assert not any(row["mixer"] == rows[0]["mixer"] for row in rows_beside(part, size, rows[:1]))


def test_what_was_not_run_says_so(tmp_path: Path) -> None:
    page = leaderboard.render(tmp_path, tmp_path)
    assert page.count("**Not run.**") == 2 * 5 + 3
    assert "**Not run.**" in leaderboard.render_untrained(tmp_path)
    commands = [f"fastweights leaderboard {part.name} --device cuda" for part in PARTS.values() if part.kind == "task"]
    assert all(command in page for command in commands)


def test_a_board_becomes_a_table(tmp_path: Path) -> None:
    row = {
        "column": "c", "mixer": "gdn", "values": [0.5, 0.7], "state": 9, "parameters": 1234, "grows": False,
        "undertrained": True, "diverged": 0, "chance": 0.25, "exact": None,
        "measured": {"machine": "a machine", "torch": "2.0", "time": "2026-01-02T00:00:00+00:00"},
    }  # fmt: skip
    head = {"format": 1, "part": "tracking", "size": "small", "setting": {}}
    (tmp_path / "tracking-small.json").write_text(json.dumps({**head, "rows": {"c, gdn": row}}))
    page = leaderboard.render(tmp_path, tmp_path)
    assert (
        "| gdn | 9 | 1,234 | 0.600 ±0.100 (1)\\* |" in page and "Measured on a machine, torch 2.0, 2026-01-02" in page
    )
    assert (
        leaderboard.seeds([1, 3], (0, 1, 2)) == "1 to 3 of 3 seeds so far"
        and leaderboard.seeds([], (0, 1)) == "2 seeds"
    )
    assert "2 seeds.\n" in page and "1 of 2 seeds so far" not in page
    (tmp_path / "tracking-small.json").write_text(json.dumps({**head, "rows": {"c, gdn": {**row, "values": [0.5]}}}))
    assert "1 of 2 seeds so far.\n" in leaderboard.render(tmp_path, tmp_path)
    (missing,) = (line for line in page.splitlines() if line.startswith("Not run: "))
    assert "`pgdn`" in missing and missing.count("`") == 2 * (len(leaderboard.OWN) - 1) and "not run |" not in page


def test_every_machine_of_a_row_is_named() -> None:
    first, later = (
        {"machine": m, "torch": "2.0", "time": "2026-01-02T00:00:00+00:00"} for m in ("the first", "another")
    )
    assert leaderboard.where([{"measured": first, LATER: [later]}]) == (
        "Measured on another, torch 2.0, 2026-01-02; the first, torch 2.0, 2026-01-02.\n"
    )


def test_rows_with_more_seeds_keep_where_the_first_one_was_measured() -> None:
    """Of the committed rows: seeds that joined are from another run than the first seed."""
    rows = load_board(leaderboard.FOLDER / "language-full.json").rows.values()
    joined = [row for row in rows if len(row["seeds"]) > 1]
    at_once = {row["mixer"] for row in joined if len(origins(row)) == 1}
    assert joined and at_once == {"longhorn-elementwise"}
    assert all(len({origin["time"] for origin in origins(row)}) == 2 for row in joined if row["mixer"] not in at_once)
    assert {row["measured"]["machine"] for row in joined} == {"NVIDIA H100 80GB HBM3", "NVIDIA H200"}


def test_needles_say_what_was_found_and_who_was_not_asked(tmp_path: Path) -> None:
    row = {
        "column": "held out", "mixer": "gdn", "values": [2.0], "state": 9, "parameters": 1234, "grows": False,
        "undertrained": False, "diverged": 0, "measured": {"machine": "m", "torch": "2.0", "time": "2026-01-02"},
    }  # fmt: skip
    language = {"held out, gdn": row, "held out, vla": {**row, "mixer": "vla", "values": []}}
    asked = {**row, "column": "1024 tokens", "found": [0.5]}

    def page(**found: float) -> str:
        needles = {name: {**asked, "mixer": name, "found": [part]} for name, part in found.items()}
        for part, rows in {"language": language, "needle": needles}.items():
            content = {"format": 1, "part": part, "size": "small", "setting": {}, "rows": rows}
            (tmp_path / f"{part}-small.json").write_text(json.dumps(content))
        return leaderboard.render(tmp_path, tmp_path)

    text = page(gdn=0.5, kda=0.0)
    assert "Numbers found, at the best length: `gdn` 50%; none by the others.\n" in text
    assert "\nNot asked, because all trainings of its language model diverged: `vla`.\n" in text
    (missing,) = (line for line in text.splitlines() if line.startswith("Not run: ") and "`kda`" not in line)
    assert "`rls`" in missing and "`vla`" not in missing
    assert "length: `gdn` 50%.\n" in page(gdn=0.5)
    assert "Asked of the model of the first seed alone.\n" in text
    language["held out, gdn"] = {**row, "values": [2.0, 2.1]}
    assert "first seed alone; those of the other seeds were not asked.\n" in page(gdn=0.5, kda=0.0)
    asked["values"] = [2.0, 2.0]
    assert "Asked of the models of 2 seeds.\n" in page(gdn=0.5)
    assert "**No model found a number, at any length.**" in page(gdn=0.0)


def test_expectations_that_did_not_come_out_are_shown_first() -> None:
    page = leaderboard.PAGES["untrained"].read_text()
    lines = [line for line in page.splitlines() if line.endswith(("| yes |", "| **no** |"))]
    assert len(lines) == len(EXPECTATIONS)
    assert lines == sorted(lines, key=lambda line: line.endswith("| yes |"))
    assert all(expectation.says in page for expectation in EXPECTATIONS)
