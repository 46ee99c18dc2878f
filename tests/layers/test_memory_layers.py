"""The memory layers against a plain loop over tokens, written from the papers' formulas with the layers' own weights."""

import math

import pytest
import torch

import fastweights.layers.delta_net as module
from fastweights.layers import MIXERS, LinearAttention, build_mixer, probe

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
    if kind == "FixedDecay":
        decays = [1 - 2.0 ** (-5 - head) for head in range(heads.value_heads)]
        return torch.tensor(decays, dtype=x.dtype).log().expand(len(x), -1)[..., None]
    if kind == "HeadDecay":
        return head_decay(layer.decay, x)[..., None]
    if kind == "KimiDecay":
        first, second = layer.decay.f_proj
        step = torch.log(1 + torch.exp(x @ first.weight.T @ second.weight.T + layer.decay.dt_bias))
        return -layer.decay.A_log.exp()[:, None] * step.reshape(len(x), heads.value_heads, heads.key)
    first, second = layer.decay.gk_proj
    gate = torch.sigmoid(x @ first.weight.T @ second.weight.T + second.bias)
    return (gate.log() / 16).reshape(len(x), heads.value_heads, heads.key)


def write_key(layer, head, k, energy, before):
    """w of a token, of its key, its A and the A of the token before."""
    options = layer.options
    if options.squash == "none":
        p = k / (before + options.ridge)
        return p / (1 + k @ p)
    return scaled_key(options, layer.preconditioner.center[head] - (energy + 1e-6).log(), k)


def scaled_key(options, r, k):
    power = torch.tanh(r) if options.squash == "tanh" else r / (1 + r.abs())  # from -1 to 1
    power = {"symmetric": power, "amplify": (power + 1) / 2, "dampen": (power - 1) / 2}[options.interval]
    return options.bound**power * k


def gain(layer, beta, m, a):
    return {
        "beta": beta,
        "longhorn": beta / (1 + beta * m),
        "fading": beta / (a + beta * m),
        "unit": beta / m,
        "damped": beta / (1 + m),
        "exact": (1 - torch.exp(-beta * m)) / m,
        "nlms": 1 / m,
    }[layer.options.gain]


def expected(layer, x):
    """What the layer must answer to x [T, D]."""
    heads, repeat, options = layer.heads, layer.heads.value_heads // layer.heads.key_heads, layer.options
    additive = isinstance(layer, LinearAttention)
    q, k, v = projected(layer, x)
    if getattr(options, "feature_map", None) == "elu":
        q, k = (torch.where(y > 0, y + 1, y.exp()) for y in (q, k))
    if options.normalize_qk:
        q, k = unit(q), unit(k)
    q, k = q.repeat_interleave(repeat, 1), k.repeat_interleave(repeat, 1)
    g = log_decay(layer, x)
    beta = torch.sigmoid(x @ layer.gain.b_proj.weight.T) if layer.gain is not None else torch.ones_like(v[..., 0])
    by_key = options.preconditioner in ("key", "both")
    learns = getattr(options, "learn_write_key", False)
    if getattr(options, "negative_eigenvalues", False):
        grows = (
            (by_key or learns) and options.gain == "beta" and options.squash != "none" and options.interval != "dampen"
        )
        beta = 2 * beta / (options.bound if grows else 1)
    if learns:
        r = (x @ layer.learnt.w_proj.weight.T).unflatten(1, (-1, heads.key)).repeat_interleave(repeat, 1)
    if layer.preconditioner is not None:
        gates = layer.preconditioner.gates if by_key else layer.preconditioner
        tied = options.tie_preconditioner
        precond_g = g[..., 0] if tied else head_decay(gates.decay, x)
        precond_beta = beta if tied else torch.sigmoid(x @ gates.gain.b_proj.weight.T)
    o = torch.zeros_like(v)
    for h in range(heads.value_heads):
        S, A, z = x.new_zeros(heads.key, heads.value), x.new_zeros(heads.key), x.new_zeros(heads.key)
        for t in range(len(x)):
            kt, qt, vt, a = k[t, h], q[t, h], v[t, h], g[t, h].exp()[:, None]
            wt = scaled_key(options, r[t, h], kt) if learns else kt
            if not additive and options.output_correction is not None:
                qt = qt - layer.feedback.correction[h // repeat] * kt
            if layer.preconditioner is not None:
                before, A = A, precond_g[t, h].exp() * A + precond_beta[t, h] * kt**2
                if by_key:
                    wt = write_key(layer, h, kt, A, before)
                if options.preconditioner != "key":
                    qt = qt / (A + options.ridge)
            if additive:
                S = a * S + beta[t, h] * torch.outer(wt, vt)
            elif options.state_feedback:
                share = torch.sigmoid(layer.feedback.share[h])
                S = a * S + beta[t, h] * torch.outer(kt, vt - share * (kt @ S))
            else:
                S = a * S + gain(layer, beta[t, h], kt @ wt, g[t, h, 0].exp()) * torch.outer(wt, vt - kt @ (a * S))
            o[t, h] = qt @ S / heads.key**0.5
            if getattr(options, "normalizer", False):
                z = g[t, h].exp() * z + beta[t, h] * kt
                o[t, h] = qt @ S / (z @ qt).clamp_min(1e-4)
    if layer.skip is not None:
        o = o + layer.skip.D[:, None] * v
    return answer(layer.output, o, x)


@pytest.mark.parametrize("variant", MEMORY_VARIANTS)
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    x = torch.randn(1, 11, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.rpartition(".")[2] in ("center", "share", "correction"):
                parameter.add_(2 * torch.rand_like(parameter) - 1)  # tells heads apart
        if layer.output.norm is not None:
            layer.output.norm.weight.uniform_(0.5, 2)
        if layer.skip is not None:
            layer.skip.D.uniform_(0.5, 2)
        torch.testing.assert_close(layer(x)[0], expected(layer, x[0]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_backend_is_passed_on(backend, monkeypatch):
    seen = []
    original = module.delta_rule

    def spy(*args, **options):
        seen.append(options["backend"])
        return original(*args, **options)

    spy.spec = original.spec
    monkeypatch.setattr(module, "delta_rule", spy)
    layer = module.DeltaNet(hidden_size=8, num_heads=1, backend=backend)
    layer(torch.randn(1, 3, 8))
    assert seen == [backend]


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("pdn", {"squash": "relu"}, "squash must be one of 'softsign', 'tanh', 'none', got 'relu'"),
        ("pdn", {"squash": "none", "interval": "amplify"}, "interval must be 'symmetric' with squash 'none'"),
        ("pdn", {"ridge": 0}, "ridge must be positive, got 0"),
        ("pdn", {"bound": 2.5}, "bound must be in \\[1, 2\\]"),
        ("pmamba2-key", {"decay": "channel", "tie_preconditioner": True}, "tie_preconditioner must be False"),
        ("retnet", {"long_memory": "paper"}, "long_memory must be None with decay 'fixed'"),
        ("nlms", {"negative_eigenvalues": True}, "gain must not be 'nlms' with negative_eigenvalues"),
        ("comba", {"decay": "channel"}, "state_feedback must be False with decay 'channel'"),
        ("comba", {"preconditioner": "key"}, "state_feedback must be False"),
        ("comba", {"gain": "longhorn"}, "state_feedback must be False"),
        ("pgdn", {"learn_write_key": True}, "learn_write_key must be False with preconditioner 'key' or 'both'"),
        ("comba", {"learn_write_key": True}, "learn_write_key must be False with .*state_feedback"),
        ("gdn", {"learn_write_key": True, "squash": "none"}, "learn_write_key must be False with .*squash 'none'"),
    ],
)
def test_options_that_do_not_fit_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_mixer(name, hidden_size=8, num_heads=2, **options)


def test_the_unstable_preconditioner_may_have_negative_eigenvalues():
    """Its k . w is below 1, so that beta k . w stays below 2."""
    layer = build_mixer("pgdn", hidden_size=8, num_heads=2, squash="none", negative_eigenvalues=True)
    assert layer.gain.largest == 2.0 and "center" not in dict(layer.preconditioner.named_parameters())


@pytest.mark.parametrize("rate", [1.0, 30.0])
def test_comba_reads_the_memory_before_it_decays(rate):
    """A decay below exp(-10) counts as exp(-10): the answer stays finite and is Comba's with that decay."""
    torch.manual_seed(0)
    layer = build_mixer("comba", hidden_size=8, num_heads=1, output_correction=None).double()
    torch.nn.init.constant_(layer.decay.A_log, math.log(rate))
    torch.nn.init.constant_(layer.decay.dt_bias, 1.0)
    x = torch.randn(1, 9, 8, dtype=torch.float64)
    with torch.no_grad(), probe(layer, "k", "v", "g", "beta", "state", every=1) as seen:
        layer(x)
    g = seen["g"][0][0, :, 0]
    assert (g.min() < -10) == (rate == 30.0)
    S, share = x.new_zeros(8, 8), torch.sigmoid(torch.ones(()).double())
    for t in range(9):
        k, v, beta = seen["k"][0][0, t, 0], seen["v"][0][0, t, 0], seen["beta"][0][0, t, 0]
        S = g[t].clamp_min(-10).exp() * S + beta * torch.outer(k, v - share * (k @ S))
        torch.testing.assert_close(seen["state"][0]["S"][0, t, 0], S)


@pytest.mark.parametrize("size", [1e-6, 1.0, 30.0])
def test_gains_of_keys_of_any_length(size):
    """EFLA's and NLMS's steps beta' |k|^2 stay in [0, 1]; both gains are finite at a key of zeros."""
    k = torch.full((1, 1, 1, 4), size / 2)
    for name, wanted in (("efla", 1 - math.exp(-0.5 * size**2)), ("nlms", 1.0)):
        layer = build_mixer(name, hidden_size=4, num_heads=1)
        step = layer._compute_write_gain(torch.full((1, 1, 1), 0.5), k, k, None) * size**2
        assert step.item() == pytest.approx(wanted if size > 1e-3 else step.item(), rel=1e-5) and 0 <= step.item() <= 1
        assert layer._compute_write_gain(torch.full((1, 1, 1), 0.5), 0 * k, 0 * k, None).isfinite().all()


@pytest.mark.parametrize("name", ["linear", "gdn", "mesa", "rls", "lattice"])
def test_a_skip_connection_adds_d_times_the_value_before_the_norm(name):
    torch.manual_seed(0)
    bare, layer = (build_mixer(name, hidden_size=16, num_heads=2, skip_init=first) for first in (None, 0.7))
    layer.load_state_dict({**bare.state_dict(), "skip.D": torch.tensor([0.7, -0.3])})
    x = torch.randn(1, 5, 16)
    with probe(bare, "o") as seen:
        bare(x)
    _, _, v, _ = bare.qkv(x, None, None)
    o = seen["o"][0] + torch.tensor([0.7, -0.3])[:, None] * v
    torch.testing.assert_close(layer(x), bare.output(o, x))
