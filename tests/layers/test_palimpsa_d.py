"""Palimpsa-D against a loop over its two recurrences, and its limits."""

import pytest
import torch

from fastweights.layers import build_mixer

from .by_hand import answer, decay, gate, heads, metaplastic_share, shift_of_variance, unit
from .variants import HIDDEN, VARIANTS, build


def expected(layer, x, options):
    q, k, v = heads(layer, x)
    q, k = unit(q), unit(k)
    a, s = decay(layer, x), torch.as_tensor(gate(layer.gain, x)).expand(v.shape[:2])
    beta = torch.zeros_like(v)
    if layer.importance is not None:
        first, second = layer.importance.beta_proj
        share = torch.sigmoid(x @ first.weight.T @ second.weight.T).reshape(v.shape)
        beta = share * torch.log(1 + layer.importance.b_scale.exp())[:, None] * s[..., None]
        beta = beta * metaplastic_share(layer, a)[..., None]
    o, shift = torch.zeros_like(v), torch.zeros_like(v)
    for h in range(v.shape[1]):
        M = J = x.new_zeros(k.shape[2], v.shape[2])
        for t in range(len(x)):
            M = a[t, h] * M + torch.outer(k[t, h], s[t, h] * v[t, h])
            J = a[t, h] * J + torch.outer(k[t, h] ** 2, beta[t, h])
            o[t, h] = q[t, h] @ (M / (J + options.get("prior", 1.0))) / k.shape[2] ** 0.5
            if layer.variance is not None:
                shift[t, h] = layer.variance.c[h] * shift_of_variance(layer, q[t, h], J, options.get("prior", 1.0))
    if options.get("residual", True):
        o = o + layer.skip.D[:, None] * v
    return answer(layer.output, o, x, shift.flatten(1))


@pytest.mark.parametrize("variant", [variant for variant, (name, _) in VARIANTS.items() if name == "palimpsa-d"])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # tells heads apart
            if parameter.ndim == 1:
                parameter += torch.rand_like(parameter)
        x = torch.randn(1, 11, HIDDEN, dtype=torch.float64)
        wanted = expected(layer, x[0], VARIANTS[variant][1])
        torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("gain", [None, "beta"])
def test_without_importance_it_is_linear_attention(gain):
    """The same names: a trained linear attention loads and continues as Palimpsa."""
    torch.manual_seed(0)
    linear = build_mixer("linear", hidden_size=HIDDEN, num_heads=2, decay="head", gain=gain, output_gate="silu")
    layer = build_mixer(
        "palimpsa-d", hidden_size=HIDDEN, num_heads=2, gain=gain, residual=False, b_scale=-800.0
    ).double()
    loaded = layer.load_state_dict(linear.double().state_dict(), strict=False)
    assert not loaded.unexpected_keys and all(key.startswith("importance.") for key in loaded.missing_keys)
    x = torch.randn(2, 21, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), linear(x), rtol=1e-12, atol=1e-14)
    torch.nn.init.zeros_(layer.importance.b_scale)
    assert (layer(x) - linear(x)).abs().max() > 1e-3


def test_parameters_without_metaplasticity():
    plain = build_mixer("palimpsa-d", hidden_size=HIDDEN, num_heads=2, metaplasticity=False)
    full = build_mixer("palimpsa-d", hidden_size=HIDDEN, num_heads=2)
    more = set(dict(full.named_parameters())) - set(dict(plain.named_parameters()))
    assert more == {"importance.b_scale", "importance.beta_proj.0.weight", "importance.beta_proj.1.weight"}
    assert full.importance.beta_proj[0].weight.shape == (HIDDEN // 16, HIDDEN)
    assert torch.equal(full.importance.b_scale, torch.ones(2)) and torch.equal(full.skip.D, torch.zeros(2))
    assert plain.state_size() * 2 == full.state_size()


def test_long_memory():
    layer = build_mixer("palimpsa-d", hidden_size=HIDDEN, num_heads=4, long_memory=True)
    torch.testing.assert_close(layer.decay.A_log.exp(), torch.tensor([0.01, 0.06, 0.11, 0.16]))
    step = torch.nn.functional.softplus(layer.decay.dt_bias)
    torch.testing.assert_close(step, torch.logspace(-3, -1, 4))


@pytest.mark.parametrize("name", ["palimpsa-d", "palimpsa-m"])
def test_each_head_draws_its_scale_from_an_interval(name):
    torch.manual_seed(0)
    layer = build_mixer(name, hidden_size=64, num_heads=32, b_scale=[0.1, 1.0])
    scales = layer.importance.b_scale
    assert len(scales.unique()) == 32 and 0.1 <= scales.min() < 0.25 and 0.85 < scales.max() <= 1
    assert abs(scales.mean() - 0.55) < 0.15 and layer.options.b_scale == (0.1, 1.0)


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"b_scale": [1.0, 0.1]}, r"b_scale must be a number or \[low, high\] with low below high, got"),
        (ValueError, {"b_scale": [1.0]}, r"b_scale must be a number or \[low, high\]"),
        (TypeError, {"b_scale": [0.1, "1"]}, "b_scale must be a number"),
        (ValueError, {"prior": 0}, "prior must be positive, got 0"),
        (TypeError, {"b_scale": "1"}, "b_scale must be a number"),
        (TypeError, {"metaplasticity": 1}, "metaplasticity must be True or False"),
        (TypeError, {"residual": None}, "residual must be True or False"),
        (ValueError, {"long_memory": "yes"}, "long_memory must be one of None, 'paper', 'release'"),
        (ValueError, {"beta_init": "zero"}, "beta_init must be one of 'normal', 'uniform'"),
        (ValueError, {"gain": "dt"}, "gain must be one of None, 'beta'"),
    ],
)
def test_bad_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        build_mixer("palimpsa-d", hidden_size=16, num_heads=4, **options)


def test_skip_is_added_in_the_pass_of_the_norm(monkeypatch):
    """Where there is no norm, or a hook, in a pass of its own."""
    passes = []
    monkeypatch.setattr("fastweights.layers.projections.ValueSkip.forward", lambda _, o, v: passes.append(1) or o)
    x = torch.randn(1, 3, HIDDEN)
    layer = build_mixer("palimpsa-d", hidden_size=HIDDEN, num_heads=2)
    assert layer(x).isfinite().all() and not passes
    layer.skip.register_forward_pre_hook(lambda *given: None)
    layer(x)
    assert len(passes) == 1
    build_mixer("palimpsa-d", hidden_size=HIDDEN, num_heads=2, output_norm=False)(x)
    assert len(passes) == 2


@pytest.mark.parametrize("name, plain", [("palimpsa-d", {}), ("palimpsa-m", {"output_gate": "silu"})])
def test_no_head_and_every_head_above_the_threshold(name, plain):
    """Below it a head is exactly gated linear attention; far above it keeps all its importance."""
    layers = []
    for options in ({}, {"metaplasticity": False}, {"metaplastic_threshold": -60.0}, {"metaplastic_threshold": 14.0}):
        torch.manual_seed(0)
        layers.append(build_mixer(name, hidden_size=HIDDEN, num_heads=2, **plain, **options).double())
    whole, without, low, high = layers
    missing = without.load_state_dict(whole.state_dict(), strict=False).missing_keys
    assert not missing and not low.load_state_dict(whole.state_dict(), strict=False).unexpected_keys
    high.load_state_dict(whole.state_dict(), strict=False)
    x = torch.randn(2, 21, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(low(x), whole(x), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(high(x), without(x), rtol=1e-12, atol=1e-14)
        assert (whole(x) - without(x)).abs().max() > 1e-4
    assert low.state_size() == whole.state_size() + 2 * 2


@pytest.mark.parametrize(
    "options, message",
    [
        (
            {"metaplasticity": False, "metaplastic_threshold": 1.0},
            "metaplasticity must be True with metaplastic_threshold",
        ),
        ({"metaplasticity": False, "variance_gate": True}, "metaplasticity must be True with .*variance_gate"),
        ({"output_gate": None, "variance_gate": True}, "output_gate must not be None with variance_gate"),
    ],
)
@pytest.mark.parametrize("name", ["palimpsa-d", "palimpsa-m"])
def test_options_that_need_importances_or_a_gate(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(name, hidden_size=HIDDEN, num_heads=2, **options)
