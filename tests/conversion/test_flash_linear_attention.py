"""Saved models of flash-linear-attention in this library's form. That library is not installed here: what its weights mean is
written out from the published equations (Yang et al. 2024, 2025), token by token, with the weights under its names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from fastweights.conversion import convert_folder
from fastweights.conversion.folder import load_model, plan_conversion

from .small import VOCABULARY, tokens

COMMON: dict[str, Any] = {
    "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 2, "conv_size": 4, "use_short_conv": True, "use_gate": True,
    "norm_eps": 1e-5, "hidden_ratio": 4, "intermediate_size": None, "hidden_act": "swish", "initializer_range": 0.02,
    "vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "tie_word_embeddings": False,
    "attn": None,
}  # fmt: skip
GATED = {**COMMON, "model_type": "gated_deltanet", "head_dim": 6, "expand_v": 2.0, "num_v_heads": None}
PLAIN = {**COMMON, "model_type": "delta_net", "expand_k": 1.0, "expand_v": 1, "use_beta": True, "qk_norm": "l2"}
ATTENTION = {
    "layers": [1],
    "num_heads": 2,
    "num_kv_heads": 1,
    "qkv_bias": False,
    "window_size": None,
    "rope_theta": 1e4,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gated": GATED,
    "gated grouped": {**GATED, "num_v_heads": 4, "allow_neg_eigval": True, "intermediate_size": 24},
    "gated bare": {**GATED, "use_gate": False, "use_short_conv": False, "tie_word_embeddings": True},
    "gated hybrid": {**GATED, "attn": ATTENTION},
    "plain": PLAIN,
    "plain wide": {**PLAIN, "expand_k": 0.5, "expand_v": 2, "use_gate": False, "conv_size": 3},
}


def sizes_of(config: dict[str, Any]) -> tuple[int, int, int, int]:
    """Key heads, value heads, key channels, value channels."""
    H = config["num_heads"]
    if config["model_type"] == "gated_deltanet":
        return H, config["num_v_heads"] or H, config["head_dim"], int(config["head_dim"] * config["expand_v"])
    key, value = (int(config["hidden_size"] * config[name]) // H for name in ("expand_k", "expand_v"))
    return H, H, key, value


def saved_weights(config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Random weights under the names, and of the shapes, in which flash-linear-attention saves them."""
    D, (H, G, K, V) = config["hidden_size"], sizes_of(config)
    width = config["intermediate_size"] or 256
    shapes = {"model.embeddings.weight": (VOCABULARY, D), "model.norm.weight": (D,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (VOCABULARY, D)
    for layer in range(config["num_hidden_layers"]):
        own = {
            "attn_norm.weight": (D,), "mlp_norm.weight": (D,), "mlp.gate_proj.weight": (width, D),
            "mlp.up_proj.weight": (width, D), "mlp.down_proj.weight": (D, width),
        }  # fmt: skip
        if config["attn"] and layer in config["attn"]["layers"]:
            narrow = D // H * config["attn"]["num_kv_heads"]
            own |= {f"attn.{name}_proj.weight": (D, D) for name in "qo"}
            own |= {f"attn.{name}_proj.weight": (narrow, D) for name in "kv"}
        else:
            channels = {"q": H * K, "k": H * K, "v": G * V}
            own |= {f"attn.{name}_proj.weight": (count, D) for name, count in channels.items()}
            own |= {"attn.b_proj.weight": (G, D), "attn.o_proj.weight": (D, G * V), "attn.o_norm.weight": (V,)}
            if config["use_short_conv"]:
                own |= {f"attn.{name}_conv1d.weight": (n, 1, config["conv_size"]) for name, n in channels.items()}
            if config["use_gate"]:
                own["attn.g_proj.weight"] = (G * V, D)
            if config["model_type"] == "gated_deltanet":
                own |= {"attn.a_proj.weight": (G, D), "attn.A_log": (G,), "attn.dt_bias": (G,)}
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in own.items()}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) * 0.4 for name, shape in shapes.items()}


def norm(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def memory_layer(config, weights, x):
    """The published (gated) delta rule on x [T, D]."""
    H, G, K, V = sizes_of(config)
    made = {}
    for name in "qkv":
        y = x @ weights[f"{name}_proj.weight"].T
        if config["use_short_conv"]:
            filters = weights[f"{name}_conv1d.weight"][:, 0]
            padded = F.pad(y, (0, 0, filters.shape[1] - 1, 0))
            y = sum(padded[j : j + len(y)] * filters[:, j] for j in range(filters.shape[1]))
        made[name] = (y * torch.sigmoid(y)).unflatten(1, (-1, V if name == "v" else K))
    q, k = (made[name] / (made[name].square().sum(-1, keepdim=True) + 1e-6).sqrt() for name in "qk")
    v = made["v"]
    beta = torch.sigmoid(x @ weights["b_proj.weight"].T) * (2 if config.get("allow_neg_eigval") else 1)
    a = torch.ones_like(beta)
    if "A_log" in weights:
        step = torch.log(1 + torch.exp(x @ weights["a_proj.weight"].T + weights["dt_bias"]))
        a = torch.exp(-weights["A_log"].exp() * step)
    o = torch.zeros_like(v)
    for h in range(G):
        S = x.new_zeros(V, K)  # as the papers write it
        for t in range(len(x)):
            key, query = k[t, h * H // G], q[t, h * H // G] / K**0.5
            S = a[t, h] * (S - beta[t, h] * torch.outer(S @ key, key)) + beta[t, h] * torch.outer(v[t, h], key)
            o[t, h] = S @ query
    o = norm(o, weights["o_norm.weight"])
    if config["use_gate"]:
        o = o * F.silu((x @ weights["g_proj.weight"].T).view_as(o))
    return o.flatten(1) @ weights["o_proj.weight"].T


def attention_layer(config, weights, x):
    """Causal softmax attention with rotary positions, channel i paired with channel i + K/2."""
    H, K = config["num_heads"], config["hidden_size"] // config["num_heads"]
    q, k, v = ((x @ weights[f"{name}_proj.weight"].T).unflatten(1, (-1, K)) for name in "qkv")
    angle = torch.arange(len(x))[:, None, None] * 1e4 ** (-torch.arange(K // 2) / (K // 2)).to(x)
    turned = [
        torch.cat(
            [
                y[..., : K // 2] * angle.cos() - y[..., K // 2 :] * angle.sin(),
                y[..., K // 2 :] * angle.cos() + y[..., : K // 2] * angle.sin(),
            ],
            -1,
        )
        for y in (q, k)
    ]
    (q, k), v = turned, v.repeat_interleave(H // v.shape[1], 1)
    scores = torch.einsum("thk,shk->hts", q, k.repeat_interleave(H // k.shape[1], 1)) / K**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    return torch.einsum("hts,shv->thv", scores.softmax(-1), v).flatten(1) @ weights["o_proj.weight"].T


def published_logits(config, weights, ids):
    """The logits [T, vocabulary] of the whole model."""
    x = weights["model.embeddings.weight"][ids]
    for layer in range(config["num_hidden_layers"]):
        place = f"model.layers.{layer}."
        own = {name.removeprefix(place): weight for name, weight in weights.items() if name.startswith(place)}
        mixer = {name.removeprefix("attn."): weight for name, weight in own.items() if name.startswith("attn.")}
        mix = attention_layer if "b_proj.weight" not in mixer else memory_layer
        x = x + mix(config, mixer, norm(x, own["attn_norm.weight"]))
        y = norm(x, own["mlp_norm.weight"])
        inner = F.silu(y @ own["mlp.gate_proj.weight"].T) * (y @ own["mlp.up_proj.weight"].T)
        x = x + inner @ own["mlp.down_proj.weight"].T
    return norm(x, weights["model.norm.weight"]) @ weights.get("lm_head.weight", weights["model.embeddings.weight"]).T


def save(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("variant", CONFIGS)
def test_logits_are_those_of_the_published_equations(variant, tmp_path):
    config = CONFIGS[variant]
    weights = {name: weight.double() for name, weight in saved_weights(config).items()}
    model, stored = load_model(save(tmp_path / "source", config, weights))
    ids = tokens(40)[0]
    with torch.no_grad():
        got, wanted = model(ids[None]).logits[0], published_logits(config, weights, ids)
    assert stored == torch.float64 and wanted.abs().max() > 1
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)  # angles of rotary positions are float32


@pytest.mark.parametrize(("variant", "to"), [("gated", "gdn"), ("gated hybrid", "pgdn"), ("plain", "pdn")])
def test_a_folder_continues(variant, to, tmp_path):
    config = CONFIGS[variant]
    weights = {name: weight.bfloat16() for name, weight in saved_weights(config).items()}
    source = save(tmp_path / "source", config, weights)
    plan = plan_conversion(source, tmp_path / "new", to=to)
    report = convert_folder(source, tmp_path / "new", to=to)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "new", dtype="auto")
    assert model.dtype == torch.bfloat16 and plan["parameters"] == report.parameters == model.num_parameters()
    assert report.check.neutral == 0 and (report.check.saved == 0) == (report.new_parameters == 0) == (to == "gdn")
    assert [name for name, _ in model.config.mixers()] == [to, "softmax" if "hybrid" in variant else to]
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.norm_eps) == (1, 2, 1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act='gelu' cannot be carried over: it must be 'swish'"),
        ({"attn": {**ATTENTION, "num_heads": 4}}, "heads_of_attention=4 .* must be 2"),
        ({"attn": {**ATTENTION, "qkv_bias": True}}, "qkv_bias=True"),
        ({"num_heads": None}, "cannot be loaded"),
        ({"num_heads": 4}, "are not those of its config.json"),
        ({"head_dim": 8}, "are not those of its config.json"),
        ({"num_hidden_layers": 3}, "num_hidden_layers is 3"),
        ({"use_gate": False}, "they have too much:"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message, tmp_path):
    source = save(tmp_path / "source", {**GATED, **changes}, saved_weights(GATED))
    with pytest.raises(ValueError, match=message):
        convert_folder(source, tmp_path / "new", to="gdn")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("setting", ["num_heads", "head_dim", "norm_eps"])
def test_a_setting_that_is_missing_is_named(setting, tmp_path):
    config = {name: value for name, value in GATED.items() if name != setting}
    with pytest.raises(ValueError, match=f"cannot be loaded: .*{setting}"):
        convert_folder(save(tmp_path / "source", config, saved_weights(GATED)), tmp_path / "new", to="gdn")


@pytest.mark.parametrize(("setting", "value"), [("use_beta", False), ("qk_norm", "sum"), ("qk_activation", "relu")])
def test_settings_of_delta_net_without_counterpart(setting, value, tmp_path):
    with pytest.raises(ValueError, match=f"delta_net with {setting}={value!r}"):
        convert_folder(
            save(tmp_path / "source", {**PLAIN, setting: value}, saved_weights(PLAIN)), tmp_path / "new", to="deltanet"
        )
