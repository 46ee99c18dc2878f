"""Variational linear attention against a loop over Algorithm 1, and what its ablation takes away."""

import dataclasses

import pytest
import torch

from fastweights.kernels.pointwise import RowProducts
from fastweights.layers import LayerCache, build_mixer, shared_input, vla
from fastweights.layers.parts import HeadPart
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loading import load_weights

from .by_hand import heads, unit
from .variants import HIDDEN, VARIANTS, build


def expected(layer, x, options):
    q, raw, v = heads(layer, x)
    q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, raw))
    K, o = k.shape[2], torch.zeros_like(v)
    for h in range(v.shape[1]):
        A = torch.eye(K, dtype=x.dtype) / options.get("ridge", 0.1)
        S, z = x.new_zeros(K, v.shape[2]), x.new_zeros(K)
        for t in range(len(x)):
            if layer.penalty is not None:
                matrix = layer.penalty.weight[h // (v.shape[1] // layer.heads.key_heads)]
                u = unit(raw[t, h] @ matrix) / K**0.5
                A = A - torch.outer(A @ u, A @ u) / (1 + u @ A @ u)
                period = options.get("refresh_every", 20)
                if period is not None and (t + 1) % period == 0:
                    A = A + options.get("refresh", 1e-3) * torch.eye(K, dtype=x.dtype)
            key = k[t, h] / k[t, h].norm() if options.get("normalize_keys", True) else k[t, h]
            alpha = A @ key
            alpha = alpha / alpha.norm() if options.get("normalize_writes", True) else alpha
            S = S + torch.outer(alpha, v[t, h] - key @ S)
            z = z + k[t, h]
            o[t, h] = q[t, h] @ S / (z @ q[t, h]).clamp_min(1e-4)
    y = o.flatten(1) - o.flatten(1).mean(1, keepdim=True)
    y = y / (y.square().mean(1, keepdim=True) + 1e-5).sqrt() * layer.norm.weight + layer.norm.bias
    return y @ layer.o_proj.weight.T


@pytest.mark.parametrize("variant", [name for name, (mixer, _) in VARIANTS.items() if mixer in ("vla", "vla-conv")])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    with torch.no_grad():
        layer.norm.weight.uniform_(0.5, 2)
        layer.norm.bias.uniform_(-1, 1)
        x = torch.randn(1, 23, HIDDEN, dtype=torch.float64)
        wanted = expected(layer, x[0], VARIANTS[variant][1])
        torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-8, atol=1e-10)


def test_refreshes_count_the_tokens_of_earlier_calls():
    torch.manual_seed(0)
    layer = build_mixer("vla", hidden_size=16, num_heads=2, refresh_every=5, refresh=1.0).double()
    x, cache = torch.randn(2, 13, 16, dtype=torch.float64), LayerCache()
    blocks = [layer(block, cache) for block in x.split([4, 2, 7], 1)]
    assert cache.context["seen"].tolist() == [13, 13] and set(cache.memory) == {"S", "A", "z"}
    torch.testing.assert_close(torch.cat(blocks, 1), layer(x), rtol=1e-9, atol=1e-11)
    layer.options = dataclasses.replace(layer.options, refresh_every=None)
    assert not torch.allclose(torch.cat(blocks, 1)[:, 5:], layer(x)[:, 5:])


def test_vla_is_the_papers_and_the_variant_with_convolutions_has_its_own_name():
    layer, convolved = (build_mixer(name, hidden_size=16, num_heads=2) for name in ("vla", "vla-conv"))
    more = {name.split(".")[1] for name in convolved.state_dict().keys() - layer.state_dict().keys()}
    assert more == {"q_conv", "k_conv", "v_conv"}
    assert (layer.options.activation, convolved.options.activation) == ("none", "silu")


def test_a_model_saved_when_vla_had_convolutions_loads_under_the_other_name(tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "num_hidden_layers": 2, "intermediate_size": 8}
    model = FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixer="vla-conv")).eval()
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"vla-conv"', '"vla"'))  # as such a model was saved
    with pytest.raises(ValueError, match="not those of its config.json.*conv"):
        load_weights(tmp_path)
    tokens = torch.arange(11)[None]
    loaded = FastWeightsForCausalLM.from_pretrained(tmp_path, mixer="vla-conv")
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_without_penalty_there_is_no_projection_and_no_matrix():
    layer, cache = build_mixer("vla", hidden_size=16, num_heads=2, adaptive=False), LayerCache()
    layer(torch.randn(1, 4, 16), cache)
    assert set(cache.memory) == {"S", "z"} and layer.state_size() == 2 * 8 * 9
    assert not any(name.startswith("penalty") for name, _ in layer.named_parameters())


def test_without_normalisation_the_memory_explodes():
    """The paper's ablation, tables 2 and 4, with its ridge of 0.1."""
    torch.manual_seed(0)
    norms = {}
    for normalize in (True, False):
        layer = build_mixer(
            "vla-conv",
            hidden_size=96,
            num_heads=1,
            normalize_keys=normalize,
            normalize_writes=normalize,
            conv_size=None,
        )
        cache = LayerCache()
        with torch.no_grad():
            layer(torch.randn(1, 25, 96), cache)
        norms[normalize] = cache.memory["S"].norm().item()
    assert norms[True] < 100 and not norms[False] < 1e20


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"ridge": 0.0}, "ridge must be positive"),
        (ValueError, {"refresh_every": 0}, "refresh_every must be a positive whole number"),
        (ValueError, {"refresh": -1.0}, "refresh must be at least 0, got -1.0"),
        (TypeError, {"normalize_keys": 1}, "normalize_keys must be True or False"),
        (TypeError, {"normalize_writes": "no"}, "normalize_writes must be True or False"),
        (TypeError, {"adaptive": None}, "adaptive must be True or False"),
        (ValueError, {"norm_eps": 0}, "norm_eps must be positive"),
    ],
)
def test_bad_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        build_mixer("vla", hidden_size=16, num_heads=4, **options)


def test_the_norm_is_a_part_of_the_output_projection_where_nothing_else_is_asked_of_it(monkeypatch):
    """Not over the heads of several parts of a layer, nor in the place of another module."""
    layer = build_mixer("vla", hidden_size=16, num_heads=2)
    o, x = torch.randn(1, 1, 2, 8), torch.randn(1, 1, 16)
    joined = []
    for condition in ("joins", "takes_linear_rows"):  # of a GPU
        monkeypatch.setattr(shared_input, condition, lambda *given, **rest: True)
    monkeypatch.setattr(vla, "multiply_rows", lambda *given: joined.append(given) or RowProducts([x], None, None))
    layer.norm.part = HeadPart(parts=2, gather=lambda moments: torch.cat([moments, moments], -1))
    apart = layer.read_out(o, o, x)
    assert not joined
    layer.norm.part = HeadPart()
    torch.testing.assert_close(apart, layer.o_proj(layer.norm(o.flatten(2))))
    assert layer.read_out(o, o, x) is x and len(joined) == 1
    monkeypatch.undo()
    layer.norm = torch.nn.Identity()
    torch.testing.assert_close(layer.read_out(o, o, x), layer.o_proj(o.flatten(2)))
