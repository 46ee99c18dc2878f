"""The pages of results of our own show the committed numbers, in text and figure."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path

import pytest
from PIL import Image

from fastweights.experiments import claims_of, load_records, save_record

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import own_results  # noqa: E402

RECORDS = {name: record for name, record in load_records(own_results.RESULTS).items() if name in own_results.PAGES}
COMMAND = "python benchmarks/own_results.py"


def source_of(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info["Source"])


def test_every_result_has_a_page() -> None:
    assert {claim.name for claim in claims_of("own")} == set(own_results.PAGES)


@pytest.mark.parametrize("name", own_results.PAGES)
def test_the_measured_part_is_generated(name: str) -> None:
    text = own_results.PAGES[name].path.read_text()
    assert text == own_results.render(name), f"run {COMMAND}"
    assert f"fastweights reproduce {name}" in text and "## Limits\n" in text


def test_numbers_in_the_words_about_stability_are_those_of_the_results() -> None:
    found = RECORDS["own-3"].measurement

    def largest(which: str, rule: str) -> float:
        ends = f": largest log norm of {which} products"
        return math.exp(
            max(found.largest(name) for name in found.values if name.startswith(rule) and name.endswith(ends))
        )

    text = " ".join(own_results.PAGES["own-3"].path.read_text().split())
    assert (
        f"random streams reach norms of {largest('random', 'pdn'):.2f} (PDN) and {largest('random', 'vla'):.2f} (VLA), "
        f"chosen ones {largest('chosen', 'pdn'):.0f} (PDN) and {largest('chosen', 'vla'):.0f} (VLA)"
    ) in text
    chosen = load_records(own_results.RESULTS)["C4"].measurement
    growth = max(chosen.largest(name) for name in chosen.values if name.startswith("its growth"))
    assert f"grow by up to {growth - 1:.0%} per step ([C4]" in text


@pytest.mark.parametrize("name", RECORDS)
def test_a_figure_is_of_the_committed_numbers(name: str) -> None:
    assert source_of(own_results.PAGES[name].figure) == own_results.checksum(RECORDS[name]), f"run {COMMAND}"


@pytest.mark.parametrize("name", RECORDS)
def test_other_numbers_are_another_page_and_another_figure(name: str, tmp_path: Path) -> None:
    record = RECORDS[name]
    numbers = {key: [1.01 * x if x else x for x in row] for key, row in record.numbers.items()}
    changed = dataclasses.replace(record, numbers=numbers)
    save_record(tmp_path, changed)
    assert own_results.render(name, tmp_path) != own_results.render(name)
    own_results.draw(name, changed, tmp_path / "figure.png")
    assert source_of(tmp_path / "figure.png") != source_of(own_results.PAGES[name].figure)
