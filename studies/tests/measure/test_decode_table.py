"""The table of decoding speed, as far as no GPU is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from fastweights_studies.measure import decode_table
from fastweights_studies.record import read_rows, select

from fastweights.layers import MIXERS, registry
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM


def test_a_run_continues_after_the_rows_that_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is there is kept and not measured again; a context without room is a row that says so."""
    measured = []

    def measure(model: object, batch: int, context: int | None) -> dict:
        measured.append((model, batch, context))
        return {"step_ms": 1.0, "tokens_per_second": 2.0}

    monkeypatch.setattr(decode_table, "find_gpu", lambda: "a GPU")
    monkeypatch.setattr(decode_table, "built", lambda mixer: mixer)
    monkeypatch.setattr(decode_table, "measure", measure)
    monkeypatch.setattr(decode_table, "fits", lambda mixer, batch, context: (context or 0) < 10**5)
    for options in (["gdn", "--batches", "1"], *[["gdn,softmax", "--batches", "1,8"]] * 2):
        monkeypatch.setattr(sys, "argv", ["decode_table.py", "--results", str(tmp_path), "--mixers", *options])
        decode_table.main()
    softmax = [("softmax", batch, context) for batch in (1, 8) for context in (2048, 16384)]
    assert measured == [("gdn", 1, None), ("gdn", 8, None), *softmax]
    rows = read_rows(tmp_path / "decode-table-a-gpu.json")
    assert len(select(rows, measure="step_ms")) == 6
    assert [(row.column["batch"], row.column["context"], row.value) for row in select(rows, measure="fits")] == [
        (1, 131072, 0.0), (8, 131072, 0.0),
    ]  # fmt: skip


def test_processes_that_compile_import_the_mixers_too(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(decode_table.subprocess, "run", lambda command, check: commands.append(command))
    decode_table.compile_all(["gdn", "mine"], [1, 8], ["my layers.py", "other"])
    ends = ["--batches", "1,8", "--import=my layers.py", "--import=other"]
    assert sorted(command[3:] for command in commands) == [["--mixers", name, *ends] for name in ("gdn", "mine")]


def test_a_module_that_is_not_there_ends_the_benchmark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys, "argv", ["decode_table.py", "--import", "no_such_file.py"])
    with pytest.raises(SystemExit):
        decode_table.main()
    assert "cannot import no_such_file.py: there is no such file" in capsys.readouterr().err


def test_every_memory_has_rows_and_softmax_attention_one_for_every_context() -> None:
    names = [(mixer, *one) for mixer in MIXERS for one in decode_table.wanted(mixer, [1, 8, 64])]
    growing = [mixer for mixer, spec in MIXERS.items() if "after T tokens" in spec.state]
    assert list(decode_table.GROWING) == growing
    assert len(set(names)) == len(names) == 3 * (len(MIXERS) - len(growing)) + 9 * len(growing)


def test_a_mixer_of_ones_own_that_keeps_every_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = registry._REGISTRY.specs
    monkeypatch.setattr(registry._REGISTRY, "specs", {**specs, "mine": specs["softmax"]})
    monkeypatch.setattr(sys, "argv", ["decode_table.py", "--mixers", "gdn,softmax,mine"])
    with pytest.raises(
        SystemExit, match="names mine, whose state grows; of such mixers only softmax, vla-softmax are timed"
    ):
        decode_table.main()


def test_a_full_ring_is_the_context_of_the_next_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache that is made for a context is one that a step takes, and its slots are full after it."""
    for name in ("zeros", "full"):
        make = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *a, make=make, **k: make(*a, **{**k, "device": "cpu"}))
    config = FastWeightsConfig(mixer="softmax", hidden_size=16, num_heads=2, num_hidden_layers=1, vocab_size=8)
    model = FastWeightsForCausalLM(config).to(torch.bfloat16).eval()
    (cache,) = decode_table.caches_of(model, 3, 12)
    assert cache.fixed and cache.memory["keys"].shape == (3, 12, 2, 8)
    with torch.no_grad():
        model.model.layers[0](torch.zeros(3, 1, 16, dtype=torch.bfloat16), past_key_values=cache)
    assert cache.context["place"].tolist() == [12] * 3 and cache.memory["values"].shape == (3, 12, 2, 8)
