"""MesaNet and recursive least squares against regressions solved anew for every token."""

import dataclasses

import pytest
import torch

from fastweights.layers import LayerCache, build_mixer

from .by_hand import answer, decay, gate, heads, unit
from .variants import HIDDEN, VARIANTS, build


def expected(layer, x, ridge):
    """ridge [G, K]: the weight of a memory of zeros. Only recursive least squares lets it decay."""
    q, k, v = heads(layer, x)
    q, k = unit(q) / layer.heads.key**0.5, unit(k)
    a = decay(layer, x)
    beta = torch.as_tensor(gate(layer.gain, x)).expand(a.shape)
    fades = type(layer).__name__ == "RecursiveLeastSquares"
    o = torch.zeros_like(v)
    for t in range(len(x)):
        for h in range(v.shape[1]):
            weight = torch.stack([beta[s, h] * a[s + 1 : t + 1, h].prod() for s in range(t + 1)])
            past, values = k[: t + 1, h], v[: t + 1, h]
            prior = ridge[h].diag() * (a[: t + 1, h].prod() if fades else 1)
            system = past.T @ (weight[:, None] * past) + prior
            o[t, h] = q[t, h] @ torch.linalg.solve(system, past.T @ (weight[:, None] * values))
    return answer(layer.output, o, x)


@pytest.mark.parametrize("variant", [name for name, (mixer, _) in VARIANTS.items() if mixer in ("mesa", "rls")])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    name, options = VARIANTS[variant]
    with torch.no_grad():
        if name == "mesa":
            layer.options = dataclasses.replace(layer.options, iterations=60)  # converged
            layer.ridge.weight += torch.rand_like(layer.ridge.weight)  # tells channels apart
            ridge = options.get("smallest_ridge", 0.25) + torch.log(1 + layer.ridge.weight.exp())
        else:
            ridge = torch.full(
                (layer.heads.value_heads, layer.heads.key), options.get("ridge", 1.0), dtype=torch.float64
            )
        x = torch.randn(1, 15, HIDDEN, dtype=torch.float64)
        torch.testing.assert_close(layer(x)[0], expected(layer, x[0], ridge), rtol=1e-8, atol=1e-10)


def test_first_ridge():
    ridge = build_mixer("mesa", hidden_size=16, num_heads=2, ridge=0.7, smallest_ridge=0.3).ridge
    torch.testing.assert_close(ridge(), torch.full((2, 8), 0.7))
    torch.nn.init.constant_(ridge.weight, -100.0)
    torch.testing.assert_close(ridge(), torch.full((2, 8), 0.3))


def test_without_decay_both_are_the_same_regression():
    torch.manual_seed(0)
    rls = build_mixer("rls", hidden_size=16, num_heads=2).double()
    mesa = build_mixer("mesa", hidden_size=16, num_heads=2, decay="none", iterations=60).double()
    loaded = mesa.load_state_dict(rls.state_dict(), strict=False)
    assert loaded.missing_keys == ["ridge.weight"] and not loaded.unexpected_keys
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    torch.testing.assert_close(mesa(x), rls(x), rtol=1e-6, atol=1e-8)


def test_decoding_with_strong_decays_does_not_drift():
    """P winds up by more than float32 can hold beside its small directions."""
    torch.manual_seed(0)
    layer, cache = build_mixer("rls", hidden_size=16, num_heads=2, decay="head", ridge=0.1), LayerCache()
    for parameter, value in ((layer.decay.A_log, 0.0), (layer.decay.dt_bias, 0.0)):
        torch.nn.init.constant_(parameter, value)
    torch.nn.init.normal_(layer.decay.a_proj.weight, std=0.5)  # decays near 1/2
    x = torch.randn(1, 150, 16)
    with torch.no_grad():
        steps = [layer(token, cache) for token in x.split(1, 1)]
        torch.testing.assert_close(torch.cat(steps, 1), layer(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "error, name, options, message",
    [
        (ValueError, "mesa", {"ridge": 0.25}, "ridge must be above smallest_ridge, 0.25, got 0.25"),
        (ValueError, "mesa", {"smallest_ridge": 0.0}, "smallest_ridge must be positive"),
        (TypeError, "mesa", {"iterations": 2.0}, "iterations must be a positive whole number"),
        (ValueError, "mesa", {"decay": "channel"}, "decay must be one of 'none', 'head'"),
        (ValueError, "rls", {"decay": "channel"}, "decay must be one of 'none', 'head'"),
        (ValueError, "rls", {"ridge": 0.0}, "ridge must be positive"),
        (ValueError, "rls", {"gain": "longhorn"}, "gain must be one of None, 'beta'"),
    ],
)
def test_bad_options_are_refused(error, name, options, message):
    with pytest.raises(error, match=message):
        build_mixer(name, hidden_size=16, num_heads=4, **options)
