"""The comparisons of whole models, as far as no GPU is needed."""

from __future__ import annotations

import sys

import pytest
import training_steps
from training_steps import COMPARISONS, Comparison, compiled, configuration


@pytest.mark.parametrize("comparison", COMPARISONS, ids=[one.model for one in COMPARISONS])
def test_models_differ_in_their_mixer_alone_or_in_what_is_compiled(comparison: Comparison) -> None:
    model, base = (configuration(name) for name in (comparison.model, comparison.base))
    assert (model.mixers() != base.mixers()) != bool(compiled(comparison.model))
    for size in ("vocab_size", "hidden_size", "tie_word_embeddings"):
        assert getattr(model, size) == getattr(base, size)


def test_unknown_comparisons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", "palimpsa"])
    with pytest.raises(SystemExit, match="--only must name comparisons, of palimpsa-d-760m"):
        training_steps.main()


def test_layers_of_gated_kalmanet_are_changed_alone() -> None:
    hybrid, fewer, gdn = (
        configuration(f"gka-hybrid-2.8b{change}").mixers() for change in ("", " with 20 iterations", " with gdn")
    )
    for (mixer, options), (_, with_fewer), (other, _) in zip(hybrid, fewer, gdn, strict=True):
        assert with_fewer == (options | {"iterations": 20} if mixer == "gka" else options)
        assert other == ("gdn" if mixer == "gka" else mixer)
    assert {mixer for mixer, _ in gdn} == {"gdn", "softmax"}
