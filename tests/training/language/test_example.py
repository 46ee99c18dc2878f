"""examples/lm.toml, which `make lm` trains."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("accelerate")

from fastweights.training.language import load_run, train_language

FILE = Path(__file__).parents[3] / "examples" / "lm.toml"


@pytest.mark.slow
def test_the_example_trains(tmp_path: Path) -> None:
    run = load_run(FILE)
    assert run.output == "runs/lm" and len(run.mixers) == 2
    short = dataclasses.replace(
        run, output=str(tmp_path / "lm"), cache=str(tmp_path / "tokens"), max_steps=2, evaluate_every=2, evaluation_rows=4,
        checkpoint_every=2, context_lengths=run.context_lengths[:1], context_texts=2,
        corpus=dataclasses.replace(run.corpus, max_megabytes=0.5), tokenizer=dataclasses.replace(run.tokenizer, vocab_size=512),
    )  # fmt: skip
    results = train_language(short)
    assert results is not None and len(results) == 2
    for result in results:
        assert 0 < result.held_out_loss < 6.5  # 6.24 by chance
