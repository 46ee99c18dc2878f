"""The papers' models: what the files hold, and the parameter counts against those that the papers state."""

from __future__ import annotations

import re

import pytest
import torch

from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, preset

SCALES = {"M": 1e6, "B": 1e9}
# The papers state two or three digits. Where "1B" is one digit, or where a model falls short of its name, it may be further.
TOLERANCE = {
    "gka-1b": 0.07,
    "kda-1b": 0.1,
    "pkda-1b": 0.1,
    "gka-hybrid-2.8b": 0.1,
    "palimpsa-m-760m": 0.035,  # its 760M model without metaplasticity, which the paper trains, has 768M
}
PAPERS = {"Preconditioned DeltaNet", "Palimpsa", "Gated KalmaNet", "Lattice", "Variational Linear Attention"}
USUAL_TOLERANCE = 0.03


def parameters(config: FastWeightsConfig) -> int:
    """All of them, counting the embedding and the output matrix as one, as the papers do."""
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    twice = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return sum(p.numel() for p in model.parameters()) - twice


@pytest.mark.parametrize("name", [name for name, file in PRESETS.items() if file.size])
def test_parameter_count_is_the_papers(name):
    stated = PRESETS[name].size
    wanted = float(stated[:-1]) * SCALES[stated[-1]]
    assert abs(parameters(preset(name)) - wanted) <= TOLERANCE.get(name, USUAL_TOLERANCE) * wanted


@pytest.mark.parametrize("size", ["170m", pytest.param("760m", marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["d", "m"])
def test_metaplasticity_adds_few_parameters(kind, size):
    full = preset(f"palimpsa-{kind}-{size}")
    plain = preset(f"palimpsa-{kind}-{size}", mixer={**full.mixer, "metaplasticity": False})
    assert 0 < parameters(full) - parameters(plain) < 0.03 * parameters(plain)


def test_vla_by_hand():
    """The paper states no size. Algorithm 1: four projections and W_u a layer, no convolutions."""
    d, heads, mlp = 128, 4, 256
    mixer = 4 * d * d + heads * (d // heads) ** 2 + 2 * d  # projections, W_u of every head, LayerNorm
    assert parameters(preset("vla-2l")) == 128 * d + 2 * (mixer + 3 * d * mlp + 2 * d) + d


def test_parameter_count_of_a_gated_delta_net_by_hand():
    d, heads, mlp = 1024, 8, 2816
    mixer = 4 * d * d + 3 * 4 * d + 2 * heads * d + 2 * heads + 128  # projections, convs, gates, their biases, norm
    assert parameters(preset("gdn-340m")) == 32000 * d + 24 * (mixer + 3 * d * mlp + 2 * d) + d


@pytest.mark.parametrize("name", PRESETS)
def test_every_file_says_where_it_comes_from(name):
    file = PRESETS[name]
    assert file.source.split(", ")[0] in PAPERS
    assert file.size is None or re.fullmatch(r"[\d.]+[MB]", file.size)
    assert file.size is not None or file.note


def test_the_hybrid_has_attention_in_four_of_thirty_blocks():
    entries = PRESETS["gka-hybrid-2.8b"].config["mixer"]
    attention = {n: entry for n, entry in enumerate(entries) if entry != "gka"}
    assert len(entries) == 30 and list(attention) == [6, 14, 22, 29]
    assert all(entry["name"] == "softmax" and entry["qk_norm"] for entry in attention.values())


def test_changes_go_over_the_file():
    config = preset("pkda-340m", vocab_size=50257, num_hidden_layers=2)
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (50257, 2, 1024)
    assert preset("pkda-340m").vocab_size == 32000
    with pytest.raises(ValueError, match="no key 'vocab_sise'"):
        preset("pkda-340m", vocab_sise=3)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown preset 'gdn340m' \(did you mean 'gdn-340m'\?\); choose from .*vla"):
        preset("gdn340m")
