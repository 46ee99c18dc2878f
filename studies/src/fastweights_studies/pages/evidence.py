"""What the result files and the claims say about one mixer, for its page and for docs/choosing.md."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from fastweights import ops
from fastweights.layers import MIXERS, Mixer, build_mixer
from fastweights.training import RecallExperiment
from fastweights_studies.claims import Claim, ClaimRecord, claims_of, find_claim, load_records
from fastweights_studies.leaderboard import PARTS, part_rows
from fastweights_studies.leaderboard.entries import Entry
from fastweights_studies.leaderboard.run import cells_of
from fastweights_studies.leaderboard.tables import Cell
from fastweights_studies.measure.first_values import DEFAULTS
from fastweights_studies.measure.judge.records import sizes_in
from fastweights_studies.measure.models import Step, read_steps
from fastweights_studies.measure.recall import setting_column
from fastweights_studies.pages import claims, own_results
from fastweights_studies.pages.rendering import anchor
from fastweights_studies.pages.results import read_measured, value_of
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Plain, Row, select

TRAINED = [name for name, part in PARTS.items() if part.trained]  # of the leaderboard
WIDTH, HEADS = 1024, 8  # of the layers that pages describe, as in the decoding table

# The ops of a layer, for its section in docs/rules.md; those of its preconditioner beside them.
RULES = {
    "LinearAttention": "linear_attention",
    "DeltaNet": "delta_rule",
    "ElementwiseLonghorn": "elementwise_longhorn",
    "PalimpsaD": "palimpsa",
    "PalimpsaM": "palimpsa",
    "GatedKalmaNet": "gated_kalmanet",
    "MesaNet": "mesa",
    "Lattice": "lattice",
    "TestTimeTraining": "output_normalized_ttt",
    "VariationalLinearAttention": "variational_linear_attention",
    "PrintedDeltaNet": "delta_rule",
    "RecursiveLeastSquares": "recursive_least_squares",
    "DeltaProduct": "delta_product",
    "RWKV7": "dplr_delta_rule",
}
# The memories that a paper proposes; its claims are about them. Other claims name a mixer by one of these words.
PROPOSED = {
    "pdn": ("pdn", "pgdn", "pkda"),
    "gka": ("gka",),
    "palimpsa": ("palimpsa-d", "palimpsa-m"),
    "lattice": ("lattice",),
    "vla": ("vla", "vla-conv"),
}
WORDS = {
    "softmax": "softmax",
    "linear": "[Ll]inear attention",
    "mamba2": "(?<!P-)Mamba-2",
    "gla": "GLA",
    "pmamba2": "P-Mamba-2",
    "deltanet": "(?<!Preconditioned )(?<!Gated )DeltaNet",
    "gdn": "GDN|Gated DeltaNet",
    "kda": "KDA",
    "mesa": "MesaNet",
}


# Claims that name no mixer and are measured with the memory of these.
MEASURED_WITH = {"C1": ("rls",), "C5": ("rls", "vla", "vla-conv")}


@cache
def layer(name: str) -> Mixer:
    """The layer at the width of the pages, without its weights."""
    with torch.device("meta"):
        return build_mixer(name, hidden_size=WIDTH, num_heads=HEADS)


def rules_of(name: str) -> list[str]:
    """The ops that compute a mixer's memory; none for softmax attention."""
    spec = MIXERS[name]
    found = RULES.get(spec.layer.__name__)
    if found is None:
        return []
    if not spec.options.get("metaplasticity", True):
        return ["linear_attention"]
    preconditioner = spec.options.get("preconditioner")
    if preconditioner == "key":
        return [found, "preconditioned_delta_rule" if found == "delta_rule" else "precondition_keys"]
    return [found, "precondition_queries"] if preconditioner == "query" else [found]


def kernels(name: str) -> str:
    """Whether every op of the memory has GPU kernels."""
    found = rules_of(name)
    if not found:
        return "torch's"
    return "yes" if all("triton" in getattr(ops, op).spec.backends for op in found) else "no"


def decoding(name: str, results: Path = RESULTS) -> list[Row]:
    """The speeds of the decoding table, one per number of sequences and context, and where a context does not fit."""
    rows = read_measured("decode-table", "decode_table", results)
    return [row for row in select(rows, mixer=name) if row.measure in ("tokens_per_second", "fits")]


def speed(name: str, batch: int, context: int | None = None, results: Path = RESULTS) -> float | None:
    """Tokens per second of decoding; None where nothing was measured."""
    return value_of(decoding(name, results), "tokens_per_second", column={"batch": batch, "context": context})


def training_steps(name: str, results: Path = RESULTS) -> list[tuple[Step, Step | None]]:
    """Measured steps of models with this mixer, each with that of the model in the same run that it was compared with."""
    return [
        (step, beside)
        for base, model in read_steps(read_measured("training-steps", "training_step", results))
        for step, beside in [(base, None), *([(model, base)] if model.model != base.model else [])]
        if name in step.model.mixers()
    ]


def ratio_of(step: Step, base: Step) -> float:
    return step.values["step_ms"] / base.values["step_ms"]


@cache
def recall_defaults() -> dict[str, Plain]:
    """The setting of `fastweights recall --block published` with 4 pairs, as columns have it."""
    return setting_column(RecallExperiment(mixers=("linear",), **DEFAULTS).runs()[0])


def first_recall(name: str, results: Path = RESULTS, seed: int = 0) -> float | None:
    """Accuracy on 4 pairs at the defaults of recall, of the layer as published, at the rate that validation sequences choose."""
    rows = read_measured("first_values", "first_values", results)
    own = select(rows, mixer=name, options={}, seed=seed, column=recall_defaults())
    return next((row.value for row in own if row.run["chosen"]), None)


def full_entries(part: str, results: Path = RESULTS) -> list[Entry]:
    """What the leaderboard has of a part at full size, by column and mixer."""
    entries: list[Entry] = PARTS[part].entries(part_rows(PARTS[part], "full", results / "leaderboard", results))
    return entries


@cache
def board(part: str, results: Path = RESULTS) -> dict[str, dict[str, Cell]]:
    """What the leaderboard says of a part at full size, by column and mixer, the best number first, in Markdown. Of a mixer that
    is measured at several contexts it is the best number."""
    rows = part_rows(PARTS[part], "full", results / "leaderboard", results)
    found: dict[str, dict[str, Cell]] = {}
    for column, cells in cells_of(PARTS[part], "full", rows).items():
        found[column] = {}
        for cell in cells.values():
            found[column].setdefault(cell.label, replace(cell, text=cell.text.replace("*", "\\*")))
    return found


def op_times(name: str, results: Path = RESULTS) -> list[tuple[str, str, float, float | None]]:
    """Device, size, and ms of a forward and backward of the op alone, ours and the peer's; for ops called as the mixer."""
    rows = select(
        read_measured("kernels", "kernels", results),
        measure="forward_backward_ms",
        column={"op": name, "replayed": True},
    )
    return [
        (
            row.origin.device,
            str(sizes_in(row.column)),
            row.value,
            value_of(rows, row.measure, column={**row.column, "peer": "fla"}),
        )
        for row in select(rows, column={"peer": None})
        if row.value is not None
    ]


@cache
def records_of(results: Path) -> dict[str, ClaimRecord]:
    return dict(load_records(results / "claims"))


def claims_about(name: str, results: Path = RESULTS) -> list[tuple[Claim, str]]:
    """Claims of the paper that proposes the mixer, those that name it and those measured with it; each with what was found."""
    records = records_of(results)
    return [(claim, claims.status(claim, records)) for claim in claims_of() if is_about(claim, name)]


def is_about(claim: Claim, name: str) -> bool:
    word = WORDS.get(name)
    if name in PROPOSED[claim.paper] or name in MEASURED_WITH.get(claim.name, ()):
        return True
    return word is not None and re.search(rf"\b({word})\b", claim.says) is not None


def own_about(name: str, results: Path = RESULTS) -> list[tuple[Claim, str, list[str]]]:
    """Results of our own that train the mixer or measure its steps: each with its place in docs/, and what was found at the
    smaller and at the larger size, "" where it has none."""
    records, found = records_of(results), []
    for page in own_results.PAGES.values():
        for part, shown in page.parts.items():
            if name in shown.mixers:
                claim = find_claim(part)
                sizes = [claims.status(claim, records)]
                larger = claim.result_name("cuda")
                sizes.append(records[larger].status if larger != part and larger in records else "")
                found.append((claim, page.file + f"#{anchor(shown.title)}" * bool(shown.title), sizes))
    return found


def claims_of_paper(paper: str, results: Path = RESULTS) -> dict[str, list[str]]:
    """The names of a paper's claims by what was found."""
    found: dict[str, list[str]] = {}
    for claim in claims_of(paper):
        found.setdefault(claims.status(claim, records_of(results)), []).append(claim.name)
    return found
