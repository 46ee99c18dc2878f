"""The benchmark of how soon a training takes its first step, as far as no GPU is needed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from fastweights_studies.measure import training_start

TINY = {
    "vocab_size": 300, "megabytes": 4, "length": 32, "batch_size": 2,
    "fields": "hidden_size = 16\nnum_hidden_layers = 1\nnum_heads = 2",
}  # fmt: skip


@pytest.mark.slow
def test_both_starts_are_timed_until_their_steps_are_taken(tmp_path: Path) -> None:
    found = training_start.starts("gdn", "false", tmp_path, TINY)
    assert list(found) == [False, True]
    for seconds in found.values():
        assert 1 < seconds[1] <= seconds[training_start.STEPS] < 120


@pytest.mark.slow
def test_a_training_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    run = tmp_path / "run.toml"
    run.write_text("no run")
    with pytest.raises(SystemExit, match="the training ended after 0 steps, with code 2"):
        training_start.start(run, tmp_path / "log.jsonl", tmp_path / "kernels")


def test_another_way_to_compile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training_start.py", "--compile", "all"])
    with pytest.raises(SystemExit, match="--compile must name some of blocks, true, false, got all"):
        training_start.main()
