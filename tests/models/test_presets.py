"""The papers' models: what the files hold, and the parameter counts."""

from __future__ import annotations

import re

import pytest
import torch

from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, preset


def parameters(config: FastWeightsConfig) -> int:
    """All of them, counting the embedding and the output matrix as one, as the papers do."""
    with torch.device("meta"):
        built = sum(p.numel() for p in FastWeightsForCausalLM(config).parameters())
    return built - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


PAPERS = {"Preconditioned DeltaNet", "Palimpsa", "Gated KalmaNet", "Lattice", "Variational Linear Attention"}


@pytest.mark.parametrize("size", ["170m", pytest.param("760m", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name, plain", [("palimpsa-d", "palimpsa-d-plain-{}"), ("palimpsa-m", "mamba2-{}-palimpsa")])
def test_metaplasticity_adds_few_parameters(name, plain, size):
    full, plain = preset(f"{name}-{size}"), preset(plain.format(size))
    assert 0 < parameters(full) - parameters(plain) < 0.03 * parameters(plain)
    without = preset(f"{name}-{size}", mixer={**full.mixer, "metaplasticity": False})
    assert parameters(without) == parameters(plain)


def test_vla_by_hand():
    """The paper states no size. Algorithm 1: four projections and W_u a layer, no convolutions."""
    d, heads, mlp = 128, 4, 256
    mixer = 4 * d * d + heads * (d // heads) ** 2 + 2 * d  # projections, W_u of every head, LayerNorm
    norm = 2 * d  # a LayerNorm's weights and biases
    assert parameters(preset("vla-2l")) == 128 * d + 2 * (mixer + 3 * d * mlp + 2 * norm) + norm


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
    entries = preset("gka-hybrid-2.8b").mixers()
    attention = {n: entry for n, entry in enumerate(entries) if entry[0] != "gka"}
    assert len(entries) == 30 and list(attention) == [6, 14, 22, 29]
    assert all(name == "softmax" and options["qk_norm"] for name, options in attention.values())


ROWS = {  # what the papers train at each size, by the mixer of the preset; the first part of a name or its end says which paper's
    "Palimpsa, table 4 and text": ("{mixer}-{size}-palimpsa", ("170m", "760m"), ("softmax", "gdn", "mamba2")),
    "Palimpsa, table 4": ("{mixer}-{size}", ("170m", "760m"), ("palimpsa-d", "palimpsa-m")),
    "Palimpsa, table 2 without metaplasticity": ("{mixer}-plain-{size}", ("170m", "760m"), ("palimpsa-d",)),
    "Gated KalmaNet, table 5": ("{mixer}-{size}-gka", ("440m", "1b", "2.8b"), ("softmax", "gla", "deltanet", "gdn")),
    "Gated KalmaNet, table 5, from 1B on": ("{mixer}-{size}-gka", ("1b", "2.8b"), ("mamba2",)),
    "Gated KalmaNet, table 3": ("{mixer}-{size}", ("440m", "1b", "2.8b"), ("gka",)),
    "Gated KalmaNet, MesaNet beside it": ("{mixer}-{size}-gka", ("440m", "1b", "2.8b"), ("mesa",)),
    "Preconditioned DeltaNet, table 1": ("{mixer}-{size}", ("340m",), ("deltanet", "gdn", "kda", "pdn", "pgdn", "pkda")),
    "Preconditioned DeltaNet, table 1, 1B": ("{mixer}-{size}", ("1b",), ("gdn", "kda", "pgdn", "pkda")),
    "Preconditioned DeltaNet, appendix E.5": ("{mixer}-{size}", ("340m",), ("mesa", "softmax")),
    "Lattice, tables 2 and 3": (
        "{mixer}-{size}-lattice", ("110m", "340m"), ("softmax", "linear", "mamba2", "deltanet", "gdn", "ttt"),
    ),
    "Variational Linear Attention, table 3": ("{mixer}-{size}-vla", ("2l",), ("softmax", "linear", "deltanet")),
}  # fmt: skip


@pytest.mark.parametrize("table", ROWS)
def test_every_row_of_the_size_tables_has_a_preset(table):
    pattern, sizes, mixers = ROWS[table]
    for size in sizes:
        for mixer in mixers:
            name = pattern.format(mixer="transformer" if mixer == "softmax" and size != "2l" else mixer, size=size)
            entry = PRESETS[name].config["mixer"]
            found = entry if isinstance(entry, str) else entry["name"]
            assert found == (f"vla-{mixer}" if size == "2l" else mixer)
            assert PRESETS[name].source.startswith(table.split(", ")[0])


def test_the_ablations_of_preconditioned_deltanet_differ_by_their_option_alone():
    """Its tables 4 to 7."""
    changes = {f"{mixer}-negative": (mixer, {"negative_eigenvalues": True}) for mixer in ("deltanet", "gdn", "kda")}
    changes |= {f"pgdn-{gain}": ("pgdn", {"gain": gain}) for gain in ("unit", "damped", "fading")}
    changes |= {f"pgdn-{interval}": ("pgdn", {"interval": interval}) for interval in ("amplify", "dampen")}
    tied = {"tie_preconditioner": True}
    changes |= {"pgdn-tied": ("pgdn", tied), "pgdn-unstable": ("pgdn", {"squash": "none", **tied})}
    changes |= {"pgdn-tanh": ("pgdn", {"squash": "tanh"})}
    for name, (mixer, options) in changes.items():
        base = preset(f"{mixer}-340m")
        assert (
            preset(f"{name}-340m").to_dict() == {**base.to_dict(), "mixer": {**base.mixer, **options}} != base.to_dict()
        )


@pytest.mark.parametrize("size", ["110m", "340m"])
def test_the_objectives_and_ablations_of_lattice_differ_from_it_by_their_option_alone(size):
    base = preset(f"lattice-{size}")
    changes = {f"lattice-{objective}-{size}": {"objective": objective} for objective in ("encode", "similarity")}
    if size == "110m":
        changes["lattice-normalized-110m"] = {"decay": "none"}
        changes["lattice-orthogonal-110m"] = {"decay": "none", "normalize": False}
    for name, options in changes.items():
        changed = preset(f"lattice-{size}", mixer={**base.mixer, **options})
        assert preset(name).to_dict() == changed.to_dict() != base.to_dict()


def test_parameter_count_of_baselines_by_hand():
    """Palimpsa's Transformer++ and Gated DeltaNet with an output gate and E_v = 1, at width 768."""
    d, heads, mlp, vocabulary = 768, 16, 2048, 32000
    around = vocabulary * d + d
    assert parameters(preset("transformer-170m-palimpsa")) == around + 20 * (4 * d * d + 3 * d * mlp + 2 * d)
    mixer = 5 * d * d + 3 * 4 * d + 2 * heads * d + 2 * heads + d // heads
    assert parameters(preset("gdn-170m-palimpsa")) == around + 19 * (mixer + 3 * d * mlp + 2 * d)


def test_gated_kalmanet_has_the_biases_of_its_release():
    names = ("gka-440m", "gka-1b", "gka-2.8b", "gka-hybrid-2.8b")
    assert all(PRESETS[name].config["mixer"]["gate_bias"] for name in names)


def test_changes_go_over_the_file():
    config = preset("pkda-340m", vocab_size=50257, num_hidden_layers=2)
    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (50257, 2, 1024)
    assert preset("pkda-340m").vocab_size == 32000
    with pytest.raises(ValueError, match="no key 'vocab_sise'"):
        preset("pkda-340m", vocab_sise=3)


def test_another_mixer_takes_the_place_of_a_whole_hybrid():
    """As of one that lists its mixers; layers of attention that are given beside it stay."""
    assert preset("gka-hybrid-2.8b", mixer="gdn").mixers() == [("gdn", {})] * 30
    mixed = preset("gka-hybrid-2.8b", mixer="gdn", softmax_layers=[3]).mixers()
    assert mixed == [("softmax", {}) if layer == 3 else ("gdn", {}) for layer in range(30)]
    listed = ["gdn", "softmax"] * 15
    assert [name for name, _ in preset("gka-hybrid-2.8b", mixer=listed).mixers()] == listed


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"unknown preset 'gdn340m' \(did you mean 'gdn-340m'\?\); choose from .*vla"):
        preset("gdn340m")
