"""The figures of the pages about results of our own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastweights.analysis.plot_style import mixer_styles, plain_axes
from fastweights_studies.claims import Measurement
from fastweights_studies.own import o1_least_squares_as_layers as squares
from fastweights_studies.own import o1b_the_ridge_of_the_exact_recursion as ridge
from fastweights_studies.own import o2_confidence_of_memories as confidence
from fastweights_studies.own import o2b_hybrids_trained_as_one as hybrids
from fastweights_studies.own import o3_products_of_transitions as products
from fastweights_studies.own import o3b_training_outside_the_bound as outside

__all__ = ["draw_confidence", "draw_products", "draw_squares"]


def draw_squares(results: Mapping[str, Measurement], figure: Any) -> None:
    """The error of every memory by the number of examples, one panel per setting."""
    found = results["own-1"]
    panels = figure.subplots(1, len(squares.CONTRASTS), sharey=True)
    curves = {mixer: found.select("error_at_example", mixer) for mixer in squares.MIXERS}
    if "own-1b" in results:
        best = ridge.find_best_smaller(results["own-1b"])
        options = {"ridge": best}
        curves[ridge.NAMES[best]] = results["own-1b"].select("error_at_example", squares.EXACT, options=options)
    styles = mixer_styles([*curves])
    for axes, variances in zip(panels, squares.CONTRASTS):
        for label, numbers in curves.items():
            style = styles[label]
            look = {"color": style.colour, "linestyle": style.line, "marker": style.marker, "label": label}
            draw_curve(axes, Measurement(tuple(numbers)), "error_at_example", variances, look)
        look = {"color": "black", "linestyle": ":", "label": "exact regression"}
        draw_curve(axes, found, "best_error_at_example", variances, look)
        axes.set_yscale("log")
        axes.set_title(f"{squares.GAP_TERMS['variances'][variances]} of the inputs", fontsize=10)
        axes.set_xlabel("examples in context")
        plain_axes(axes)
    panels[0].set_ylabel("squared error")
    share_legend(figure, panels[0])


def draw_curve(axes: Any, found: Measurement, measure: str, variances: str, look: Mapping[str, Any]) -> None:
    examples = list(dict.fromkeys(one.column["example"] for one in found.select(measure, variances=variances)))
    errors = [found.mean(measure, variances=variances, example=example) for example in examples]
    axes.plot(examples, errors, markersize=4, **look)


def draw_confidence(results: Mapping[str, Measurement], figure: Any) -> None:
    """Calibration, abstention and routing, and what hybrids gain."""
    found = results["own-2"]
    panels = figure.subplots(1, 3 + ("own-2b" in results))
    reliability, coverage, routing = panels[:3]
    styles = mixer_styles(confidence.MIXERS)
    groups = range(1, confidence.GROUPS + 1)
    reliability.plot([0, 1], [0, 1], color="#bbbbbb", linewidth=0.8)
    lines = {"variance": "-", "probability": ":", "chance": "--"}
    for mixer, score in ((mixer, score) for mixer in confidence.MIXERS for score in ("variance", "probability")):
        style = styles[mixer]
        look = {"color": style.colour, "marker": style.marker, "markersize": 4}
        look |= {"linestyle": lines[score], "label": f"{mixer}, {score}"}
        predicted, observed = (
            [found.mean(measure, mixer, score=score, group=group) for group in groups]
            for measure in ("predicted_accuracy", "observed_accuracy")
        )
        reliability.plot(predicted, observed, **look)
        surest = [found.mean("surest_accuracy", mixer, score=score, share=share) for share in confidence.COVERAGES]
        coverage.plot(confidence.COVERAGES, surest, **look)
        order = "chance" if score == "probability" else score
        routed = [found.mean("routed_accuracy", mixer, order=order, share=share) for share in confidence.ROUTED]
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
    share_legend(figure, reliability, routing, *panels[3:])


def draw_hybrids(results: Mapping[str, Measurement], axes: Any, styles: Any) -> None:
    """What a router is better by than chance, at the same share and of the same models."""
    axes.axhline(0, color="#bbbbbb", linewidth=0.8)
    for name, training, order, line in (
        ("own-2b", "uncertain_queries", "variance", "-."),
        ("own-2c", "random_queries", "fitted_variance", "-"),
    ):
        for mixer in hybrids.MIXERS if name in results else ():
            routed, by_chance = (
                [
                    results[name].mean("routed_accuracy", mixer, training=training, share=share, order=one)
                    for share in hybrids.ROUTED
                ]
                for one in (order, "chance")
            )
            label = f"{mixer}, hybrid, {hybrids.HYBRID_WORDS.term('order', order)}"
            look = {"color": styles[mixer].colour, "linestyle": line, "label": label}
            axes.plot(hybrids.ROUTED, [x - y for x, y in zip(routed, by_chance)], **look)
    axes.set_title("hybrids trained as one", fontsize=10)
    axes.set_xlabel("share of the queries routed")
    axes.set_ylabel("accuracy minus that by chance")
    plain_axes(axes)


def draw_products(results: Mapping[str, Measurement], figure: Any) -> None:
    """Log norms of products of chosen steps and their bounds, and which trainings diverged."""
    found = results["own-3"]
    panels = figure.subplots(1, 2 + ("own-3b" in results))
    left, right = panels[:2]
    steps = [period * products.LENGTH for period in range(1, products.PERIODS + 1)]
    colours = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")

    def draw_rule(axes: Any, colour: str, label: str, shows_bound: bool, **rule: Any) -> None:
        norms, bounds = (
            [found.mean(measure, **rule, steps=n) for n in steps] for measure in ("log_norm_after", "bound_after")
        )
        axes.plot(steps, norms, color=colour, marker="o", markersize=3, label=label)
        if shows_bound:
            axes.plot(steps, bounds, color=colour, linestyle="--", linewidth=1, label=f"{label}, bound")

    for decay, colour in zip(products.DECAYS, colours):
        label = f"preconditioner's decay {decay}"
        draw_rule(left, colour, label, decay in (0.99, 1.0), rule="pdn", decay=decay, bound=2.0)
    draw_rule(right, colours[0], "vla with refresh", True, rule="vla_with_refresh")
    draw_rule(right, colours[1], "vla without refresh", True, rule="vla_without_refresh")
    draw_rule(right, colours[2], "two-sided preconditioner", False, rule="two_sided")
    draw_rule(right, colours[3], "exact recursion (rls)", False, rule="rls")
    left.set_title("PDN, x = 2", fontsize=10)
    right.set_title("other rules", fontsize=10)
    for axes in (left, right):
        axes.set_xlabel("chosen steps")
        axes.legend(fontsize=7, frameon=False)
        plain_axes(axes)
    left.set_ylabel("log norm of the product")
    if "own-3b" in results:
        draw_outside(results["own-3b"], panels[2])


def draw_outside(found: Measurement, axes: Any) -> None:
    """The share of diverged trainings inside and outside of the bound, by family."""
    for side, (label, colour) in enumerate((("inside", "#0072B2"), ("outside", "#D55E00"))):
        lost = [found.mean("diverged_share", **family[side].column) for family in outside.FAMILIES.values()]
        places = [family + 0.15 * (2 * side - 1) for family in range(len(lost))]
        axes.stem(places, lost, linefmt=colour, basefmt=" ", label=label)
    axes.set_xticks(range(len(outside.FAMILIES)), list(outside.FAMILIES), fontsize=8)
    axes.set_ylim(-0.03, 1.05)
    axes.set_title("trained inside and outside of the bound", fontsize=10)
    axes.set_ylabel("share of the trainings that diverged")
    axes.legend(fontsize=7, frameon=False)
    plain_axes(axes)


def share_legend(figure: Any, *panels: Any) -> None:
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found.update(zip(labels, handles))
    figure.legend(
        found.values(), found.keys(), loc="outside lower center", ncols=min(4, len(found)), fontsize=8, frameon=False
    )
