"""Palimpsa-M against a loop over its recurrences, and Mamba-2 against transformers' own mixer."""

import pytest
import torch
from transformers import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from fastweights.layers import LayerCache, build_mixer

from .by_hand import filtered, metaplastic_share, shift_of_variance, silu
from .variants import HIDDEN, VARIANTS, build


def expected(layer, x, options):
    sizes = layer.heads
    G, H, K, V = sizes.value_heads, sizes.key_heads, sizes.key, sizes.value
    y = layer.in_proj(x)
    gated = options.get("output_gate", "silu") is not None
    z, y = (y[:, : G * V], y[:, G * V :]) if gated else (None, y)
    vkq, step = y[:, :-G], y[:, -G:]
    vkq = filtered(vkq, layer.conv)
    vkq = silu(vkq if layer.conv.bias is None else vkq + layer.conv.bias)
    v = vkq[:, : G * V].reshape(-1, G, V)
    k = vkq[:, G * V : G * V + H * K].reshape(-1, H, K).repeat_interleave(G // H, 1)
    q = vkq[:, G * V + H * K :].reshape(-1, H, K).repeat_interleave(G // H, 1)
    dt = torch.log(1 + torch.exp(step + layer.decay.dt_bias))
    dt = dt.clamp(options.get("dt_min", 0.0), options.get("dt_max"))
    beta = torch.zeros_like(v)
    if layer.importance is not None:
        first, second = layer.importance.beta_proj
        share = torch.sigmoid(x @ first.weight.T @ second.weight.T).reshape(v.shape)
        beta = share * torch.log(1 + layer.importance.b_scale.exp())[:, None] * dt[..., None]
        beta = beta * metaplastic_share(layer, torch.exp(-layer.decay.A_log.exp() * dt))[..., None]
    o = torch.zeros_like(v)
    for h in range(G):
        M = J = x.new_zeros(K, V)
        for t in range(len(x)):
            a = torch.exp(-layer.decay.A_log[h].exp() * dt[t, h])
            M = a * M + torch.outer(k[t, h], dt[t, h] * v[t, h])
            J = a * J + torch.outer(k[t, h] ** 2, beta[t, h])
            o[t, h] = q[t, h] @ (M / (J + options.get("prior", 1.0)))
            if layer.variance is not None:
                z[t, h * V : (h + 1) * V] += layer.variance.c[h] * shift_of_variance(
                    layer, q[t, h], J, options["prior"]
                )
    if options.get("residual", True):
        o = o + layer.skip.D[:, None] * v
    o = o.flatten(1) if z is None else o.flatten(1) * silu(z)
    groups = o.unflatten(1, (options.get("norm_groups", 1), -1))
    o = (groups / (groups.square().mean(-1, keepdim=True) + 1e-6).sqrt()).flatten(1) * layer.norm.weight
    return layer.out_proj(o)


@pytest.mark.parametrize(
    "variant", [name for name, (mixer, _) in VARIANTS.items() if mixer in ("mamba2", "palimpsa-m")]
)
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    with torch.no_grad():
        for parameter in layer.parameters():  # tells heads and biases apart
            if parameter.ndim == 1:
                parameter += torch.rand_like(parameter)
        x = torch.randn(1, 11, HIDDEN, dtype=torch.float64)
        wanted = expected(layer, x[0], VARIANTS[variant][1])
        torch.testing.assert_close(layer(x)[0], wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "groups, bias, conv_bias, limits, width",
    [
        (1, False, True, (0.0, float("inf")), 4),
        (2, True, False, (0.01, 0.05), 3),
        (4, True, True, (0.0, 0.05), 1),
    ],
)
def test_mamba2_is_that_of_transformers(groups, bias, conv_bias, limits, width):
    torch.manual_seed(0)
    config = Mamba2Config(
        hidden_size=24, num_heads=4, head_dim=12, state_size=10, n_groups=groups, use_bias=bias, conv_kernel=width,
        use_conv_bias=conv_bias, time_step_limit=limits, num_hidden_layers=1, chunk_size=8, layer_norm_epsilon=1e-5,
    )  # fmt: skip
    theirs = Mamba2Mixer(config, 0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    channels = theirs.intermediate_size
    ours = build_mixer(
        "mamba2", hidden_size=24, num_heads=4, head_dim=10, expand_v=12 / 10, num_groups=groups, bias=bias,
        conv_bias=conv_bias, conv_size=width, dt_min=limits[0], dt_max=None if limits[1] == float("inf") else limits[1],
        norm_groups=channels // getattr(theirs.norm, "group_size", channels), norm_eps=1e-5,
    )  # fmt: skip
    weights = {name.replace("conv1d", "conv"): tensor for name, tensor in theirs.state_dict().items()}
    weights["conv.weight"] = weights["conv.weight"].squeeze(1)
    for name in ("A_log", "dt_bias"):
        weights[f"decay.{name}"] = weights.pop(name)
    weights["skip.D"] = weights.pop("D")
    ours.load_state_dict(weights)
    x = torch.randn(2, 37, 24)
    with torch.no_grad():
        wanted, cache = theirs(x), LayerCache()
        torch.testing.assert_close(ours(x), wanted, rtol=1e-4, atol=2e-5)
        blocks = [ours(block, cache) for block in x.split([9, 1, 1, 26], 1)]
        torch.testing.assert_close(torch.cat(blocks, 1), wanted, rtol=1e-4, atol=2e-5)


def test_without_importance_it_is_mamba2():
    """The same names: a trained Mamba-2 loads and continues as Palimpsa."""
    torch.manual_seed(0)
    mamba = build_mixer("mamba2", hidden_size=HIDDEN, num_heads=2, prior=0.5).double()
    layer = build_mixer("palimpsa-m", hidden_size=HIDDEN, num_heads=2, prior=0.5, b_scale=-800.0).double()
    loaded = layer.load_state_dict(mamba.state_dict(), strict=False)
    assert not loaded.unexpected_keys and all(key.startswith("importance.") for key in loaded.missing_keys)
    assert not any(name.startswith("importance") for name, _ in mamba.named_parameters())
    x = torch.randn(2, 21, HIDDEN, dtype=torch.float64)
    torch.testing.assert_close(layer(x), mamba(x), rtol=1e-12, atol=1e-14)
    torch.nn.init.constant_(layer.importance.b_scale, 100.0)
    assert (layer(x) - mamba(x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"num_groups": 3}, "num_groups must divide num_heads, 4, got 3"),
        (ValueError, {"norm_groups": 3}, "norm_groups must divide the 16 channels of all heads, got 3"),
        (ValueError, {"dt_min": -1.0}, "dt_min must be at least 0, got -1.0"),
        (ValueError, {"dt_min": 0.1, "dt_max": 0.1}, "dt_max must be above dt_min, 0.1, got 0.1"),
        (TypeError, {"conv_size": None}, "conv_size must be a positive whole number"),
        (TypeError, {"conv_bias": 1}, "conv_bias must be True or False"),
        (TypeError, {"bias": 0}, "bias must be True or False"),
        (ValueError, {"prior": -1.0}, "prior must be positive"),
        (ValueError, {"output_gate": "tanh"}, "output_gate must be one of None, 'silu'"),
        (ValueError, {"num_heads": 0}, "num_heads must be a positive whole number"),
    ],
)
def test_bad_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        build_mixer("palimpsa-m", **{"hidden_size": 16, "num_heads": 4, **options})
