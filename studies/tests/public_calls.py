"""The public functions and classes of the studies, with a valid call of each: its arguments by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fastweights_studies import claims, leaderboard
from fastweights_studies.inspection import Inspection, Panel
from fastweights_studies.leaderboard.streams import STREAMS

from fastweights.layers import MixerChoice
from studies.tests.leaderboard.toy import make_row
from tests.evaluation.small import model
from tests.public_calls import fields

__all__ = ["CALLS", "INSIDE", "NAMED", "TAKEN", "WITHOUT"]

# Public packages are those with __all__ outside these.
INSIDE = ("commands", "judge", "measure", "own", "pages", "papers")
# Names without a call here, and why.
WITHOUT: dict[str, str] = {"leaderboard.Part": "has no objects but those of its subclasses"}
# What messages call an argument.
# Kinds of values that a call takes beside those of its annotation.
TAKEN = {("claims.Claim", "safe"): {"no text"}}
NAMED = {
    ("claims.find_claim", "name"): "claim",
    ("claims.load_record", "path"): "result",
    ("leaderboard.find_part", "name"): "part",
    ("leaderboard.load_board", "path"): "result",
}


@cache
def measured() -> Any:
    return claims.committed_records()["C1"]


@cache
def request() -> Any:
    return leaderboard.Request(mixers=(MixerChoice("gdn"),), size="small", device="cpu", output=Path("board"))


def board() -> Path:
    made = leaderboard.Board(Path("board/mqar-small.json"))
    made.add([make_row()])
    return made.path


def entries() -> list[Any]:
    return leaderboard.find_part("mqar").entries([make_row()])


def panel() -> Panel:
    return Panel(name="a", x=torch.arange(3.0), y=torch.ones(3, 2), x_label="x", y_label="y")


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "claims.Claim": lambda: fields(claims.find_claim("C1")),
    "claims.ClaimRecord": lambda: fields(measured()),
    "claims.Conditions": lambda: {"seeds": (0,)},
    "claims.Measurement": lambda: {"numbers": (claims.Number("x", 1.0),)},
    "claims.Number": lambda: {"measure": "x", "value": 1.0, "column": {"pairs": 4}},
    "claims.Quantity": lambda: {"words": "{pairs} pairs"},
    "claims.Verdict": lambda: {"status": "holds", "statements": ["it does"]},
    "claims.Words": lambda: {"subject": "{mixer}"},
    "claims.claim_names": dict,
    "claims.claims_of": lambda: {"paper": "pdn"},
    "claims.committed_records": dict,
    "claims.find_claim": lambda: {"name": "C1"},
    "claims.load_record": lambda: {"path": claims.save_record(Path("out"), measured())},
    "claims.load_records": lambda: {"folder": Path("out")},
    "claims.run_claim": lambda: {
        "claim": claims.find_claim("S1"), "conditions": claims.Conditions(seeds=(0,), measurements=Path("none")),
    },
    "claims.save_record": lambda: {"folder": Path("out"), "record": measured()},
    "inspection.Inspection": dict,
    "inspection.Measure": lambda: {"title": "title", "source": "paper", "of_layer": None},
    "inspection.Panel": lambda: fields(panel()),
    "inspection.inspect_model": lambda: {"model": model(), "ids": list(range(20)), "every": 8, "measures": ["window"]},
    "inspection.save_inspection": lambda: {
        "inspection": Inspection({"window": {0: [panel()]}}, {0: "gdn"}, 2), "folder": Path("page"), "title": "a title",
        "facts": {},
    },
    "leaderboard.Board": lambda: {"path": Path("a.json"), "rows": [make_row()]},
    "leaderboard.Gates": dict,
    "leaderboard.Request": lambda: fields(request()),
    "leaderboard.RuleInputs": lambda: {
        "stream": next(iter(STREAMS.values())).make(0, 4), "gates": leaderboard.Gates(),
    },
    "leaderboard.Standing": lambda: {"entry": entries()[0], "mean": 0.5, "spread": None, "place": 1, "tied": False},
    "leaderboard.board_path": lambda: {"folder": Path("board"), "part": "mqar", "size": "small"},
    "leaderboard.find_part": lambda: {"name": "mqar"},
    "leaderboard.known_parts": dict,
    "leaderboard.load_board": lambda: {"path": board()},
    "leaderboard.part_rows": lambda: {
        "part": leaderboard.find_part("mqar"), "size": "small", "folder": board().parent, "measurements": Path("none"),
    },
    "leaderboard.places": lambda: {"entries": entries(), "better": "higher"},
    "leaderboard.register_rule": lambda: {"name": "of a test", "gates": ["decay"], "state": lambda d: d},
    "leaderboard.run_part": lambda: {"part": leaderboard.find_part("memory"), "request": request()},
    "leaderboard.table_of": lambda: {
        "part": leaderboard.find_part("mqar"), "size": "small", "rows": [make_row()], "mixers": ["gdn"],
    },
}  # fmt: skip
