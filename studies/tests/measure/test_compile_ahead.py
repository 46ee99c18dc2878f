"""Kernels compiled ahead are those that a call asks for, and are found by a Triton with another fingerprint once placed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastweights_studies.claims import ledger, trained
from fastweights_studies.claims.ledger import find_claim
from fastweights_studies.leaderboard import matched_measures, sizes
from fastweights_studies.measure import compile_ahead
from fastweights_studies.measure.compile_ahead import (
    NOTES,
    compile_claim,
    compile_leaderboard,
    compile_op,
    compile_tests,
    compiling_only,
    main,
    one_of_each,
    place,
)

from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.layers import MixerChoice
from fastweights.models import preset
from fastweights.training.language import together
from tests.fast_set import fast_where

SIZES = "1,128,1,16,16"
ON_A_GPU = """
import pytest, torch
from fastweights.ops.silu_product import silu_product

@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rows, width", [(1, 64), (2**24, 128)])  # one kernel per width
def test_product(rows, width):
    torch.empty(1, pin_memory=True).pin_memory().copy_(torch.ones(1, device="cuda"), non_blocking=True)
    x = torch.randn(rows, width, generator=torch.Generator("cuda"), device="cuda")
    assert torch.equal(silu_product(x, x), x)
    raise LookupError("the end")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def found() -> Iterator[list[bool]]:
    """Of every kernel that Triton is asked for whether it was in the cache."""
    from triton import knobs

    hits: list[bool] = []
    before = knobs.compilation.listener
    knobs.compilation.listener = lambda cache_hit, **rest: hits.append(cache_hit)
    yield hits
    knobs.compilation.listener = before


def ask(found: list[bool]) -> list[bool]:
    """Of the kernels of an op in a process that has compiled none whether they were in the cache."""
    from triton.runtime.jit import JITFunction

    from fastweights.kernels.common.delta_rule import output, state

    for module in (output, state):
        for kernel in vars(module).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()
    found.clear()
    with compiling_only():
        compile_op("linear", SIZES)
    return list(found)


@pytest.mark.slow
@pytest.mark.compiler
def test_another_triton_finds_what_was_compiled(
    folder: Path, found: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime import cache

    first = ask(found)
    assert first and not any(first)
    assert all(ask(found))

    monkeypatch.setattr(cache, "triton_key", lambda: "that of another machine")
    assert place(folder) == len(first)
    assert place(folder) == 0
    assert all(ask(found))
    for group in folder.glob("*/__grp__*.json"):
        assert all(Path(path).is_file() for path in json.loads(group.read_text())["child_paths"].values())


@pytest.mark.compiler
def test_tests_of_a_gpu_leave_their_kernels_at_full_size(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = folder / "test_gpu.py"
    path.write_text(ON_A_GPU)
    compile_tests(str(path))
    noted = [json.loads(line) for line in next(folder.glob(f"{NOTES}-*")).read_text().splitlines()]
    assert [note[0] for note in noted] == ["silu_product_forward"] * 2 and noted[0] != noted[1]
    assert capsys.readouterr().out.count("ended with LookupError: the end") == 2


def test_paths_without_tests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="must name tests that pytest runs, got none in .*nowhere"):
        compile_tests(str(tmp_path / "nowhere"))


def test_kernels_of_another_version_are_refused(folder: Path) -> None:
    Path(folder, f"{NOTES}-1.jsonl").write_text(json.dumps(["kernel", "2.0.0", *"abcde"]) + "\n")
    with pytest.raises(SystemExit, match=r"holds kernels of triton 2\.0\.0"):
        place(folder)


def test_a_model_keeps_one_layer_of_each_memory() -> None:
    hybrid = one_of_each(preset("gka-hybrid-2.8b"))
    assert [name for name, _ in hybrid.mixers()] == ["gka"]
    assert one_of_each(preset("gdn-340m")).num_hidden_layers == 1


@pytest.mark.slow
@pytest.mark.compiler
def test_language_models_of_a_claim_are_compiled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver and what takes its gradient: a step is taken, though no kernel gives it numbers."""
    text = tmp_path / "text.txt"
    text.write_text("a text of a few words, again and again. " * 500)
    settings = trained.small_model(
        layers=1, width=32, heads=2, length=64, batch_size=2, corpus=TextCorpus(paths=(str(text),)),
        tokenizer=TextTokenizer(vocab_size=300), cache=str(tmp_path / "tokens"),
    )  # fmt: skip
    claim = replace(find_claim("C35"), measure=trained.language_models("C35", [MixerChoice("gka")], **settings))
    monkeypatch.setattr(ledger, "claims_of", lambda: (claim,))
    with compiling_only():
        compile_claim("C35")
    lines = [line for notes in folder.glob(f"{NOTES}-*.jsonl") for line in notes.read_text().splitlines()]
    assert {"solve_chunk", "system_gradients"} <= {json.loads(line)[0] for line in lines}


def test_claims_without_models_are_refused() -> None:
    with pytest.raises(SystemExit, match="must name claims of the papers, got own-1"):
        compile_claim("own-1")


@pytest.mark.parametrize(
    ("option", "name"), [("--ops", "gdm"), ("--decoding", "gdm"), ("--training", "24 layers of gdm")]
)
def test_unknown_names_are_refused_before_any_work(
    option: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "kernels"
    monkeypatch.setattr("sys.argv", ["compile_ahead.py", "--into", str(folder), "--sizes", SIZES, option, name])
    with pytest.raises(SystemExit):
        main()
    assert f"{option} names {name}; choose from " in capsys.readouterr().err and not folder.exists()


def test_chosen_columns_of_the_leaderboard_are_compiled_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    monkeypatch.setattr(compile_ahead, "compile_recall", runs.append)
    compile_leaderboard("linear", "mqar, heads of 32", "recall")
    assert [(run.task, run.mixer.options["head_dim"]) for run in runs] == [("mqar", 32)]
    compile_leaderboard("linear", "", "recall")
    assert {run.task for run in runs} == {"mqar", "mqar-shuffled"} and len(runs) == 1 + 8


@fast_where(lambda given: given["name"] == "language-proxies")
@pytest.mark.parametrize("name", ["language-proxies", "language-matched"])
def test_language_models_in_one_block_are_trained_for_a_step_and_measured(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    runs: list[Any] = []
    measured: list[Any] = []
    monkeypatch.setattr(together, "train_here", runs.append)
    monkeypatch.setattr(matched_measures, "measure_losses", lambda *given: measured.append(given))
    compile_leaderboard("rls:decay=head@rls-decay", "", name)
    size = sizes.SIZES["full"].matched_language[name]
    (run,), ((asked, folder, _, device),) = runs, measured
    assert (run.max_steps, run.max_tokens, run.length) == (1, None, size.training["length"])
    assert run.model["mixer"]["decay"] == "head" and run.model.items() >= size.model.items()
    assert (asked.contexts, asked.needles, folder, device) == (size.contexts, size.needles, run.output, "cpu")
    assert sizes.SIZES["full"].matched_language[name] is size
    with pytest.raises(ValueError, match="columns must be texts in titles"):
        compile_leaderboard("gdn", "needles", name)
