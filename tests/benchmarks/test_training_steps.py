"""The comparisons of whole models, as far as no GPU is needed."""

from __future__ import annotations

import sys

import pytest
import torch
import training_steps
from training_steps import COMPARISONS, PEER, SAME_AS_PEER, Comparison, both, compiled, configuration

WITHIN = [one for one in COMPARISONS if not one.base.startswith(PEER)]


@pytest.mark.parametrize("comparison", WITHIN, ids=[one.model for one in WITHIN])
def test_models_differ_in_their_mixer_alone_or_in_what_is_compiled_or_replayed(comparison: Comparison) -> None:
    model, base = (configuration(name) for name in (comparison.model, comparison.base))
    same_layers = model.mixers() == base.mixers()
    assert same_layers == bool(set(comparison.model.split(", ")[1:]) - set(comparison.base.split(", ")[1:]))
    for size in ("vocab_size", "hidden_size", "tie_word_embeddings"):
        assert getattr(model, size) == getattr(base, size)


def test_both_sides_are_compiled_and_replayed() -> None:
    one = both(Comparison("pgdn", "gdn", 8), "blocks", replayed=True)
    assert [compiled(name) for name in one[:2]] == ["blocks", "blocks"]
    assert all("replayed" in name.split(", ") for name in one[:2])
    assert both(one, None, replayed=False) == one


def test_names_of_all_comparisons_differ() -> None:
    assert len({one.model for one in COMPARISONS}) == len(COMPARISONS)


def test_the_peer_has_the_size_of_the_model_beside_it() -> None:
    """Its values are as wide as its keys, and both have an output gate; only the bias terms of its gates are its own."""
    fla = pytest.importorskip("fla.models", reason="needs flash-linear-attention")
    del fla
    with torch.device("meta"):
        ours, theirs = (training_steps.build(name)[0] for name in (SAME_AS_PEER, PEER))
    count, peers = (sum(p.numel() for p in model.parameters()) for model in (ours, theirs))
    assert abs(count - peers) <= 1e-3 * peers


def test_the_peer_is_asked_for_only_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_steps, "is_installed", lambda: False)
    monkeypatch.setattr(sys, "argv", ["training_steps.py", "--only", SAME_AS_PEER])
    with pytest.raises(SystemExit, match="flash-linear-attention, which is not installed"):
        training_steps.main()


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
