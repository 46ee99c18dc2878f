"""The memory layers against a plain loop over tokens, written from the papers' formulas with the layers' own weights."""

import pytest
import torch

import fastweights.layers.delta_net as module
from fastweights.layers import MIXERS, LinearAttention

from .by_hand import answer, head_decay, projected, unit
from .variants import HIDDEN, VARIANTS, build

LAYERS = (module.DeltaNet, LinearAttention)
MEMORY_VARIANTS = [variant for variant, (name, _) in VARIANTS.items() if MIXERS[name].layer in LAYERS]


def log_decay(layer, x):
    """g [T, heads, 1 or K]"""
    heads = layer.heads
    if layer.decay is None:
        return x.new_zeros(len(x), heads.value_heads, 1)
    kind = type(layer.decay).__name__
    if kind == "HeadDecay":
        return head_decay(layer.decay, x)[..., None]
    if kind == "KimiDecay":
        first, second = layer.decay.f_proj
        step = torch.log(1 + torch.exp(x @ first.weight.T @ second.weight.T + layer.decay.dt_bias))
        return -layer.decay.A_log.exp()[:, None] * step.reshape(len(x), heads.value_heads, heads.key)
    first, second = layer.decay.gk_proj
    gate = torch.sigmoid(x @ first.weight.T @ second.weight.T + second.bias)
    return (gate.log() / 16).reshape(len(x), heads.value_heads, heads.key)


def expected(layer, x, options):
    """What the layer must answer to x [T, D]."""
    heads, repeat = layer.heads, layer.heads.value_heads // layer.heads.key_heads
    q, k, v = projected(layer, x)
    if options.get("feature_map") == "elu":
        q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    if layer.options.normalize_qk:
        q, k = unit(q), unit(k)
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    g = log_decay(layer, x)
    beta = torch.sigmoid(x @ layer.gain.b_proj.weight.T) if layer.gain is not None else torch.ones_like(v[..., 0])
    if options.get("negative_eigenvalues"):
        beta = 2 * beta
    gates = None
    if layer.preconditioner is not None:
        gates = getattr(layer.preconditioner, "gates", layer.preconditioner)
        tied = options.get("tie_preconditioner", False)
        precond_g = g[..., 0] if tied else head_decay(gates.decay, x)
        precond_beta = beta if tied else torch.sigmoid(x @ gates.gain.b_proj.weight.T)
    o = torch.zeros_like(v)
    for h in range(heads.value_heads):
        S, A, z = x.new_zeros(heads.key, heads.value), x.new_zeros(heads.key), x.new_zeros(heads.key)
        for t in range(len(x)):
            kt, qt, vt, bt = k[t, h], q[t, h], v[t, h], beta[t, h]
            S, wt = S * g[t, h].exp()[:, None], kt
            if gates is not None:
                A = precond_g[t, h].exp() * A + precond_beta[t, h] * kt**2
            if type(layer).__name__ == "LinearAttention":
                S = S + bt * torch.outer(kt, vt)
                qt = qt if gates is None else qt / (A + options.get("ridge", 0.1))
            else:
                if gates is not None:
                    r = (A + 1e-6).log() - layer.preconditioner.center[h]
                    power = -r / (1 + r.abs())  # from -1 to 1
                    power = {"symmetric": power, "amplify": (power + 1) / 2, "dampen": (power - 1) / 2}[
                        options.get("interval", "symmetric")
                    ]
                    wt = options.get("bound", 1.5) ** power * kt
                m = kt @ wt
                bt = {
                    "beta": bt,
                    "longhorn": bt / (1 + bt * m),
                    "fading": bt / (g[t, h, 0].exp() + bt * m),
                    "unit": bt / m,
                    "damped": bt / (1 + m),
                }[layer.options.gain]
                S = S + bt * torch.outer(wt, vt - kt @ S)
            o[t, h] = qt @ S / heads.key**0.5
            if options.get("normalizer"):
                z = g[t, h].exp() * z + bt * kt
                o[t, h] = qt @ S / (z @ qt).clamp_min(1e-4)
    return answer(layer.output, o, x)


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    x = torch.randn(1, 11, HIDDEN, dtype=torch.float64)
    if layer.preconditioner is not None and hasattr(layer.preconditioner, "center"):
        torch.nn.init.uniform_(layer.preconditioner.center, -2, 0)  # tells heads apart
    with torch.no_grad():
        if layer.output.norm is not None:
            layer.output.norm.weight.uniform_(0.5, 2)
        name, given = VARIANTS[variant]
        options = {**MIXERS[name].options, **given}
        torch.testing.assert_close(layer(x)[0], expected(layer, x[0], options), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backend_is_passed_on(backend, monkeypatch):
    seen = []
    original = module.delta_rule

    def spy(*args, **options):
        seen.append(options["backend"])
        return original(*args, **options)

    monkeypatch.setattr(module, "delta_rule", spy)
    layer = module.DeltaNet(hidden_size=8, num_heads=1, backend=backend)
    layer(torch.randn(1, 3, 8))
    assert seen == [backend]
