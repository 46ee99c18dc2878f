"""The papers' language models from run files, against the numbers of their tables: width, heads, layers, options, first weights.

The numbers are typed from the papers, not from the presets. `DISAGREE` lists what a paper prints and contradicts.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.layers import MIXERS
from fastweights.models import PRESETS, FastWeightsConfig, FastWeightsForCausalLM, preset
from fastweights.training.language import load_run
from fastweights.training.language.model import build_model, model_config

Model = tuple[str, str, dict[str, Any], dict[str, Any]]  # preset, mixer, printed sizes, printed options


def sizes(layers: int, heads: int, width: int, **others: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "num_heads": heads, "hidden_size": width, **others}


# Palimpsa, table 4: layers, width, heads, E_v; the text: tied embeddings, convolutions and linear layers drawn with 0.02, A
# uniform in [0, 16], dt ramped in log-space, b_scale 1. Mamba-2 is Palimpsa-M without metaplasticity (section 2.2).
TIED = {"tie_word_embeddings": True, "initializer_range": 0.02, "scale_residuals": False}
DECAYS = {"conv_init": "normal", "long_memory": "steps"}


def palimpsa(size: str, d: int, transformer: int, d_layers: int, m_layers: int, gdn_v: float) -> list[Model]:
    deep, metaplastic = sizes(d_layers, 16, d, **TIED), {**DECAYS, "expand_v": 2.0, "b_scale": 1.0, "prior": 1.0}
    blocks = sizes(m_layers, 16, d, **TIED, intermediate_size=0)
    return [
        (f"transformer-{size}-palimpsa", "softmax", sizes(transformer, 16, d, **TIED), {}),
        (f"gdn-{size}-palimpsa", "gdn", deep, {**DECAYS, "expand_v": gdn_v}),
        (f"palimpsa-d-{size}", "palimpsa-d", deep, {**metaplastic, "metaplasticity": True}),
        (f"palimpsa-d-plain-{size}", "palimpsa-d", deep, {**metaplastic, "metaplasticity": False}),
        (f"palimpsa-m-{size}", "palimpsa-m", blocks, {**metaplastic, "metaplasticity": True}),
        (f"mamba2-{size}-palimpsa", "mamba2", blocks, {**metaplastic, "metaplasticity": False}),
    ]


# With the E_v that table 4 prints these are a fifth away from the size that it prints beside it.
DISAGREE = {"gdn-170m-palimpsa": 2.0, "palimpsa-d-170m": 2.0, "palimpsa-d-plain-170m": 2.0, "gdn-760m-palimpsa": 1.0}

# Gated KalmaNet, table 3 and appendix D: GPT-2's tokenizer, ridge 0.02 |H|, 30 iterations, gating and alpha connection;
# section 5 and appendix I: attention as in Qwen3, with QK normalisation.
KALMAN = {
    "ridge": 0.02, "adaptive_ridge": True, "iterations": 30, "solver": "chebyshev", "decay": "head", "alpha_connection": True,
    "normalize_qk": True, "output_gate": "silu", "conv_size": 4, "conv_init": "normal",
}  # fmt: skip
QWEN = {"qk_norm": True, "num_kv_heads": None}


def kalman(size: str, layers: int, heads: int, width: int) -> list[Model]:
    printed = sizes(layers, heads, width, vocab_size=50257, scale_residuals=False)
    filters = {"conv_init": "normal"}
    models: list[Model] = [
        (f"gka-{size}", "gka", printed, KALMAN),
        (f"transformer-{size}-gka", "softmax", printed, QWEN),
        (f"gla-{size}-gka", "gla", printed, {"conv_size": None}),
        (f"deltanet-{size}-gka", "deltanet", printed, {**filters, "output_gate": None}),
        (f"gdn-{size}-gka", "gdn", printed, {**filters, "output_gate": "silu"}),
    ]
    if size != "440m":  # table 5 has Mamba-2 from 1B on, in blocks without MLP
        alone = {"hidden_size": width, "vocab_size": 50257, "intermediate_size": 0, "scale_residuals": False}
        models.append((f"mamba2-{size}-gka", "mamba2", alone, {"skip_init": 1.0}))
    return models


# Lattice, appendix A: q and k share a projection and have a convolution each, a GELU gate after the memory; table 4: each row
# adds one part, after DeltaNet and TTT. Section 5 gives sizes alone.
BLOCK = {"shared_qk": True, "activation": "none", "output_gate": "gelu"}
LATTICE: list[Model] = [
    ("transformer-110m-lattice", "softmax", {}, {}),
    ("linear-110m-lattice", "linear", {}, BLOCK),
    ("mamba2-110m-lattice", "mamba2", {}, {"skip_init": 1.0}),
    ("gdn-110m-lattice", "gdn", {}, BLOCK),
    ("lattice-encode-110m", "lattice", {}, {**BLOCK, "objective": "encode"}),
    ("lattice-similarity-110m", "lattice", {}, {**BLOCK, "objective": "similarity"}),
    ("deltanet-110m-lattice", "deltanet", {}, BLOCK),
    ("ttt-110m-lattice", "ttt", {}, BLOCK),
    ("lattice-orthogonal-110m", "lattice", {}, {**BLOCK, "objective": "decode", "normalize": False, "decay": "none"}),
    ("lattice-normalized-110m", "lattice", {}, {**BLOCK, "objective": "decode", "normalize": True, "decay": "none"}),
    ("lattice-110m", "lattice", {}, {**BLOCK, "objective": "decode", "normalize": True, "decay": "head"}),
]

# Preconditioned DeltaNet, appendix E.1: 24 layers, heads of 128 (KDA at 1B: 120), no output gate but KDA's, unit q and k,
# x = 1.5, everything else flash-linear-attention's; E.3 and tables 4 to 7: the ablations.
RULE = {"expand_v": 1.0, "conv_size": 4, "activation": "silu", "conv_init": "normal", "normalize_qk": True}
OPEN, GATED = {**RULE, "output_gate": None}, {**RULE, "output_gate": "sigmoid", "gate_low_rank": True}
KEYS = {
    "preconditioner": "key",
    "bound": 1.5,
    "interval": "symmetric",
    "squash": "softsign",
    "tie_preconditioner": False,
}


def pdn(size: str, heads: int, width: int, kda_width: int, rows: list[tuple[str, str, dict[str, Any]]]) -> list[Model]:
    return [
        (
            f"{name}-{size}",
            mixer,
            sizes(24, heads, kda_width if "kda" in name else width, scale_residuals=False),
            options,
        )
        for name, mixer, options in rows
    ]


PAIRS = [
    ("gdn", "gdn", OPEN),
    ("pgdn", "pgdn", {**OPEN, **KEYS}),
    ("kda", "kda", GATED),
    ("pkda", "pkda", {**GATED, **KEYS}),
]
ABLATIONS = [
    *[(f"{name}-negative", name, {**base, "negative_eigenvalues": True})
      for name, base in (("deltanet", OPEN), ("gdn", OPEN), ("kda", GATED))],
    *[(f"pgdn-{name}", "pgdn", {**OPEN, **KEYS, **option}) for name, option in {
        "unit": {"gain": "unit"}, "damped": {"gain": "damped"}, "fading": {"gain": "fading"}, "tanh": {"squash": "tanh"},
        "tied": {"tie_preconditioner": True}, "unstable": {"squash": "none", "tie_preconditioner": True},
        "amplify": {"interval": "amplify"}, "dampen": {"interval": "dampen"},
    }.items()],
    ("pmamba2", "pmamba2-tied", {"preconditioner": "query", "tie_preconditioner": True, "decay": "head"}),
]  # fmt: skip

SETTINGS: dict[str, list[Model]] = {
    "Palimpsa 170M": palimpsa("170m", 768, 20, 19, 30, gdn_v=2.0),
    "Palimpsa 760M": palimpsa("760m", 1536, 25, 19, 38, gdn_v=1.0),
    "Gated KalmaNet 440M": kalman("440m", 28, 8, 1024),
    "Gated KalmaNet 1B": kalman("1b", 28, 12, 1536),
    "Gated KalmaNet 2.8B": kalman("2.8b", 32, 20, 2560),
    "Lattice 110M": LATTICE,
    "Preconditioned DeltaNet 340M": pdn(
        "340m", 8, 1024, 1024, [("deltanet", "deltanet", OPEN), ("pdn", "pdn", {**OPEN, **KEYS}), *PAIRS, *ABLATIONS]
    ),
    "Preconditioned DeltaNet 1B": pdn("1b", 14, 1792, 1680, PAIRS),
}


def config_of(folder, model: str) -> FastWeightsConfig:
    """Of a run file with this [model]."""
    (folder / "run.toml").write_text(f"[model]\n{model}\n")
    (run,) = load_run(folder / "run.toml").models()
    return model_config(run)


def options_of(config: FastWeightsConfig, layer: int = 0) -> tuple[str, dict[str, Any]]:
    """Name of a layer's mixer, and all of its options."""
    name, own = config.mixer_of(layer)
    given = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, **MIXERS[name].options, **own}
    return name, vars(MIXERS[name].layer.Options.from_keywords(name, given))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_run_file_with_a_preset_has_the_numbers_that_the_paper_prints(setting, tmp_path):
    for name, mixer, printed, options in SETTINGS[setting]:
        config = config_of(tmp_path, f'preset = "{name}"')
        assert {key: getattr(config, key) for key in printed} == printed, name
        found, made = options_of(config)
        assert found == mixer and len({repr(one) for one in config.mixers()}) == 1, name
        differing = {key: value for key, value in options.items() if made[key] != value}
        assert differing == ({"expand_v": DISAGREE[name]} if name in DISAGREE else {}), name
        if "preconditioned" in setting.lower():  # heads of 128 channels; 120 in KDA at 1B
            assert config.hidden_size // config.num_heads == (120 if name.endswith("kda-1b") else 128)


@pytest.mark.parametrize("name", DISAGREE)
def test_what_a_table_prints_and_contradicts_is_said_in_the_preset(name):
    config, stated = preset(name), 1e6 * float(PRESETS[name].size[:-1])
    printed = FastWeightsConfig(**{**PRESETS[name].config, "mixer": {**config.mixer, "expand_v": DISAGREE[name]}})
    with torch.device("meta"):
        counts = [FastWeightsForCausalLM(one).num_parameters() for one in (config, printed)]
    assert abs(counts[0] / stated - 1) < 0.02 and abs(counts[1] / stated - 1) > 0.15
    assert f"E_v = {DISAGREE[name]:g}" in PRESETS[name].note


HYBRID = """
preset = "gka-2.8b"
num_hidden_layers = 30
softmax_layers = [6, 14, 22, 29]
softmax_options = {qk_norm = true, rope_theta = 1000000.0}
"""


@pytest.mark.parametrize("model", ['preset = "gka-hybrid-2.8b"', HYBRID], ids=["preset", "layout"])
def test_the_hybrid_of_gated_kalmanet(model, tmp_path):
    """Appendix I: 30 blocks, 26 of them GKA, attention with QK normalisation at indices 6, 14, 22 and 29."""
    config = config_of(tmp_path, model)
    attention = [layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"]
    assert (config.num_hidden_layers, attention) == (30, [6, 14, 22, 29])
    assert [name for name, _ in config.mixers()].count("gka") == 26
    assert all(KALMAN.items() <= options_of(config, layer)[1].items() for layer in range(30) if layer not in attention)
    assert all(QWEN.items() <= options_of(config, layer)[1].items() for layer in attention)
    assert config.mixers() == preset("gka-hybrid-2.8b").mixers()


MIXERS_OF_A_HYBRID = """
mixers = ["gka", "gka:ridge=0.25,adaptive_ridge=false@constant", "gka:decay=none@unweighted", "gka:alpha_connection=false@R2",
          "gka:ridge=0.01@a", {name = "gka", options = {sketch = 32}, label = "sketched"}, "gdn"]
[model]
preset = "gka-hybrid-2.8b"
"""


def test_the_ablations_of_gated_kalmanet_are_mixers_of_one_run_file(tmp_path):
    """Appendices F.1 to F.3, G and H. What the preset sets holds in all of them, and the attention stays where it is."""
    (tmp_path / "run.toml").write_text(MIXERS_OF_A_HYBRID)
    runs = load_run(tmp_path / "run.toml").models()
    labels = ["gka", "constant", "unweighted", "R2", "a", "sketched", "gdn"]
    assert [run.output for run in runs] == [f"runs/train/{label}" for label in labels]
    assert [run.label for run in runs] == labels
    changes = {
        "constant": {"ridge": 0.25, "adaptive_ridge": False}, "unweighted": {"decay": "none"}, "R2": {"alpha_connection": False},
        "a": {"ridge": 0.01}, "sketched": {"sketch": 32},
    }  # fmt: skip
    for run in runs:
        config = model_config(run)
        assert config.softmax_layers == [6, 14, 22, 29] and config.mixers()[6] == preset("gka-hybrid-2.8b").mixers()[6]
        name, made = options_of(config)
        wanted = (
            {"conv_init": "normal"} if name == "gdn" else {**KALMAN, "gate_bias": True, **changes.get(run.label, {})}
        )
        assert wanted.items() <= made.items()


@pytest.mark.parametrize("name", ["palimpsa-d-170m", "palimpsa-m-170m", "mamba2-170m-palimpsa", "gdn-170m-palimpsa"])
def test_first_weights_of_palimpsa_are_the_papers(name):
    """'Convolutional and linear layers are initialized with a Gaussian distribution (0.02)'; 'A ... from a uniform distribution
    U(0,16)'; 'the bias ... via a log-space ramp between 0.001 and 0.1'."""
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(preset(name, vocab_size=64, num_hidden_layers=2))
    drawn = [
        module.weight
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "ShortConvolution"
    ]
    assert len(drawn) > 6 and all(weight.std().item() == pytest.approx(0.02, rel=0.05) for weight in drawn)
    for block in model.model.layers:
        dt = torch.nn.functional.softplus(block.mixer.decay.dt_bias)
        torch.testing.assert_close(dt, torch.logspace(-3, -1, 16))
        rate = block.mixer.decay.A_log.exp()
        assert 0 < rate.min() < 5 and 10 < rate.max() <= 16 and not (rate.diff() > 0).all()
        skip = getattr(block.mixer, "skip", None)
        assert skip is None or skip.D.tolist() == [1.0] * 16


def test_the_first_steps_of_a_ramp_in_a_layer_with_a_decay_per_channel():
    """Channels of a head start alike; GLA has neither A nor dt, and starts with their product."""
    torch.manual_seed(0)
    kda, gla = (
        MIXERS[name].layer(**MIXERS[name].options, hidden_size=32, num_heads=4, long_memory="steps")
        for name in ("kda", "gla")
    )
    torch.testing.assert_close(
        torch.nn.functional.softplus(kda.decay.dt_bias).view(4, 8), torch.logspace(-3, -1, 4)[:, None].expand(4, 8)
    )
    g = torch.nn.functional.logsigmoid(gla.decay.gk_proj[1].bias.view(4, 8)) / 16
    rates = -g[:, 0] / torch.logspace(-3, -1, 4)
    assert (g == g[:, :1]).all() and rates.min() > 0 and rates.max() <= 16


@pytest.mark.parametrize(
    ("mixer", "low", "high"), [('"palimpsa-m"', 0.1, 1.0), ('{name = "palimpsa-m", b_scale = [0.4, 0.5]}', 0.4, 0.5)]
)
def test_mamba2_continues_as_palimpsa_by_its_run_file(mixer, low, high, tmp_path):
    """Section 3.3: metaplastic models start from the checkpoint of the others, with b_scale in [0.1, 1] (appendix)."""
    torch.manual_seed(0)
    small = {"vocab_size": 64, "hidden_size": 64, "num_heads": 4, "num_hidden_layers": 2}
    source = FastWeightsForCausalLM(preset("mamba2-170m-palimpsa", **small))
    source.save_pretrained(tmp_path / "mamba2")
    (tmp_path / "run.toml").write_text(f'[model]\npath = "{tmp_path / "mamba2"}"\nmixer = {mixer}\n')
    run = load_run(tmp_path / "run.toml")
    config = model_config(run)
    name, options = options_of(preset("palimpsa-m-170m", **small))
    assert options_of(config) == options_of(config, 1) == (name, {**options, "b_scale": (low, high)})
    model = build_model(run, config)
    weights = model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in source.state_dict().items())
    drawn = torch.stack([block.mixer.importance.b_scale for block in model.model.layers])
    assert drawn.min() >= low and drawn.max() <= high and drawn.std() > 0


@pytest.mark.parametrize("name", ["vla-2l", "softmax-2l-vla", "linear-2l-vla", "deltanet-2l-vla"])
def test_the_backbone_of_variational_linear_attention(name):
    """Tables 3 and 6: two layers of width 128 with four heads, 128 tokens, MLPs of width 256, tied; section 5.1: layer
    normalisation in all models."""
    model = FastWeightsForCausalLM(preset(name))
    config = model.config
    assert (config.num_hidden_layers, config.hidden_size, config.num_heads) == (2, 128, 4)
    assert (config.vocab_size, config.intermediate_size, config.tie_word_embeddings) == (128, 256, True)
    norms = [model.model.norm, *(n for block in model.model.layers for n in (block.mixer_norm, block.mlp_norm))]
    x = torch.randn(3, 128)
    for norm in norms:
        torch.testing.assert_close(norm(x), torch.nn.functional.layer_norm(x, [128], eps=1e-5))
