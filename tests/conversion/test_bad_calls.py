"""Bad arguments of conversions are refused before a model is built or a file is written, in words of the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.conversion import check_logits, convert, convert_folder
from fastweights.layers import build_mixer

from ..bad_calls import check_refused
from .small import VOCABULARY, model, tokens

NAN, INFINITY = float("nan"), float("inf")
SIZES = [0, -1, 1.5, "4", True, None]
SEEDS = [-1, 2**63, 0.5, "0", True, None]
SOURCE, CONVERTED = model("gdn"), model("pgdn")

FOLDER: dict[str, list[Any]] = {
    "source": ["", 3, None, b"model", "nowhere", "no/such/folder", "a\0b"],
    "output": ["", 3, None, b"new", "a\0b", "model", "model/config.json/new", "taken"],
    "to": ["", "pgnd", "kda", 3, None, ["pgdn"]],
    "tokens": [*SIZES, 10**8],
    "seed": SEEDS,
    "peak": [0.0, -1.0, NAN, INFINITY, "0.1", True],
    "steps": [*SIZES, 10**14],
    "prompt": ["", 3, b"text", ["text"], "\udcff"],
    "options": [3, "bound=1", ["bound"], {3: 1}],
    "name": [{"name": "gdn"}],
    "bound": [{"bound": 5}, {"bound": NAN}, {"bound": "1"}, {"bound": None}],
    "interval": [{"interval": "wide"}, {"interval": 3}],
    "conv_size": [{"conv_size": 7}],
    "boun": [{"boun": 1}],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("conversion")
    SOURCE.save_pretrained(place / "model")
    (place / "taken").write_text("a file")
    return place


@pytest.mark.parametrize("argument, value", [(argument, value) for argument in FOLDER for value in FOLDER[argument]])
def test_convert_folder(argument: str, value: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    given: dict[str, Any] = {"source": "model", "output": Path("new"), "to": "pgdn"}
    given |= {"options" if isinstance(value, dict) else argument: value}
    source, output = given.pop("source"), given.pop("output")
    named = "SOURCE" if value in ("nowhere", "no/such/folder") else argument  # looked for as the command does
    check_refused(named, lambda: convert_folder(source, output, **given), folder)


CALLS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a model by name": ("model", lambda: convert("gdn", to="pgdn")),  # type: ignore[arg-type]
    "a layer": ("model", lambda: convert(build_mixer("gdn", hidden_size=8, num_heads=2), to="pgdn")),  # type: ignore[arg-type]
    "a body without a head": ("model", lambda: convert(SOURCE.model, to="pgdn")),
    "a mixer by number": ("to", lambda: convert(SOURCE, to=3)),  # type: ignore[arg-type]
    "no mixer": ("to", lambda: convert(SOURCE, to=None)),  # type: ignore[arg-type]
    "a negative seed": ("seed", lambda: convert(SOURCE, to="pgdn", seed=-1)),
    "a seed of 2^63": ("seed", lambda: convert(SOURCE, to="pgdn", seed=2**63)),
    "a seed in words": ("seed", lambda: convert(SOURCE, to="pgdn", seed="0")),  # type: ignore[arg-type]
    "a misspelt option": ("boun", lambda: convert(SOURCE, to="pgdn", boun=1)),
    "an option out of range": ("bound", lambda: convert(SOURCE, to="pgdn", bound=5)),
    "an option that changes sizes": ("head_dim", lambda: convert(SOURCE, to="pgdn", head_dim=8)),
    "a source by name": ("source", lambda: check_logits("gdn", CONVERTED, tokens())),  # type: ignore[arg-type]
    "a continuation by name": ("converted", lambda: check_logits(SOURCE, "pgdn", tokens())),  # type: ignore[arg-type]
    "a continuation with other layers": (
        "converted",
        lambda: check_logits(SOURCE, model("pgdn", num_hidden_layers=3), tokens()),
    ),
    "tokens in a list": ("tokens_BT", lambda: check_logits(SOURCE, CONVERTED, [[1, 2]])),  # type: ignore[arg-type]
    "tokens in one dimension": ("tokens_BT", lambda: check_logits(SOURCE, CONVERTED, tokens()[0])),
    "float tokens": ("tokens_BT", lambda: check_logits(SOURCE, CONVERTED, tokens().float())),
    "no tokens": ("tokens_BT", lambda: check_logits(SOURCE, CONVERTED, tokens(0))),
    "tokens outside the vocabulary": (
        "tokens_BT",
        lambda: check_logits(SOURCE, CONVERTED, torch.tensor([[1, VOCABULARY]])),
    ),
    "negative tokens": ("tokens_BT", lambda: check_logits(SOURCE, CONVERTED, torch.tensor([[1, -1]]))),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(*CALLS[name], tmp_path)
