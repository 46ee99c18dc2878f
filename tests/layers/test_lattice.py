"""Lattice and its baseline against loops over their slots and steps."""

import pytest
import torch

from fastweights.layers import LayerCache, build_mixer, probe

from .by_hand import answer, decay, gate, heads, unit
from .variants import HIDDEN, VARIANTS, build


def blocks(layer, x, options):
    """q, k, v [T, G, channels] and gamma [T, G]."""
    q, k, v = heads(layer, x)
    q, k = unit(q), unit(k)
    v = unit(v) if options.get("normalize_v", True) else v
    return q, k, v, layer.step.log_rate.exp() * gate(layer.step.gate, x)


def across(S, h):
    """h without its part along each row of S."""
    phi = S / S.norm(dim=1, keepdim=True)
    return h - phi * (phi @ h)[:, None]


def slots(layer, x, options):
    q, k, v, gamma = blocks(layer, x, options)
    d, o = decay(layer, x), torch.zeros_like(v)
    for head in range(v.shape[1]):
        S = torch.eye(k.shape[2], v.shape[2], dtype=x.dtype)
        if k.shape[2] > v.shape[2]:
            S = layer._first_slots(1, x)[0, head]
        for t in range(len(x)):
            phi = S / S.norm(dim=1, keepdim=True)
            kt, vt = k[t, head], v[t, head]
            h, c = {
                "decode": (phi.T @ kt - vt, kt),
                "encode": (vt, phi @ vt - kt),
                "similarity": (-vt, kt),
            }[options.get("objective", "decode")]
            S = d[t, head] * S - gamma[t, head] * c[:, None] * across(S, h) / S.norm(dim=1, keepdim=True)
            S = S.sign() * (S.abs() - gamma[t, head] * options.get("l1", 0.0)).clamp_min(0)
            S = S / S.norm(dim=1, keepdim=True) if options.get("normalize", True) else S
            o[t, head] = q[t, head] @ S
    if layer.skip is not None:
        o = o + layer.skip.D[:, None] * heads(layer, x)[2]  # v as projected
    return answer(layer.output, o, x)


def directions(layer, x, options):
    q, k, v, gamma = blocks(layer, x, options)
    o = torch.zeros_like(v)
    for head in range(v.shape[1]):
        S = x.new_zeros(k.shape[2], v.shape[2]) if layer.first is None else layer.first.S[head]
        for t in range(len(x)):
            z = k[t, head] @ S
            error = z - v[t, head]  # of a memory that answers nothing
            if z.norm() > 1e-6:
                error = z / z.norm() - v[t, head]
                error = (error - z * (z @ error) / z.square().sum()) / z.norm()
            S = S - gamma[t, head] * torch.outer(k[t, head], error)
            o[t, head] = q[t, head] @ S
    return answer(layer.output, o, x)


@pytest.mark.parametrize("variant", [name for name, (mixer, _) in VARIANTS.items() if mixer in ("lattice", "ttt")])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    name, options = VARIANTS[variant]
    with torch.no_grad():
        layer.step.log_rate -= torch.rand_like(layer.step.log_rate)  # tells heads apart
        x = torch.randn(1, 11, HIDDEN, dtype=torch.float64)
        wanted = (slots if name == "lattice" else directions)(layer, x[0], options)
        torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("slots, channels", [(8, 4), (5, 4), (256, 3), (9, 1)])
def test_more_slots_than_channels_begin_as_different_unit_rows(slots, channels):
    layer = build_mixer("lattice", hidden_size=channels, num_heads=1, slots=slots)
    rows = layer._first_slots(3, torch.zeros(1, dtype=torch.float64))
    assert rows.shape == (3, 1, slots, channels) and torch.equal(rows, layer._first_slots(3, rows))
    torch.testing.assert_close(rows.norm(dim=-1), torch.ones(3, 1, slots, dtype=torch.float64))
    if channels > 1:
        overlap = (rows[0, 0] @ rows[0, 0].T).fill_diagonal_(0)
        assert overlap.abs().max() < 1
    assert layer.state_size() == slots * channels


def test_only_the_convolutions_tell_queries_from_keys():
    layer = build_mixer("lattice", hidden_size=16, num_heads=2)
    assert layer.qkv.qk_proj.weight.shape == (16, 16) and layer.qkv.q_conv.weight.shape == (16, 4)
    cache = LayerCache()
    layer(torch.randn(1, 5, 16), cache)
    assert {name: x.shape for name, x in cache.context.items()} == {"qk": (1, 3, 16)}


def test_the_first_state_is_small_and_kept_through_the_cache():
    torch.manual_seed(0)
    layer, plain = (build_mixer("ttt", hidden_size=32, num_heads=2, learned_state=learned) for learned in (True, False))
    assert dict(layer.named_parameters()).keys() - dict(plain.named_parameters()).keys() == {"first.S"}
    assert layer.first.S.shape == (2, 16, 16) and 0.018 < layer.first.S.std() < 0.022
    assert layer.state_size() == plain.state_size() == 2 * 16 * 16
    with torch.no_grad():
        plain.load_state_dict({name: x for name, x in layer.state_dict().items() if name != "first.S"})
        x = torch.randn(1, 5, 32)
        assert (layer(x)[:, 0] - plain(x)[:, 0]).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["deltanet", "linear", "gdn"])
def test_other_layers_take_the_block_of_lattice(name):
    """The ablations of its table 4 compare rules inside one block: the same parameters around them."""
    block = {"shared_qk": True, "output_gate": "gelu"}
    lattice = build_mixer("lattice", hidden_size=16, num_heads=2, decay="none")
    layer = build_mixer(name, hidden_size=16, num_heads=2, **block)
    around = [
        {n: p.shape for n, p in module.named_parameters() if n.startswith(("qkv.", "output."))}
        for module in (lattice, layer)
    ]
    assert around[0] == around[1] and "qkv.qk_proj.weight" in around[1] and "qkv.v_conv.weight" not in around[1]


def test_without_a_norm_the_gate_multiplies_the_answer():
    torch.manual_seed(0)
    layer = build_mixer("lattice", hidden_size=16, num_heads=2, output_norm=False)
    assert not any(name.startswith("output.norm") for name, _ in layer.named_parameters())
    with probe(layer, "o", "output_gate") as seen:
        y = layer(torch.randn(1, 5, 16))
    wanted = (seen["o"][0] * seen["output_gate"][0]).flatten(2) @ layer.output.o_proj.weight.T
    torch.testing.assert_close(y, wanted)


def test_first_rate():
    layer = build_mixer("ttt", hidden_size=16, num_heads=2, rate=0.3)
    torch.testing.assert_close(layer.step(torch.zeros(1, 1, 16)), torch.full((1, 1, 2), 0.15))


@pytest.mark.parametrize(
    "error, name, options, message",
    [
        (ValueError, "lattice", {"objective": "encoding"}, "objective must be one of 'decode', 'encode', 'similarity'"),
        (ValueError, "lattice", {"slots": 257}, "slots must be at most 256, got 257"),
        (ValueError, "lattice", {"slots": 0}, "slots must be a positive whole number"),
        (ValueError, "lattice", {"l1": -0.1}, "l1 must be at least 0, got -0.1"),
        (TypeError, "lattice", {"normalize": 1}, "normalize must be True or False"),
        (ValueError, "lattice", {"decay": "channel"}, "decay must be one of 'none', 'head'"),
        (ValueError, "lattice", {"rate": 0}, "rate must be positive"),
        (ValueError, "lattice", {"conv_size": None}, "conv_size must be a positive whole number with shared_qk"),
        (ValueError, "gdn", {"conv_size": None, "shared_qk": True}, "conv_size must be .* with shared_qk, got None"),
        (TypeError, "deltanet", {"shared_qk": "yes"}, "shared_qk must be True or False"),
        (TypeError, "linear", {"output_norm": None}, "output_norm must be True or False"),
        (TypeError, "ttt", {"learned_state": 1}, "learned_state must be True or False"),
        (ValueError, "ttt", {"rate": -1.0}, "rate must be positive"),
        (TypeError, "ttt", {"normalize_v": 0}, "normalize_v must be True or False"),
    ],
)
def test_bad_options_are_refused(error, name, options, message):
    with pytest.raises(error, match=message):
        build_mixer(name, hidden_size=16, num_heads=4, **options)
