"""Elementwise Longhorn against the update that Palimpsa's table 1 prints."""

import pytest
import torch

from fastweights.layers import LayerCache, build_mixer, probe

from .by_hand import answer, heads, unit
from .variants import HIDDEN, VARIANTS, build


@pytest.mark.parametrize("variant", [n for n, (mixer, _) in VARIANTS.items() if mixer == "longhorn-elementwise"])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    with torch.no_grad():
        layer.beta_proj[1].weight.mul_(5)
        x = torch.randn(1, 13, HIDDEN, dtype=torch.float64)
        q, k, v = heads(layer, x[0])
        if layer.options.normalize_qk:
            q, k = unit(q), unit(k)
        beta = torch.sigmoid(layer.beta_proj(x[0])).view_as(v)
        o = torch.zeros_like(v)
        for h in range(v.shape[1]):
            S = x.new_zeros(k.shape[2], v.shape[2])
            for t in range(len(o)):
                e = beta[t, h] / (1 + beta[t, h] * (k[t, h] @ k[t, h]))
                S = (1 - torch.outer(k[t, h] ** 2, e)) * S + torch.outer(k[t, h], e * v[t, h])
                o[t, h] = q[t, h] @ S / k.shape[2] ** 0.5
        torch.testing.assert_close(layer(x)[0], answer(layer.output, o, x[0]), rtol=1e-9, atol=1e-11)


def test_one_key_channel_is_longhorn():
    """With K = 1 an element is a whole column, and one gain per channel is one per head where V = 1."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 4, "num_heads": 4, "head_dim": 1}
    layer, longhorn = (build_mixer(name, **sizes).double() for name in ("longhorn-elementwise", "longhorn"))
    with torch.no_grad():
        longhorn.qkv.load_state_dict(layer.qkv.state_dict())
        longhorn.output.load_state_dict(layer.output.state_dict())
        longhorn.gain.b_proj.weight.copy_(layer.beta_proj[1].weight @ layer.beta_proj[0].weight)
        x = torch.randn(2, 30, 4, dtype=torch.float64)
        torch.testing.assert_close(layer(x), longhorn(x), rtol=1e-9, atol=1e-11)


def test_long_keys_and_certain_gains_stay_finite():
    """One channel that holds nearly all of a long key replaces its elements: 1 - k^2 e is 0 in float32."""
    torch.manual_seed(0)
    layer = build_mixer("longhorn-elementwise", hidden_size=8, num_heads=2, conv_size=None, activation="none")
    x = (1e4 * torch.eye(8)[:1].expand(1, 40, 8)).clone().requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_state_and_probes():
    layer, cache = build_mixer("longhorn-elementwise", hidden_size=16, num_heads=2, expand_v=0.5), LayerCache()
    x = torch.randn(3, 5, 16)
    with probe(layer, "beta", "state") as seen:
        layer(x, cache)
    assert cache.memory["S"].shape == (3, 2, 8, 4) and layer.state_size() == 2 * 8 * 4
    assert seen["beta"][0].shape == (3, 5, 2, 4)
    torch.testing.assert_close(seen["state"][0]["S"][:, -1], cache.memory["S"])
    beta = torch.sigmoid(layer.beta_proj(x)).view(3, 5, 2, 4)
    with torch.no_grad(), probe(layer, "k") as keys:
        layer(x)
    length = keys["k"][0].square().sum(-1, keepdim=True)
    torch.testing.assert_close(seen["beta"][0], (beta / (1 + beta * length)).detach())
