"""The tables of students in docs/linearize.md have the rows that were measured, and say what was not."""

from __future__ import annotations

from pathlib import Path

from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.linearization import DISTILLED, NOTHING, SPEED, TASK, TEACHER
from fastweights_studies.measure.rows import make_rows
from fastweights_studies.pages import linearization
from fastweights_studies.record import write_rows


def cells(page: str, *begin: str) -> list[str]:
    (line,) = (line for line in page.splitlines() if line.startswith(f"| {' | '.join(begin)} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][len(begin) :]


def test_without_rows_nothing_is_claimed(tmp_path: Path) -> None:
    page = linearization.measured(tmp_path)
    assert page.count("**not measured yet**") == 2 and "|" not in page


def test_what_is_measured_is_shown(tmp_path: Path) -> None:
    origin, rows = describe("a GPU"), []

    def add(
        mixer: str, kept: str, trained: str, values: dict, seed: int = 0, length: int | None = None, **options: int
    ) -> None:
        column = {"kept": kept, "trained": trained, "length": length}
        rows.extend(make_rows(TASK, origin, values, mixer=mixer, options=options, column=column, seed=seed))

    add("softmax", "all", TEACHER, {"held_out_nats": 2.0})
    for seed, loss in enumerate((2.5, 2.7)):
        add("gdn", "none", DISTILLED, {"held_out_nats": loss, "kl_nats": 0.5, "tokens_until_near": None}, seed)
    add("gdn", "every:4", DISTILLED, {"held_out_nats": 2.04, "tokens_until_near": 1_500_000})
    add("gdn", "every:4", DISTILLED, {"recall_exact": 0.5, "needle_nats": 3.0}, length=256)
    add("gdn", "every:4", DISTILLED, {"recall_accuracy": 0.1, "needle_nats": 4.0}, length=1024)
    add("gdn", "every:4", NOTHING, {"recall_exact": 0.2, "needle_nats": 5.0}, length=256)
    add("rls", "none", NOTHING, {"held_out_nats": None})
    add("softmax", "none", DISTILLED, {"held_out_nats": 3.0}, window=128)
    for objective, speed in (("text", 100.0), ("attention", 60.0)):
        values = {"tokens_per_second": speed, "memory_bytes": 10.0}
        rows.extend(make_rows(SPEED, origin, values, mixer="gdn", column={"kept": "none", "objective": objective}))
    write_rows(tmp_path / "linearization-a-gpu.json", rows)
    page = linearization.measured(tmp_path)
    missing = linearization.MISSING
    assert cells(page, "teacher", "all")[:4] == ["2.00", "", "", ""]
    assert cells(page, "`gdn`", "none")[:4] == ["2.60 ±0.10", missing, "0.500 ±0", linearization.NEVER]
    assert cells(page, "`gdn`", "every:4") == [
        "2.04", missing, missing, "1.50M", "0.500", missing, "0.200", "3.00", "4.00"
    ]  # fmt: skip
    assert cells(page, "`rls`", "none")[:2] == [missing, "diverged"]
    assert cells(page, "`softmax`", "none")[0] == "3.00"
    assert cells(page, "`kda`", "none") == [missing] * 9
    assert cells(page, "`gdn`", "(a)") == ["0.60", "1.00"] and cells(page, "`gdn`", "(b)") == [missing] * 2
