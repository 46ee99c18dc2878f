"""The pages of results of our own show the committed numbers, in text and figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.claims import ClaimRecord, Measurement, claims_of, load_records, save_record
from fastweights_studies.own import o3b_training_outside_the_bound as outside
from fastweights_studies.pages import own_results, own_tables
from PIL import Image

from fastweights.layers import MIXERS
from fastweights.layers.choice import described_options
from tests.fast_set import fast_where

RECORDS = load_records(own_results.RESULTS)
FIGURES = [
    (name, device)
    for name, page in own_results.PAGES.items()
    for device in own_results.DEVICES
    if name in page.records(device)
]
COMMAND = "python -m fastweights_studies.pages.own_results"


def source_of(path: Path) -> str:
    with Image.open(path) as image:
        return str(image.info["Source"])


def test_every_result_has_a_page() -> None:
    shown = [part for page in own_results.PAGES.values() for part in page.parts]
    assert [claim.name for claim in claims_of("own")] == shown


@pytest.mark.parametrize("name", own_results.PAGES)
def test_the_measured_part_is_generated(name: str) -> None:
    text = own_results.PAGES[name].path.read_text()
    assert text == own_results.render(name), f"run {COMMAND}"
    assert all(f"fastweights reproduce {part}" in text for part in own_results.PAGES[name].parts)
    assert "## Limits\n" in text


def test_numbers_in_the_words_about_stability_are_those_of_the_results() -> None:
    found = RECORDS["own-3"].measurement

    def largest(which: str, mixer: str) -> float:
        return math.exp(found.largest(f"{which}_log_norm", mixer))

    text = " ".join(own_results.PAGES["own-3"].path.read_text().split())
    assert (
        f"random streams reach norms of {largest('random', 'pdn'):.2f} (PDN) and {largest('random', 'vla'):.2f} (VLA), "
        f"chosen ones {largest('chosen', 'pdn'):.0f} (PDN) and {largest('chosen', 'vla'):.0f} (VLA)"
    ) in text
    growth = RECORDS["C4"].measurement.largest("growth")
    assert f"grow by up to {growth - 1:.0%} per step ([C4]" in text


def test_bounds_by_setting_are_those_of_the_formulas() -> None:
    """At the sizes that the table names, with the defaults of the layers; growth is in logarithms."""
    text = own_results.PAGES["own-3"].path.read_text().partition("## Bounds by setting\n")[2].partition("\n## ")[0]
    rows = [line[2:-2].split(" | ") for line in text.splitlines() if line.startswith("| `")]
    assert all(row[3] in ("yes", "no") for row in rows) and "K = 64 and 2,048 tokens, with x = 1.5" in text
    K, T, a = 64, 2048, 0.9
    pdn, vla = (
        {option.name: float(option.default) for option in described_options(MIXERS[name]) if option.name in wanted}
        for name, wanted in (("pdn", ("bound",)), ("vla", ("ridge", "refresh", "refresh_every")))
    )
    x, ridge = math.log(pdn["bound"]), vla["ridge"]
    rate = vla["refresh"] / vla["refresh_every"]
    growth = x / 2 * min(2, K * math.log(1 / a))
    refreshed = (math.log1p(ridge * rate * T) + math.sqrt(T / ridge + rate * T**2)) / 2
    polynomial = [K / 2 * math.log1p(T / (K**2 * one)) for one in (ridge, 0.5)]
    bounds = ["1", "1", *(f"$e^{{{power:.0f}}}$" for power in ((K + 1) * x, x + growth * T))]
    assert [row[4].removesuffix(" at a = 0.9") for row in rows[:4]] == bounds and pdn["bound"] == 1.5
    assert [row[4] for row in rows[5:]] == [f"$e^{{{p:.0f}}}$" for p in (polynomial[0], refreshed, polynomial[1])]
    assert [row[3] for row in rows] == ["yes"] * 3 + ["no"] * 5
    page = " ".join(own_results.PAGES["own-3"].path.read_text().split())
    assert f"grows by s = {growth:.2f} per token" in page and f"= {math.sqrt(rate) / 2:.4f}$ per token" in page
    assert f"{refreshed / T:.3f} per token over 2,048 tokens" in page
    found = RECORDS["own-3"].measurement
    assert 0 < found.largest("growth", rule="pdn") < 0.01 and "grow by less than 0.01 per step" in page


def test_numbers_in_the_words_about_training_outside_are_those_of_the_results() -> None:
    found = RECORDS["own-3b"].measurement
    text = " ".join(own_results.PAGES["own-3"].path.read_text().split())
    trainings = len(outside.RATES) * len(RECORDS["own-3b"].seeds)

    def lost(settings: Iterable[outside.Setting]) -> int:
        return round(sum(trainings * found.mean("diverged_share", **one.column) for one in settings))

    inside, beyond = zip(*outside.FAMILIES.values(), strict=True)
    assert lost(inside) == 0 and f"none of the {len(inside) * trainings} trainings diverged" in text
    spike = max(found.largest("largest_spike", **one.column) for one in inside)
    assert f"no gradient was more than {spike:.1f} times" in text
    assert f"{lost(beyond)} of {len(beyond) * trainings} diverged: all {lost(beyond[2:3])} of `vla`" in text
    assert f"{lost(beyond[:1])} of {trainings} of the delta rule" in text and lost(beyond[1:2]) == 0
    assert f"{lost(beyond[3:])} of {trainings} with keys of any length" in text
    first = [found.largest("largest_step", **one.column, when="before") for one in (beyond[0], beyond[3])]
    assert f"largest first steps are {first[0]:.1f} and {first[1]:.2f}" in text
    product = found.mean("log_norm", **beyond[2].column, when="before")
    assert f"products reach e^{product:.0f} before" in text
    best = found.largest("accuracy")
    assert f"the best of them recalls {best:.0%}" in text


def test_numbers_in_the_words_about_hybrids_are_those_of_the_results() -> None:
    text = " ".join(own_results.PAGES["own-2"].path.read_text().split())
    alone, fitted = (RECORDS[name].measurement for name in ("own-2b", "own-2c"))

    def accuracy(found: Measurement, mixer: str, training: str, share: float, order: str) -> str:
        value = found.mean("routed_accuracy", mixer, training=training, share=share, order=order)
        return f"{value:.{2 if found is alone else 3}f}"

    hybrid = accuracy(alone, "rls", "uncertain_queries", 0.2, "variance")
    assert f"{hybrid} against {accuracy(alone, 'rls', 'random_queries', 0.2, 'chance')} for `rls`" in text
    ranks = [one.value for one in alone.select("wrong_auroc", training="uncertain_queries")]
    assert f"AUROC {min(ranks):.2f} to {max(ranks):.2f}" in text
    routed = [
        f"{accuracy(fitted, mixer, 'random_queries', 0.2, 'fitted_variance')} against "
        f"{accuracy(fitted, mixer, 'random_queries', 0.2, 'chance')} for `{mixer}`"
        for mixer in ("rls", "palimpsa-d")
    ]
    assert " and ".join(routed) in text
    memory = [accuracy(fitted, mixer, "memory_alone", 0.0, "chance") for mixer in ("rls", "palimpsa-d")]
    assert f"trained alone, {' and '.join(memory)}" in text
    everything = {
        training: [one.value for one in fitted.select("routed_accuracy", training=training, share=1.0)]
        for training in ("random_queries", "memory_alone")
    }
    assert f"right in {min(everything['random_queries']):.3f} or more" in text
    low, high = min(everything["memory_alone"]), max(everything["memory_alone"])
    assert f"it answers {low:.2f} to {high:.2f}" in text


@pytest.mark.parametrize(("name", "device"), FIGURES)
def test_a_figure_is_of_the_committed_numbers(name: str, device: str) -> None:
    page = own_results.PAGES[name]
    assert source_of(page.figure(device)) == own_results.checksum(page.records(device)), f"run {COMMAND}"


@fast_where(lambda given: given["name"] == "own-2")
@pytest.mark.parametrize(
    ("name", "part"),
    [
        pytest.param(name, part, marks=[pytest.mark.slow] if number else [])
        for name, page in own_results.PAGES.items()
        for number, part in enumerate(page.records("cpu"))
    ],
)
def test_other_numbers_are_another_page_and_another_figure(name: str, part: str, tmp_path: Path) -> None:
    page = own_results.PAGES[name]
    for other, record in page.records("cpu").items():
        save_record(tmp_path, changed(record) if other == part else record)
    assert own_results.render(name, tmp_path) != own_results.render(name)
    own_results.draw(name, page.records("cpu", tmp_path), tmp_path / "figure.png")
    assert source_of(tmp_path / "figure.png") != source_of(page.figure("cpu"))


def test_the_larger_size_stands_beside_the_smaller(tmp_path: Path) -> None:
    page, small = own_results.PAGES["own-1"], RECORDS["own-1"]
    large = changed(small, device="cuda", origin=dataclasses.replace(small.origin, device="NVIDIA X1"), seeds=[0, 1, 2])
    for record in (small, large):
        save_record(tmp_path, record)
    text = own_results.render("own-1", tmp_path)
    first, _, second = text.partition("### The larger size, on a GPU\n")
    for part, record in ((first, small), (second, large)):
        assert own_tables.mean(record.measurement, "error", "rls", variances="equal") in part
    assert "NVIDIA X1" in second and "NVIDIA X1" not in first
    assert f"({page.figure('cpu').name})" not in second and page.figure("cuda").name in second
    assert page.records("cuda", tmp_path) == {"own-1": large} and page.records("cuda", tmp_path / "none") == {}
    assert own_results.PAGES["own-3"].records("cuda", own_results.RESULTS) == {}  # has one size
    own_results.draw("own-1", page.records("cuda", tmp_path), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def changed(record: ClaimRecord, **fields: Any) -> ClaimRecord:
    rows = [dataclasses.replace(row, value=1.01 * row.value if row.value else row.value) for row in record.rows]
    return dataclasses.replace(record, rows=rows, **fields)
