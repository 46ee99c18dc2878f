"""Writes the measured part and the figure of the three pages about results of our own from studies/results/claims.

fastweights reproduce own-1 --output studies/results/claims
python -m fastweights_studies.pages.own_results
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.analysis.plot_style import save_figure
from fastweights_studies.claims import ClaimRecord, Measurement, find_claim, load_records
from fastweights_studies.own import o1_least_squares_as_layers as squares
from fastweights_studies.own import o2_confidence_of_memories as confidence
from fastweights_studies.own import o2b_hybrids_trained_as_one as hybrids
from fastweights_studies.own import o2c_hybrids_with_a_fitted_router as fitted
from fastweights_studies.own import o3_products_of_transitions as products
from fastweights_studies.own import o3b_training_outside_the_bound as outside
from fastweights_studies.pages.claims import RESULTS, escaped, facts, outcome
from fastweights_studies.pages.own_figures import draw_confidence, draw_products, draw_squares
from fastweights_studies.pages.own_tables import (
    Columns,
    Tables,
    confidence_tables,
    hybrid_tables,
    outside_tables,
    products_tables,
    recall_tables,
    ridge_tables,
    squares_tables,
)
from fastweights_studies.pages.rendering import replace_part
from fastweights_studies.places import DOCS

COMMAND = "fastweights_studies.pages.own_results"
DPI = 80  # figures stay below 100 kB
DEVICES = ("cpu", "cuda")


@dataclass(frozen=True)
class Part:
    """One claim of a page: its heading ("" for the first), its tables, and the memories that it trains or whose steps it
    measures, which name it on their pages."""

    title: str
    tables: Tables
    mixers: Collection[str]


@dataclass(frozen=True)
class Page:
    """One result: its page, what the figure shows, its claims by name, and the figure's width in inches."""

    file: str
    shows: str
    draw: Callable[[Mapping[str, Measurement], Any], None]
    parts: Mapping[str, Part]
    width: float = 13

    @property
    def path(self) -> Path:
        return DOCS / self.file

    def figure(self, device: str) -> Path:
        return DOCS / "images" / self.file.replace(".md", "-cuda.png" if device == "cuda" else ".png")

    def records(self, device: str, folder: Path = RESULTS) -> dict[str, ClaimRecord]:
        """Those that a device has measured, by claim; with "cuda" those of larger sizes."""
        records = load_records(folder)
        names = {name: find_claim(name).result_name(device) for name in self.parts}
        return {
            name: records[saved] for name, saved in names.items()
            if saved in records and (device == "cpu" or saved != name)
        }  # fmt: skip


_BY_MEAN = "AUROC of wrong answers by the mean log variance"
FITTED_COLUMNS: Columns = {
    "sharpness": ("sharpness", {}),
    "AUROC of wrong answers by the fitted variance": ("wrong_auroc", {"score": "fitted_variance"}),
    _BY_MEAN: ("wrong_auroc", {"score": "mean_log_variance"}),
    **{
        f"{_BY_MEAN}, {pairs} pairs": ("load_wrong_auroc", {"score": "mean_log_variance", "pairs": pairs})
        for pairs in (int(load * hybrids.PAIRS) for load in hybrids.LOADS)
    },
}
PAGES = {
    "own-1": Page(
        "own-least-squares.md",
        "Squared error by examples in context",
        draw_squares,
        {
            "own-1": Part("", squares_tables, squares.MIXERS),
            "own-1b": Part(
                "The ridge of the exact recursion",
                ridge_tables,
                (squares.BASE, squares.ITERATIVE, squares.EXACT),
            ),
            "own-1c": Part("The ridge in recall", recall_tables, (squares.EXACT,)),
        },
        width=10,
    ),
    "own-2": Page(
        "own-confidence.md",
        "Calibration, abstention and routing by the variance, and hybrids",
        draw_confidence,
        {
            "own-2": Part("", confidence_tables, confidence.MIXERS),
            "own-2b": Part(
                "Hybrids that are trained as one",
                hybrid_tables(
                    hybrids.TRAININGS,
                    hybrids.ORDERS,
                    {"sharpness": ("sharpness", {}), "AUROC of wrong answers of the memory": ("wrong_auroc", {})},
                ),
                hybrids.MIXERS,
            ),
            "own-2c": Part(
                "Hybrids with a fitted router",
                hybrid_tables(fitted.TRAININGS, fitted.ORDERS, FITTED_COLUMNS),
                hybrids.MIXERS,
            ),
        },
    ),
    "own-3": Page(
        "own-stability.md",
        "Log norms of products of chosen steps, and trainings that diverged",
        draw_products,
        {
            "own-3": Part(
                "",
                products_tables,
                {"vla", *(choice.name for choice in products.WORDS.choices)},
            ),
            "own-3b": Part(
                "Training outside of the bound",
                outside_tables,
                {setting.mixer.name for setting in outside.SETTINGS},
            ),
        },
    ),
}


def checksum(records: Mapping[str, ClaimRecord]) -> str:
    """Of the rows that a figure shows, which its file holds."""
    rows = [dataclasses.asdict(row) for record in records.values() for row in record.rows]
    return hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()


def render(name: str, folder: Path = RESULTS) -> str:
    """The page with the measured part as the results in `folder` have it."""
    page = PAGES[name]
    cpu, gpu = (page.records(device, folder) for device in DEVICES)
    lines = [
        "Numbers in tables are means over the seeds, with the smallest and the largest in parentheses where they differ."
    ]
    for place, (part, shown_by) in enumerate(page.parts.items()):
        claim = find_claim(part)
        if shown_by.title:
            lines.append(f"### {shown_by.title}")
        lines.append("\n".join([f"- Asked: {escaped(claim.says)}", *facts(claim, cpu)]))
        if not place and name in cpu:
            lines.append(f"![{page.shows}](images/{page.figure('cpu').name})")
        if part in cpu:
            lines += shown_by.tables(cpu[part].measurement)
        if part in gpu:
            title = f"{shown_by.title}: the larger size" if shown_by.title else "The larger size"
            lines.append("\n".join([f"### {title}, on a GPU\n\n{claim.larger}\n", *outcome(claim, gpu)]))
            if not place:
                lines.append(f"![{page.shows}](images/{page.figure('cuda').name})")
            lines += shown_by.tables(gpu[part].measurement)
    written = "\n\n".join(line.strip() for line in lines)
    return replace_part(page.path.read_text(), "measured", f"{written}\n", COMMAND)


def draw(name: str, records: Mapping[str, ClaimRecord], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(PAGES[name].width, 4.2), layout="constrained")
    PAGES[name].draw({part: record.measurement for part, record in records.items()}, figure)
    save_figure(figure, path, source=checksum(records), dpi=DPI)


if __name__ == "__main__":
    for name, page in PAGES.items():
        page.path.write_text(render(name))
        for device in DEVICES:
            records = page.records(device)
            if name in records:
                draw(name, records, page.figure(device))
