"""Writes the measured part and the figure of the three pages about results of our own from studies/results/claims.

fastweights reproduce own-1 --output studies/results/claims
python -m fastweights_studies.pages.own_results
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastweights.analysis.plot_style import mixer_styles, plain_axes, save_figure
from fastweights_studies.experiments import ClaimRecord, Measurement, find_claim, load_records
from fastweights_studies.experiments.own import o1_least_squares_as_layers as squares
from fastweights_studies.experiments.own import o1b_the_ridge_of_the_exact_recursion as ridge
from fastweights_studies.experiments.own import o1c_the_ridge_in_recall as recalls
from fastweights_studies.experiments.own import o2_confidence_of_memories as confidence
from fastweights_studies.experiments.own import o2b_hybrids_trained_as_one as hybrids
from fastweights_studies.experiments.own import o2c_hybrids_with_a_fitted_router as fitted
from fastweights_studies.experiments.own import o3_products_of_transitions as products
from fastweights_studies.experiments.own import o3b_training_outside_the_bound as outside
from fastweights_studies.experiments.trained import accuracy
from fastweights_studies.pages.claims import PAGE as CLAIMS_PAGE
from fastweights_studies.pages.claims import RESULTS, escaped, facts, outcome
from fastweights_studies.pages.rendering import number, table

DOCS = CLAIMS_PAGE.parent
BEGIN = "<!-- measured: written by `python -m fastweights_studies.pages.own_results` -->"
DPI = 80  # figures stay below 100 kB
END = "<!-- end of what is measured -->"
DEVICES = ("cpu", "cuda")
Tables = Callable[[Measurement], list[str]]
OUTSIDE_OUTCOMES = (
    "accuracy",
    "share of diverged trainings",
    "share of troubled trainings",
    "largest spike of gradients",
)
OUTSIDE_STEPS = (
    "largest step before training",
    "largest step after training",
    "share of steps beyond 2 after training",
    "largest log norm of a product before training",
    "largest log norm of a product after training",
)


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


def mean(found: Measurement, name: str) -> str:
    """The mean with the range over the seeds, where their numbers differ in what is shown."""
    values = found.values[name]
    if any(map(math.isnan, values)):
        return "–"
    if shown(found.smallest(name)) == shown(found.largest(name)):
        return shown(found.mean(name))
    return f"{shown(found.mean(name))} ({shown(found.smallest(name))} to {shown(found.largest(name))})"


def shown(x: float) -> str:
    """Three digits, rounding errors with an exponent."""
    return f"{x:.1e}" if 0 < abs(x) < 1e-9 else number(x)


def squares_tables(mixers: Iterable[str]) -> Tables:
    """Of the errors of these mixers, one table per setting."""

    def tables(found: Measurement) -> list[str]:
        parts = []
        for setting in squares.CONTRASTS:
            rows = [
                [
                    f"`{mixer}`",
                    number(found.mean(f"numbers of state of {mixer}, {setting}")),
                    mean(found, f"{mixer}, {setting}"),
                    mean(found, squares.share_closed(mixer, setting)),
                ]
                for mixer in mixers
            ]
            rows.append(["exact regression", "", mean(found, f"exact regression, {setting}"), "1"])
            head = [
                "memory",
                "numbers of state",
                "squared error",
                "share of the gap from the delta rule to the exact regression",
            ]
            parts.append(f"{setting.capitalize()} of the inputs:\n\n" + table(head, rows))
        return parts

    return tables


def recall_tables(found: Measurement) -> list[str]:
    steps = (recalls.SHORT, recalls.LONG)
    rows = [
        [f"`{name}`", *(mean(found, accuracy(name, recalls.PAIRS, recalls.part(one))) for one in steps)]
        for name in ridge.NAMES
    ]
    return [table(["memory", *(f"accuracy after {one:,} steps" for one in steps)], rows)]


def draw_squares(results: Mapping[str, Measurement], figure: Any) -> None:
    found = results["own-1"]
    shown_mixers = [*squares.MIXERS]
    if "own-1b" in results:
        best = ridge.best_of_smaller(results["own-1b"])
        found = Measurement({**found.values, **{k: v for k, v in results["own-1b"].values.items() if best in k}})
        shown_mixers.append(best)
    panels = figure.subplots(1, len(squares.CONTRASTS), sharey=True)
    styles = mixer_styles(shown_mixers)
    for axes, setting in zip(panels, squares.CONTRASTS):
        places = [
            int(name.rsplit(" ", 1)[1]) for name in found.values if name.startswith(f"exact regression, {setting}, ex")
        ]
        for mixer in (*shown_mixers, "exact regression"):
            errors = [found.mean(f"{mixer}, {setting}, example {place}") for place in places]
            look = {"color": "black", "linestyle": ":", "label": mixer}
            if mixer in styles:
                style = styles[mixer]
                look = {"color": style.colour, "linestyle": style.line, "marker": style.marker, "label": mixer}
            axes.plot(places, errors, markersize=4, **look)
        axes.set_yscale("log")
        axes.set_title(f"{setting} of the inputs", fontsize=10)
        axes.set_xlabel("examples in context")
        plain_axes(axes)
    panels[0].set_ylabel("squared error")
    shared_legend(figure, panels[0])


def confidence_tables(found: Measurement) -> list[str]:
    streams = [
        [
            rule,
            str(pairs),
            mean(found, f"{rule} posterior, {pairs} pairs: squared error over variance"),
            mean(found, f"{rule} posterior, {pairs} pairs: AUROC of new keys"),
        ]
        for rule in ("exact", "diagonal")
        for pairs in confidence.STREAM_PAIRS
    ]
    trained = [
        [
            f"`{mixer}`",
            score,
            mean(found, f"{mixer}: AUROC of wrong answers by {score}"),
            mean(found, f"{mixer}: AUROC of new keys by {score}"),
            mean(found, f"{mixer}: calibration error by {score}"),
            mean(found, f"{mixer}: accuracy on the surest 80% by {score}"),
        ]
        for mixer in confidence.MIXERS
        for score in confidence.SCORES
    ]
    routed = [
        [
            f"`{mixer}`",
            order,
            *(mean(found, f"{mixer}: accuracy with {share:.0%} routed by {order}") for share in confidence.ROUTED),
        ]
        for mixer in confidence.MIXERS
        for order in ("variance", "chance")
    ]
    loads = [
        [name.replace(": accuracy at", ","), mean(found, name)] for name in found.values if ": accuracy at " in name
    ]
    return [
        "Streams from the model that the variances assume, without training:\n\n"
        + table(["posterior", "pairs", "squared error / variance", "AUROC of new keys"], streams),
        "Trained models, over all loads:\n\n"
        + table(
            [
                "memory",
                "score",
                "AUROC of wrong answers",
                "AUROC of new keys",
                "calibration error",
                "accuracy on the surest 80%",
            ],
            trained,
        ),
        "Accuracy where queries are routed to softmax attention over the layer's own keys and values:\n\n"
        + table(["memory", "routed by", *(f"{share:.0%}" for share in confidence.ROUTED)], routed),
        "Accuracy by load:\n\n" + table(["memory and pairs", "accuracy"], loads),
    ]


def hybrid_tables(trainings: Iterable[str], orders: Iterable[str], numbers: Iterable[str]) -> Tables:
    """Of hybrids by kind of training: accuracies by the order of routing, and numbers of each kind."""

    def tables(found: Measurement) -> list[str]:
        kinds = [(mixer, training) for mixer in hybrids.MIXERS for training in trainings]
        routed = [
            [
                f"`{mixer}`",
                training,
                order,
                *(
                    mean(found, f"{mixer}, {training}: accuracy with {share:.0%} routed by {order}")
                    for share in hybrids.ROUTED
                ),
            ]
            for mixer, training in kinds
            for order in orders
        ]
        models = [
            [f"`{mixer}`", training, *(mean(found, f"{mixer}, {training}: {name}") for name in numbers)]
            for mixer, training in kinds
        ]
        head = ["memory", "answered by attention in training"]
        return [
            "Accuracy by the share of the queries that attention answers in the test:\n\n"
            + table([*head, "routed by", *(f"{share:.0%}" for share in hybrids.ROUTED)], routed),
            table([*head, *numbers], models),
        ]

    return tables


def draw_confidence(results: Mapping[str, Measurement], figure: Any) -> None:
    found = results["own-2"]
    panels = figure.subplots(1, 3 + ("own-2b" in results))
    reliability, coverage, routing = panels[:3]
    styles = mixer_styles(confidence.MIXERS)
    groups = range(1, confidence.GROUPS + 1)
    reliability.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8)
    lines = {"variance": "-", "probability": ":", "chance": "--"}
    for mixer, score in ((mixer, score) for mixer in confidence.MIXERS for score in ("variance", "probability")):
        values = {name.removeprefix(f"{mixer}: "): found.mean(name) for name in found.values if name.startswith(mixer)}
        style = styles[mixer]
        look = {"color": style.colour, "marker": style.marker, "markersize": 4}
        look |= {"linestyle": lines[score], "label": f"{mixer}, {score}"}
        predicted, observed = (
            [values[f"{kind} accuracy by {score}, group {group}"] for group in groups]
            for kind in ("predicted", "observed")
        )
        reliability.plot(predicted, observed, **look)
        surest = [values[f"accuracy on the surest {share:.0%} by {score}"] for share in confidence.COVERAGES]
        coverage.plot(confidence.COVERAGES, surest, **look)
        order = "chance" if score == "probability" else score
        routed = [values[f"accuracy with {share:.0%} routed by {order}"] for share in confidence.ROUTED]
        routing.plot(confidence.ROUTED, routed, **{**look, "linestyle": lines[order], "label": f"{mixer}, {order}"})
    for axes, title, x, y in (
        (reliability, "calibration", "predicted accuracy", "observed accuracy"),
        (coverage, "abstention", "share of the queries answered", "accuracy on them"),
        (routing, "routing to softmax attention", "share of the queries routed", "accuracy"),
    ):
        axes.set_title(title, fontsize=10)
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        plain_axes(axes)
    if "own-2b" in results:
        draw_hybrids(results, panels[3], styles)
    shared_legend(figure, reliability, routing, *panels[3:])


def draw_hybrids(results: Mapping[str, Measurement], axes: Any, styles: Any) -> None:
    """What a router is better by than chance, at the same share and of the same models."""
    axes.axhline(0, color="#bbbbbb", linewidth=0.8)
    for name, training, order, line in (
        ("own-2b", "uncertain queries", "variance", "-."),
        ("own-2c", "random queries", "fitted variance", "-"),
    ):
        for mixer in hybrids.MIXERS if name in results else ():
            label = f"{mixer}, {training}: accuracy with {{:.0%}} routed by {{}}"
            gains = [
                results[name].mean(label.format(share, order)) - results[name].mean(label.format(share, "chance"))
                for share in hybrids.ROUTED
            ]
            look = {"color": styles[mixer].colour, "linestyle": line, "label": f"{mixer}, hybrid, {order}"}
            axes.plot(hybrids.ROUTED, gains, **look)
    axes.set_title("hybrids trained as one", fontsize=10)
    axes.set_xlabel("share of the queries routed")
    axes.set_ylabel("accuracy minus that by chance")
    plain_axes(axes)


def products_tables(found: Measurement) -> list[str]:
    streams = [
        [
            name,
            *(
                mean(found, f"{name}: {what}")
                for what in (
                    "largest log norm of random products",
                    "largest log norm of chosen products",
                    "growth per step of chosen products",
                    "bound on it",
                    "largest log norm over its bound",
                )
            ),
        ]
        for name in products.STREAMS
    ]
    labels = [name.removesuffix(": accuracy") for name in found.values if name.endswith(": accuracy")]
    trained = [
        [
            label.removeprefix("trained "),
            *(
                mean(found, f"{label}: {what}")
                for what in (
                    "accuracy",
                    "largest log norm",
                    "mean log norm after the sequence",
                    "mean bound after the sequence",
                    "largest log norm over its bound",
                )
            ),
        ]
        for label in labels
    ]
    return [
        "Natural logarithms of spectral norms, and growth of the logarithm per step over the second half:\n\n"
        + table(
            [
                "steps",
                "random, largest",
                "chosen, largest",
                "chosen, growth per step",
                "bound on it",
                "largest over its bound",
            ],
            streams,
        ),
        "Layers trained on shuffled recall:\n\n"
        + table(["layer", "accuracy", "largest", "at the end", "bound at the end", "largest over its bound"], trained),
    ]


def outside_tables(found: Measurement) -> list[str]:
    rates = [f"accuracy at rate {rate:g}" for rate in outside.RATES]
    outcomes, steps = (
        table(
            ["trained", *names],
            [[kind, *(mean(found, f"{kind}: {name}") for name in names)] for kind in outside.SETTINGS],
        )
        for names in ((*OUTSIDE_OUTCOMES, *rates), OUTSIDE_STEPS)
    )
    return [
        f"How trainings ended, the accuracy at the better rate and at each:\n\n{outcomes}",
        "Steps $c\\, k^\\top D k$, and natural logarithms of the norms of their products, at the better rate; `–` where a "
        f"training at it diverged:\n\n{steps}",
    ]


def draw_outside(found: Measurement, axes: Any) -> None:
    for side, (label, colour) in enumerate((("inside", "#0072B2"), ("outside", "#D55E00"))):
        lost = [found.mean(f"{names[side]}: share of diverged trainings") for names in outside.FAMILIES.values()]
        places = [family + 0.15 * (2 * side - 1) for family in range(len(lost))]
        axes.stem(places, lost, linefmt=colour, basefmt=" ", label=label)
    axes.set_xticks(range(len(outside.FAMILIES)), list(outside.FAMILIES), fontsize=8)
    axes.set_ylim(-0.03, 1.05)
    axes.set_title("trained inside and outside of the bound", fontsize=10)
    axes.set_ylabel("share of the trainings that diverged")
    axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)


def draw_products(results: Mapping[str, Measurement], figure: Any) -> None:
    found = results["own-3"]
    panels = figure.subplots(1, 2 + ("own-3b" in results))
    left, right = panels[:2]
    steps = [period * products.LENGTH for period in range(1, products.PERIODS + 1)]
    colours = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")

    def curve(axes: Any, name: str, colour: str, label: str, bound: bool) -> None:
        norms = [found.mean(f"{name}: log norm after {n} chosen steps") for n in steps]
        axes.plot(steps, norms, color=colour, marker="o", markersize=3, label=label)
        if bound:
            bounds = [found.mean(f"{name}: bound after {n} chosen steps") for n in steps]
            axes.plot(steps, bounds, color=colour, linestyle="--", linewidth=1, label=f"{label}, bound")

    for decay, colour in zip(products.DECAYS, colours):
        curve(left, f"pdn, decay {decay}, x = 2.0", colour, f"preconditioner's decay {decay}", decay in (0.99, 1.0))
    curve(right, "vla with refresh", colours[0], "vla with refresh", True)
    curve(right, "vla without refresh", colours[1], "vla without refresh", True)
    curve(right, "two-sided, decay 0.9, x = 2.0", colours[2], "two-sided preconditioner", False)
    curve(right, "rls", colours[3], "exact recursion (rls)", False)
    left.set_title("PDN, x = 2", fontsize=10)
    right.set_title("other rules", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("chosen steps")
        axes.legend(fontsize=7, frameon=False)
        plain_axes(axes)
    left.set_ylabel("log norm of the product")
    if "own-3b" in results:
        draw_outside(results["own-3b"], panels[2])


def shared_legend(figure: Any, *panels: Any) -> None:
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(4, len(found)), fontsize=8, frameon=False
    )


PAGES = {
    "own-1": Page(
        "own-least-squares.md",
        "Squared error by examples in context",
        draw_squares,
        {
            "own-1": Part("", squares_tables(squares.MIXERS), squares.MIXERS),
            "own-1b": Part(
                "The ridge of the exact recursion",
                squares_tables((squares.BASE, squares.ITERATIVE, *ridge.NAMES)),
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
                hybrid_tables(hybrids.TRAININGS, hybrids.ORDERS, ("sharpness", "AUROC of wrong answers of the memory")),
                hybrids.MIXERS,
            ),
            "own-2c": Part(
                "Hybrids with a fitted router",
                hybrid_tables(
                    fitted.TRAININGS,
                    fitted.ORDERS,
                    (
                        "sharpness",
                        "AUROC of wrong answers by the fitted variance",
                        "AUROC of wrong answers by the mean log variance",
                        *(
                            f"AUROC of wrong answers by the mean log variance, {int(load * hybrids.PAIRS)} pairs"
                            for load in hybrids.LOADS
                        ),
                    ),
                ),
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
                {"vla", *(getattr(mixer, "name", mixer) for mixer in products.TRAINED["mixers"])},
            ),
            "own-3b": Part(
                "Training outside of the bound",
                outside_tables,
                {setting.mixer.name for setting in outside.SETTINGS.values()},
            ),
        },
    ),
}


def checksum(records: Mapping[str, ClaimRecord]) -> str:
    """Of the numbers that a figure shows, which its file holds."""
    return hashlib.sha256(
        json.dumps([record.numbers for record in records.values()], sort_keys=True).encode()
    ).hexdigest()


def render(name: str, folder: Path = RESULTS) -> str:
    """The page with the measured part as the results in `folder` have it."""
    page = PAGES[name]
    before, _, rest = page.path.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
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
    return before + "\n\n".join([BEGIN, *(line.strip() for line in lines), END]) + after


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
