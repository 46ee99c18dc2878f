"""What the result files and the claims say about one mixer, for its page and for docs/choosing.md."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fastweights import ops
from fastweights.layers import MIXERS, Mixer, build_mixer
from fastweights.models import PRESETS, preset
from fastweights.ops.framework.spec import spec_of
from fastweights_studies.claims import Claim, ClaimRecord, claims_of, find_claim, load_records
from fastweights_studies.leaderboard import PARTS, part_rows, table_of
from fastweights_studies.leaderboard.entries import columns_of
from fastweights_studies.pages import claims, own_results
from fastweights_studies.pages.performance_text import anchor
from fastweights_studies.places import RESULTS

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
    return "yes" if all("triton" in spec_of(getattr(ops, op)).backends for op in found) else "no"


@cache
def contents(prefix: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(results.glob(f"{prefix}*"))]


def decoding(name: str, results: Path = RESULTS) -> list[tuple[str, dict[str, Any]]]:
    """Device and row of the decoding table, one per number of sequences and context."""
    return [
        (content["device"], row)
        for content in contents("decode-table-", results)
        for row in content["rows"].values()
        if row["mixer"] == name
    ]


def speed(name: str, batch: int, context: int | None = None, results: Path = RESULTS) -> float | None:
    """Tokens per second of decoding; None where nothing was measured."""
    rows = [row for _, row in decoding(name, results) if (row["batch"], row["context"]) == (batch, context)]
    return rows[0].get("tokens/s") if rows else None


@cache
def mixers_of_model(model: str) -> set[str]:
    """The mixers of a model of the training steps: a preset, or "24 layers of NAME"; how it is compiled stands behind a comma."""
    model = model.split(", ")[0]
    if model.partition(" layers of ")[1]:
        return {model.rpartition(" ")[2]}
    if model not in PRESETS:
        return set()
    return {mixer for mixer, _ in preset(model).mixers()}


def training_steps(name: str, results: Path = RESULTS) -> list[dict[str, Any]]:
    """Measured steps of models with this mixer, beside the model in the same run that they were compared with."""
    found = []
    for content in contents("training-steps-", results):
        for row in content["comparisons"].values():
            base, *_ = row["models"]
            for model, measured in row["models"].items():
                if name in mixers_of_model(model):
                    ratio = measured["step, ms"][0] / row["models"][base]["step, ms"][0]
                    beside = None if model == base else (base, ratio)
                    found.append({"model": model, "beside": beside, "device": content["device"], **row, **measured})
    return found


def first_recall(name: str, results: Path = RESULTS) -> float | None:
    """Accuracy on 4 pairs at the defaults of recall, seed 0, at the better rate."""
    (content,) = contents("first_values.json", results)
    found = [row["accuracy"] for row in content["defaults of every mixer"] if row["mixer"] == name and row["seed"] == 0]
    return max(found, default=None)


@cache
def board(part: str, results: Path = RESULTS) -> dict[str, dict[str, str]]:
    """What the leaderboard says of a part at full size, by column and mixer, the best number first: mean, place and marks. Of
    a mixer that is measured at several contexts it is the best number."""
    rows = part_rows(PARTS[part], "full", results / "leaderboard", results)
    found: dict[str, dict[str, str]] = {}
    for column in columns_of(PARTS[part].entries(rows)):
        _, lines = table_of(PARTS[part], "full", [row for row in rows if PARTS[part].title(row) == column], ())
        found[column] = {}
        for name, *_, cell in lines:
            if not name.startswith("*"):  # the exact regression, which is no mixer
                found[column].setdefault(name.partition(" ")[0], cell.replace("*", "\\*"))
    return found


def op_times(name: str, results: Path = RESULTS) -> list[tuple[str, str, float, float | None]]:
    """Device, size, and ms of a forward and backward of the op alone, ours and the peer's; for ops called as the mixer."""
    found = []
    for content in contents("kernels-nvidia", results):
        for key, row in content["rows"].items():
            op, _, size = key.partition(" ")
            part = row.get("forward_backward", {}).get("graph", {})
            if op == name and "ours" in part:
                found.append((content["device"], size, part["ours"][0], part.get("fla", [None])[0]))
    return found


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
