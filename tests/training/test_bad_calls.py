"""Bad settings and arguments of trainings are refused at once, in words of the argument, and no folder is made."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training import (
    RecallExperiment,
    RecallRun,
    learning_rate_factor,
    run_recall,
    train_run,
    weight_decay_groups,
)
from fastweights.training.language import LanguageRun, load_run, tiny_run, train_language

from ..bad_calls import check_refused

NAN, INFINITY = float("nan"), float("inf")
SIZES = [0, -1, 1.5, "4", None, True, 10**12]
SHARES = [-0.1, 1.1, NAN, "1", None, True]
POSITIVE = [0, -1, NAN, INFINITY, "1", None]

SHARED: dict[str, list[Any]] = {
    "task": ["mqra", 3, None, ["mqar"]],
    "task_options": [{"powr_a": 3}],
    "length": [0, -1, 2, 1.5, "8", 10**12],
    "vocab_size": SIZES,
    "width": SIZES,
    "heads": [*SIZES, 5],
    "layers": [*SIZES, 10**9],
    "steps": SIZES,
    "batch_size": SIZES,
    "weight_decay": [-1, NAN, INFINITY, "0", None],
    "warmup_fraction": SHARES,
    "final_fraction": SHARES,
    "max_gradient_norm": POSITIVE,
    "test_examples": [*SIZES, 10**10],
    "evaluations": SIZES,
    "device": ["gpu", "", 3, None, "meta"],
}
GRID: dict[str, list[Any]] = {
    "mixers": [(), "gdn", {"gdn": 1}, ("gnd",), (3,), (["gdn"],), ("gdn", "gdn")],
    "pairs": [(), 4, (0,), (-1,), (1.5,), ("4",), (4, 4), (10**12,), ([4],), (None,)],
    "learning_rates": [(), 0.1, (0,), (NAN,), (INFINITY,), ("1e-3",), (-1,), ([1e-3],), (None,)],
    "seeds": [(), 0, (-1,), (0.5,), ("0",), (2**64,), ([0],), (None,)],
}
SINGLE: dict[str, list[Any]] = {
    "mixer": ["gnd", 3, None, ["gdn"]],
    "pairs": SIZES,
    "learning_rate": POSITIVE,
    "seed": [-1, 0.5, "0", None, 2**64],
}
LANGUAGE: dict[str, list[Any]] = {
    "output": ["", 3, None],
    "model": [3, "gdn", {3: 4}, {"path": "a", "hidden_size": 16}],
    "mixers": ["gdn", (3,), ("gdn", "gdn"), 3, ("gdn:conv_size=2", "gdn:conv_sise=3"), ({"name": "gdn", "a": 1},)],
    "label": [3],
    "corpus": ["text.txt", None, {"paths": "a"}],
    "tokenizer": ["gpt2", None, {"path": "a"}],
    "cache": ["", 3, None],
    "length": [*SIZES, 1],
    "batch_size": SIZES,
    "accumulation": SIZES,
    "max_steps": SIZES,
    "learning_rate": POSITIVE,
    "warmup_fraction": SHARES,
    "final_fraction": SHARES,
    "max_tokens": ["15G", 0, 1.5],
    "warmup_steps": [0, "3"],
    "warmup_tokens": ["x", -1],
    "schedule": ["cosin", 3],
    "schedule_tokens": ["x", 0],
    "decay_fraction": [0, 2, "a"],
    "decay_shape": ["step", None],
    "final_learning_rate": [-1, NAN, "a"],
    "optimizer": ["lion", None],
    "optimizer_options": [3, {"lr": 3}],
    "batch_ramp": [3, (3,)],
    "groups": [3, ("norm",)],
    "keep_optimizer": [1, None],
    "seed_by_name": [1, None],
    "stages": [3, (3,)],
    "weight_decay": [-1, NAN, "0", None],
    "beta1": [-0.1, 1, NAN, "0"],
    "beta2": [-0.1, 1, NAN, "0"],
    "max_gradient_norm": POSITIVE,
    "precision": ["fp8", "float32", 16, None],
    "gradient_checkpointing": [1, "yes", None],
    "compile": [1, "yes", 0.5],
    "fsdp": [1, "yes"],
    "context_way": ["ring", 3, None],
    "reshard_after_forward": [0, "no", None, False],  # False and prefetching need fsdp
    "forward_prefetch": [-1, 0.5, "1", None, True, 1],
    "reduce_dtype": ["bf16", None, "bfloat16"],  # bfloat16 needs that precision
    "seed": [-1, 0.5, "0", None, 2**64],
    "log_every": SIZES[:-1],
    "evaluate_every": [-1, 0.5, "0", None],
    "evaluation_rows": SIZES[:-1],
    "checkpoint_every": SIZES[:-1],
    "keep_checkpoints": SIZES[:-1],
    "context_lengths": [3, "512", (1,), (1.5,), ("512",), (None,)],
    "context_texts": SIZES[:-1],
    "prompt": [3, None, "a\udcff"],
    "tensorboard": [1, "yes", None],
}

NAMED = {"task_options": "option"}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recall(**options: Any) -> RecallExperiment:
    return RecallExperiment(**{"mixers": ("gdn",), "pairs": (4,), **options})


def run(**options: Any) -> RecallRun:
    return RecallRun(**{"mixer": "gdn", "pairs": 4, "learning_rate": 1e-3, **options})


def language(**options: Any) -> LanguageRun:
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
    corpus, tokenizer = TextCorpus(paths=("text.txt",)), TextTokenizer(vocab_size=300)
    return LanguageRun(**{"model": model, "corpus": corpus, "tokenizer": tokenizer, "length": 16, **options})


def of(fields: dict[str, list[Any]]) -> list[tuple[str, Any]]:
    return [(field, value) for field, values in fields.items() for value in values]


@pytest.mark.parametrize(("field", "value"), of(SHARED | GRID))
def test_recall_experiment(field: str, value: Any, tmp_path: Path) -> None:
    one_mixer = field == "mixers" and isinstance(value, tuple) and len(value) == 1
    named = "mixer" if one_mixer else NAMED.get(field, field)
    check_refused(named, lambda: recall(**{field: value}), tmp_path)


@pytest.mark.parametrize(("field", "value"), of(SINGLE))
def test_recall_run(field: str, value: Any, tmp_path: Path) -> None:
    check_refused(field, lambda: run(**{field: value}), tmp_path)


@pytest.mark.parametrize(("field", "value"), of(LANGUAGE))
def test_language_run(field: str, value: Any, tmp_path: Path) -> None:
    check_refused(field, lambda: language(**{field: value}), tmp_path)


CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "a recall experiment by name": ("experiment", lambda: run_recall("mqar", "out")),  # type: ignore[arg-type]
    "an output by number": ("output", lambda: run_recall(recall(), 3)),  # type: ignore[arg-type]
    "an output that is a file": ("output", lambda: run_recall(recall(), "text.txt")),
    "no workers": ("workers", lambda: run_recall(recall(), "out", workers=0)),
    "half a worker": ("workers", lambda: run_recall(recall(), "out", workers=0.5)),  # type: ignore[arg-type]
    "10^9 workers": ("workers", lambda: run_recall(recall(), "out", workers=10**9)),
    "overwrite by number": ("overwrite", lambda: run_recall(recall(), "out", overwrite=1)),  # type: ignore[arg-type]
    "a save every NaN": ("checkpoint_seconds", lambda: run_recall(recall(), "out", checkpoint_seconds=NAN)),
    "imports in a string": ("imports", lambda: run_recall(recall(), "out", imports="mine")),
    "a mixer that cannot be that wide": ("head_dim", lambda: run_recall(recall(width=4096, heads=2), "out")),
    "a run by name": ("run", lambda: train_run("mqar", Path("a.checkpoint"))),  # type: ignore[arg-type]
    "a checkpoint by number": ("checkpoint", lambda: train_run(run(), 3)),  # type: ignore[arg-type]
    "a save after -1 seconds": ("checkpoint_seconds", lambda: train_run(run(), Path("a"), checkpoint_seconds=-1)),
    "groups of no model": ("model", lambda: weight_decay_groups("gdn", 0.1)),  # type: ignore[arg-type]
    "a negative decay": ("weight_decay", lambda: weight_decay_groups(nn.Linear(2, 2), -1)),
    "a negative step": ("step", lambda: learning_rate_factor(-1, steps=10, warmup_steps=1, final=0.1)),
    "a schedule of no steps": ("steps", lambda: learning_rate_factor(0, steps=0, warmup_steps=0, final=0.1)),
    "half a step of warm-up": ("warmup_steps", lambda: learning_rate_factor(0, steps=9, warmup_steps=0.5, final=0.1)),  # type: ignore[arg-type]
    "a final factor of NaN": ("final", lambda: learning_rate_factor(0, steps=9, warmup_steps=1, final=NAN)),
    "a run file that does not exist": ("run file", lambda: load_run("missing.toml")),
    "a run file of another kind": ("run file", lambda: load_run("text.txt")),
    "a run file by number": ("run file", lambda: load_run(3)),  # type: ignore[arg-type]
    "a run file that is not UTF-8": ("run file", lambda: load_run("latin.toml")),
    "an unknown change": ("lenght", lambda: load_run("good.toml", lenght=3)),
    "tiny by name": ("tiny", lambda: load_run("good.toml", tiny="yes")),  # type: ignore[arg-type]
    "a tiny run of a saved model": ("model with path", lambda: tiny_run(language(model={"path": "x"}))),
    "a bad change": ("length", lambda: load_run("good.toml", length=-3)),
    "a training by name": ("run", lambda: train_language("run.toml")),  # type: ignore[arg-type]
    "an end at step 0": ("stop_at", lambda: train_language(language(), stop_at=0)),
    "an end at half a step": ("stop_at", lambda: train_language(language(), stop_at=0.5)),  # type: ignore[arg-type]
    "overwrite by name": ("overwrite", lambda: train_language(language(), overwrite="yes")),  # type: ignore[arg-type]
    "an unknown preset": ("preset", lambda: train_language(language(model={"preset": "gdn"}))),
    "10^9 layers": ("num_hidden_layers", lambda: train_language(language(model={"num_hidden_layers": 10**9}))),
    "text of spaces": ("corpus", lambda: train_language(language(corpus=TextCorpus(paths=("empty.txt",))))),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, tmp_path: Path) -> None:
    Path("text.txt").write_text("some text\n" * 50)
    Path("empty.txt").write_text(" \n")
    Path("latin.toml").write_bytes('prompt = "é"'.encode("latin-1"))
    Path("good.toml").write_text("length = 16\n")
    check_refused(*CALLS[name], tmp_path)


def test_a_batch_beyond_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than the text has: refused once the tokens are there, which stay for the run that is corrected."""
    Path("text.txt").write_text("some text\n" * 200)
    monkeypatch.setattr("fastweights.training.language.train._train_one", None)  # never reached
    with pytest.raises(ValueError, match=r"^batch_size must be at most \d+, .* got 1000000; pass more text, or"):
        train_language(language(batch_size=10**6))
    assert not Path("runs/train").exists()
