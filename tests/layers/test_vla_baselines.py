"""The baselines of Variational Linear Attention against its equations 2, 3 and 4, which have no norms and no convolutions."""

import pytest
import torch

from fastweights.layers import build_mixer

from .by_hand import answer, heads, unit
from .variants import HIDDEN, VARIANTS, build


def built(name, **options):
    torch.manual_seed(0)
    return build_mixer(name, hidden_size=HIDDEN, num_heads=2, **options).double()


def draw():
    return torch.randn(1, 17, HIDDEN, dtype=torch.float64)


@pytest.mark.parametrize("variant", [name for name, (mixer, _) in VARIANTS.items() if mixer == "vla-deltanet"])
def test_equation_4(variant):
    torch.manual_seed(0)
    layer, x = build(variant).double(), draw()
    with torch.no_grad():
        q, k, v = heads(layer, x[0])
        if layer.options.normalize_qk:
            q, k = unit(q), unit(k)
        b, o = torch.sigmoid(x[0] @ layer.gate_proj.weight.T), torch.zeros_like(v)
        for h in range(v.shape[1]):
            S = x.new_zeros(k.shape[2], v.shape[2])
            for t in range(len(o)):
                S = b[t, h] * S + torch.outer(k[t, h], v[t, h] - k[t, h] @ S)
                o[t, h] = q[t, h] @ S
        torch.testing.assert_close(layer(x)[0], answer(layer.output, o, x[0]), rtol=1e-9, atol=1e-11)


def test_equation_3():
    layer, x = built("vla-linear"), draw()
    with torch.no_grad():
        q, k, v = heads(layer, x[0])
        q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
        o = torch.zeros_like(v)
        for t in range(len(o)):
            weights = (q[t] * k[: t + 1]).sum(-1)  # [t + 1, heads]
            o[t] = (weights[..., None] * v[: t + 1]).sum(0) / weights.sum(0)[:, None]
        torch.testing.assert_close(layer(x)[0], o.flatten(1) @ layer.output.o_proj.weight.T, rtol=1e-9, atol=1e-11)


def test_equation_2():
    """Without positions: the order of the tokens before the last does not matter to it."""
    layer, x = built("vla-softmax"), draw()
    with torch.no_grad():
        q, k, v = ((x[0] @ p.weight.T).unflatten(1, (2, -1)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
        o = torch.zeros_like(v)
        for t in range(len(o)):
            weights = torch.softmax((q[t] * k[: t + 1]).sum(-1) / k.shape[2] ** 0.5, 0)
            o[t] = (weights[..., None] * v[: t + 1]).sum(0)
        torch.testing.assert_close(layer(x)[0], o.flatten(1) @ layer.o_proj.weight.T, rtol=1e-9, atol=1e-11)
        shuffled = torch.cat([x[:, :-1].flip(1), x[:, -1:]], 1)
        torch.testing.assert_close(layer(shuffled)[:, -1], layer(x)[:, -1])


def test_the_printed_deltanet_is_not_deltanet():
    """With a gate of 1 and unit keys the two agree at gain 1; the gate then decays where DeltaNet's writes less."""
    printed = built("vla-deltanet", normalize_qk=True)
    bare = {"conv_size": None, "activation": "none", "output_norm": False}
    delta = built("deltanet", **bare)
    with torch.no_grad():
        delta.qkv.load_state_dict(printed.qkv.state_dict())
        delta.output.load_state_dict(printed.output.state_dict())
        # A constant channel sets the gates.
        x = torch.cat([draw(), torch.ones(1, 17, 1, dtype=torch.float64)], 2)[..., 1:]
        x[..., -1] = 1
        for gate in (printed.gate_proj, delta.gain.b_proj):
            gate.weight.zero_()
            gate.weight[:, -1] = 40.0
        scale = delta.heads.key**-0.5
        torch.testing.assert_close(scale * printed(x), delta(x), rtol=1e-9, atol=1e-11)
        for gate in (printed.gate_proj, delta.gain.b_proj):
            gate.weight[:, -1] = 0.0
        assert (scale * printed(x) - delta(x)).norm() > 0.1 * delta(x).norm()


def test_long_keys_let_it_grow_without_end():
    layer = built("vla-deltanet")
    x = 30 * torch.ones(1, 200, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        assert not layer(x)[0, -1].abs().max() < 1e20
        assert built("vla-deltanet", normalize_qk=True)(x)[0, -1].abs().max() < 1e3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"normalizer": True}, "normalizer must be False unless feature_map is 'elu'"),
        ({"normalizer": True, "feature_map": "elu", "preconditioner": "query"}, "there is no preconditioner"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer("linear", hidden_size=16, num_heads=4, **options)
