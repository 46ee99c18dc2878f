"""The pages of results of our own show the committed numbers, in text and figure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.experiments import ClaimRecord, Measurement, claims_of, load_records, save_record
from fastweights_studies.experiments.own import o3_products_of_transitions as products
from fastweights_studies.experiments.own import o3b_training_outside_the_bound as outside
from fastweights_studies.pages import own_results
from PIL import Image

from fastweights.layers import MIXERS
from fastweights.layers.choice import described_options

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
    chosen = [
        found.largest(f"{name}: growth per step of chosen products") for name in products.STREAMS if "pdn" in name
    ]
    assert 0 < max(chosen) < 0.01 and "grow by less than 0.01 per step" in page


def test_numbers_in_the_words_about_training_outside_are_those_of_the_results() -> None:
    found = RECORDS["own-3b"].measurement
    text = " ".join(own_results.PAGES["own-3"].path.read_text().split())
    trainings = len(outside.RATES) * len(RECORDS["own-3b"].seeds)

    def lost(names: Iterable[str]) -> int:
        return round(sum(trainings * found.mean(f"{name}: share of diverged trainings") for name in names))

    inside, beyond = zip(*outside.FAMILIES.values(), strict=True)
    assert lost(inside) == 0 and f"none of the {len(inside) * trainings} trainings diverged" in text
    spike = max(found.largest(f"{name}: largest spike of gradients") for name in inside)
    assert f"no gradient was more than {spike:.1f} times" in text
    assert f"{lost(beyond)} of {len(beyond) * trainings} diverged: all {lost(beyond[2:3])} of `vla`" in text
    assert f"{lost(beyond[:1])} of {trainings} of the delta rule" in text and lost(beyond[1:2]) == 0
    assert f"{lost(beyond[3:])} of {trainings} with keys of any length" in text
    first = [found.largest(f"{name}: largest step before training") for name in (beyond[0], beyond[3])]
    assert f"largest first steps are {first[0]:.1f} and {first[1]:.2f}" in text
    product = found.mean(f"{beyond[2]}: largest log norm of a product before training")
    assert f"products reach e^{product:.0f} before" in text
    best = max(found.largest(f"{name}: accuracy") for name in outside.SETTINGS)
    assert f"the best of them recalls {best:.0%}" in text


def test_numbers_in_the_words_about_hybrids_are_those_of_the_results() -> None:
    text = " ".join(own_results.PAGES["own-2"].path.read_text().split())
    alone, fitted = (RECORDS[name].measurement for name in ("own-2b", "own-2c"))

    def accuracy(found: Measurement, kind: str, share: str, order: str) -> str:
        digits = 2 if found is alone else 3
        return f"{found.mean(f'{kind}: accuracy with {share} routed by {order}'):.{digits}f}"

    hybrid = accuracy(alone, "rls, uncertain queries", "20%", "variance")
    assert f"{hybrid} against {accuracy(alone, 'rls, random queries', '20%', 'chance')} for `rls`" in text
    ranks = [x for name, row in alone.values.items() if "uncertain" in name and "AUROC" in name for x in row]
    assert f"AUROC {min(ranks):.2f} to {max(ranks):.2f}" in text
    routed = [
        f"{accuracy(fitted, f'{mixer}, random queries', '20%', 'fitted variance')} against "
        f"{accuracy(fitted, f'{mixer}, random queries', '20%', 'chance')} for `{mixer}`"
        for mixer in ("rls", "palimpsa-d")
    ]
    assert " and ".join(routed) in text
    memory = [accuracy(fitted, f"{mixer}, memory alone", "0%", "chance") for mixer in ("rls", "palimpsa-d")]
    assert f"trained alone, {' and '.join(memory)}" in text
    everything = {
        kind: [x for name, row in fitted.values.items() if f"{kind}: accuracy with 100%" in name for x in row]
        for kind in ("random queries", "memory alone")
    }
    assert f"right in {min(everything['random queries']):.3f} or more" in text
    low, high = min(everything["memory alone"]), max(everything["memory alone"])
    assert f"it answers {low:.2f} to {high:.2f}" in text


@pytest.mark.parametrize(("name", "device"), FIGURES)
def test_a_figure_is_of_the_committed_numbers(name: str, device: str) -> None:
    page = own_results.PAGES[name]
    assert source_of(page.figure(device)) == own_results.checksum(page.records(device)), f"run {COMMAND}"


@pytest.mark.parametrize(
    ("name", "part"), [(name, part) for name, page in own_results.PAGES.items() for part in page.records("cpu")]
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
    large = changed(small, machine={**small.machine, "device": "cuda", "gpu": "NVIDIA X1"}, seeds=[0, 1, 2])
    for record in (small, large):
        save_record(tmp_path, record)
    text = own_results.render("own-1", tmp_path)
    first, _, second = text.partition("### The larger size, on a GPU\n")
    for part, record in ((first, small), (second, large)):
        assert own_results.mean(record.measurement, "rls, equal variances") in part
    assert "NVIDIA X1" in second and "NVIDIA X1" not in first
    assert f"({page.figure('cpu').name})" not in second and page.figure("cuda").name in second
    assert page.records("cuda", tmp_path) == {"own-1": large} and page.records("cuda", tmp_path / "none") == {}
    assert own_results.PAGES["own-3"].records("cuda", own_results.RESULTS) == {}  # has one size
    own_results.draw("own-1", page.records("cuda", tmp_path), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 1000


def changed(record: ClaimRecord, **fields: Any) -> ClaimRecord:
    numbers = {key: [1.01 * x if x else x for x in row] for key, row in record.numbers.items()}
    return dataclasses.replace(record, numbers=numbers, **fields)
