"""The tables of the pages about results of our own: numbers selected by their fields."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

from fastweights_studies.claims import Measurement
from fastweights_studies.own import o1_least_squares_as_layers as squares
from fastweights_studies.own import o1b_the_ridge_of_the_exact_recursion as ridge
from fastweights_studies.own import o1c_the_ridge_in_recall as recalls
from fastweights_studies.own import o2_confidence_of_memories as confidence
from fastweights_studies.own import o2b_hybrids_trained_as_one as hybrids
from fastweights_studies.own import o3_products_of_transitions as products
from fastweights_studies.own import o3b_training_outside_the_bound as outside
from fastweights_studies.pages.rendering import number, table

__all__ = [
    "Columns",
    "Tables",
    "confidence_tables",
    "hybrid_tables",
    "mean",
    "outside_tables",
    "products_tables",
    "recall_tables",
    "ridge_tables",
    "squares_tables",
]

Tables: TypeAlias = Callable[[Measurement], list[str]]
# The columns of a table: the heading, the measure, and fields beside those of the row.
Columns: TypeAlias = Mapping[str, tuple[str, Mapping[str, Any]]]


def mean(found: Measurement, measure: str, *mixer: Any, **fields: Any) -> str:
    """The mean of a number with the range over the seeds, where their values differ in what is shown. Arguments as of
    `Measurement.select`."""
    values = found.values(measure, *mixer, **fields)
    if any(map(math.isnan, values)):
        return "–"
    smallest, largest = show(min(values)), show(max(values))
    middle = show(found.mean(measure, *mixer, **fields))
    return middle if smallest == largest else f"{middle} ({smallest} to {largest})"


def show(x: float) -> str:
    """Three digits, rounding errors with an exponent."""
    return f"{x:.1e}" if 0 < abs(x) < 1e-9 else number(x)


def mean_cells(found: Measurement, columns: Columns, *mixer: Any, **row: Any) -> list[str]:
    """The cells of one row."""
    return [mean(found, measure, *mixer, **row, **fields) for measure, fields in columns.values()]


def squares_tables(found: Measurement) -> list[str]:
    return gap_tables(found, {mixer: (mixer, {}) for mixer in squares.MIXERS})


def ridge_tables(found: Measurement) -> list[str]:
    ridges = {name: (squares.EXACT, {"options": {"ridge": one}}) for one, name in ridge.NAMES.items()}
    return gap_tables(found, {**{mixer: (mixer, {}) for mixer in (squares.BASE, squares.ITERATIVE)}, **ridges})


def gap_tables(found: Measurement, memories: Mapping[str, tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Of the errors of memories, by label the mixer and what selects it: one table per setting."""
    parts = []
    for variances in squares.CONTRASTS:
        rows = [
            [
                f"`{label}`",
                number(found.mean("state_size", mixer, variances=variances, **fields)),
                *(mean(found, measure, mixer, variances=variances, **fields) for measure in ("error", "share_closed")),
            ]
            for label, (mixer, fields) in memories.items()
        ]
        rows.append(["exact regression", "", mean(found, "best_error", variances=variances), "1"])
        head = [
            "memory",
            "numbers of state",
            "squared error",
            "share of the gap from the delta rule to the exact regression",
        ]
        title = squares.GAP_TERMS["variances"][variances].capitalize()
        parts.append(f"{title} of the inputs:\n\n" + table(head, rows))
    return parts


def recall_tables(found: Measurement) -> list[str]:
    steps = (recalls.SHORT, recalls.LONG)
    rows = [
        [f"`{name}`", *(mean(found, "accuracy", options={"ridge": one}, steps=n) for n in steps)]
        for one, name in ridge.NAMES.items()
    ]
    return [table(["memory", *(f"accuracy after {n:,} steps" for n in steps)], rows)]


def confidence_tables(found: Measurement) -> list[str]:
    of_streams: Columns = {
        "squared error / variance": ("stream_error_over_variance", {}),
        "AUROC of new keys": ("stream_new_keys_auroc", {}),
    }
    of_scores: Columns = {
        "AUROC of wrong answers": ("wrong_auroc", {}),
        "AUROC of new keys": ("new_keys_auroc", {}),
        "calibration error": ("calibration_error", {}),
        "accuracy on the surest 80%": ("surest_accuracy", {"share": 0.8}),
    }
    streams = [
        [posterior, str(pairs), *mean_cells(found, of_streams, posterior=posterior, pairs=pairs)]
        for posterior in ("exact", "diagonal")
        for pairs in confidence.STREAM_PAIRS
    ]
    trained = [
        [f"`{mixer}`", score, *mean_cells(found, of_scores, mixer, score=score)]
        for mixer in confidence.MIXERS
        for score in confidence.SCORES
    ]
    of_routing = route_columns(confidence.ROUTED)
    routed = [
        [f"`{mixer}`", order, *mean_cells(found, of_routing, mixer, order=order)]
        for mixer in confidence.MIXERS
        for order in confidence.ORDERS
    ]
    sizes = dict.fromkeys((str(one.mixer), one.column["pairs"]) for one in found.select("accuracy"))
    loads = [[f"{mixer}, {pairs} pairs", mean(found, "accuracy", mixer, pairs=pairs)] for mixer, pairs in sizes]
    return [
        "Streams from the model that the variances assume, without training:\n\n"
        + table(["posterior", "pairs", *of_streams], streams),
        "Trained models, over all loads:\n\n" + table(["memory", "score", *of_scores], trained),
        "Accuracy where queries are routed to softmax attention over the layer's own keys and values:\n\n"
        + table(["memory", "routed by", *of_routing], routed),
        "Accuracy by load:\n\n" + table(["memory and pairs", "accuracy"], loads),
    ]


def route_columns(shares: Iterable[float]) -> Columns:
    """Accuracies by the share of the queries that attention answers."""
    return {f"{share:.0%}": ("routed_accuracy", {"share": share}) for share in shares}


def hybrid_tables(trainings: Iterable[str], orders: Iterable[str], columns: Columns) -> Tables:
    """Of hybrids by kind of training: accuracies by the order of routing, and numbers of each kind."""
    words = hybrids.HYBRID_WORDS
    of_routing = route_columns(hybrids.ROUTED)
    kinds = [(mixer, training) for mixer in hybrids.MIXERS for training in trainings]

    def tables(found: Measurement) -> list[str]:
        routed = [
            [
                f"`{mixer}`",
                words.term("training", training),
                words.term("order", order),
                *mean_cells(found, of_routing, mixer, training=training, order=order),
            ]
            for mixer, training in kinds
            for order in orders
        ]
        models = [
            [f"`{mixer}`", words.term("training", training), *mean_cells(found, columns, mixer, training=training)]
            for mixer, training in kinds
        ]
        head = ["memory", "answered by attention in training"]
        return [
            "Accuracy by the share of the queries that attention answers in the test:\n\n"
            + table([*head, "routed by", *of_routing], routed),
            table([*head, *columns], models),
        ]

    return tables


def products_tables(found: Measurement) -> list[str]:
    of_streams: Columns = {
        "random, largest": ("random_log_norm", {}),
        "chosen, largest": ("chosen_log_norm", {}),
        "chosen, growth per step": ("growth", {}),
        "bound on it": ("growth_bound", {}),
        "largest over its bound": ("excess", {}),
    }
    of_models: Columns = {
        "accuracy": ("trained_accuracy", {}),
        "largest": ("trained_log_norm", {}),
        "at the end": ("trained_last_log_norm", {}),
        "bound at the end": ("trained_last_bound", {}),
        "largest over its bound": ("trained_excess", {}),
    }
    streams = [
        [
            products.WORDS.name_subject(found.select("growth", **rule.column)[0]),
            *mean_cells(found, of_streams, **rule.column),
        ]
        for rule in products.RULES
    ]
    trained = [[choice.label, *mean_cells(found, of_models, choice)] for choice in products.WORDS.choices]
    return [
        "Natural logarithms of spectral norms, and growth of the logarithm per step over the second half:\n\n"
        + table(["steps", *of_streams], streams),
        "Layers trained on shuffled recall:\n\n" + table(["layer", *of_models], trained),
    ]


def outside_tables(found: Measurement) -> list[str]:
    outcomes: Columns = {
        "accuracy": ("accuracy", {}),
        "share of diverged trainings": ("diverged_share", {}),
        "share of troubled trainings": ("troubled_share", {}),
        "largest spike of gradients": ("largest_spike", {}),
        **{f"accuracy at rate {rate:g}": ("rate_accuracy", {"rate": rate}) for rate in outside.RATES},
    }
    steps: Columns = {
        "largest step before training": ("largest_step", {"when": "before"}),
        "largest step after training": ("largest_step", {"when": "after"}),
        "share of steps beyond 2 after training": ("beyond_share", {"when": "after"}),
        "largest log norm of a product before training": ("log_norm", {"when": "before"}),
        "largest log norm of a product after training": ("log_norm", {"when": "after"}),
    }
    names = [outside.WORDS.name_subject(found.select("accuracy", **one.column)[0]) for one in outside.SETTINGS]
    how_ended, how_stepped = (
        table(
            ["trained", *columns],
            [
                [name, *mean_cells(found, columns, **setting.column)]
                for name, setting in zip(names, outside.SETTINGS, strict=True)
            ],
        )
        for columns in (outcomes, steps)
    )
    return [
        f"How trainings ended, the accuracy at the better rate and at each:\n\n{how_ended}",
        "Steps $c\\, k^\\top D k$, and natural logarithms of the norms of their products, at the better rate; `–` where a "
        f"training at it diverged:\n\n{how_stepped}",
    ]
