"""Gated KalmaNet against a loop that solves every regression with a matrix solver."""

import dataclasses

import pytest
import torch

from fastweights.layers import MIXERS, LayerCache, build_mixer
from fastweights.models import PRESETS, preset
from fastweights.ops.shared.ridge import WIDEST

from .by_hand import answer, decay, gate, heads, unit
from .five_layers import differences
from .variants import HIDDEN, VARIANTS, build


def expected(layer, x, options):
    q, k, v = heads(layer, x)
    q, k = unit(q) / layer.heads.key**0.5, unit(k)
    a = decay(layer, x)
    beta = torch.as_tensor(gate(layer.gain, x)).expand(a.shape)[..., None]
    mix = torch.as_tensor(gate(layer.mix, x)).expand(a.shape)
    k, v = k * beta, v * beta
    ridge = options.get("ridge", 0.02)
    o = torch.zeros_like(v)
    for h in range(v.shape[1]):
        basis = torch.eye(k.shape[2], dtype=x.dtype)
        if layer.sketch is not None:
            basis = layer.sketch.basis[h // (v.shape[1] // layer.heads.key_heads)]
        H, U = x.new_zeros(k.shape[2], k.shape[2]), x.new_zeros(k.shape[2], v.shape[2])
        for t in range(len(x)):
            H = a[t, h] * H + torch.outer(k[t, h], k[t, h])
            U = a[t, h] * U + torch.outer(k[t, h], v[t, h])
            system = basis.T @ H @ basis
            size = ridge * system.norm() if options.get("adaptive_ridge", True) else ridge
            solution = torch.linalg.solve(system + size * torch.eye(len(system), dtype=x.dtype), basis.T @ q[t, h])
            o[t, h] = (mix[t, h] * (basis @ solution) + (1 - mix[t, h]) * q[t, h]) @ U
    return answer(layer.output, o, x)


@pytest.mark.parametrize("variant", [name for name, (mixer, _) in VARIANTS.items() if mixer == "gka"])
def test_layer_computes_its_formula(variant):
    torch.manual_seed(0)
    layer = build(variant).double()
    options = VARIANTS[variant][1]
    slow = options.get("solver") == "gradient_descent"
    layer.options = dataclasses.replace(layer.options, iterations=2500 if slow else 150)  # converged
    with torch.no_grad():
        for gate in (layer.gain, layer.mix):
            if gate is not None and gate.b_proj.bias is not None:
                gate.b_proj.bias.uniform_(-1, 1)
        x = torch.randn(1, 15, HIDDEN, dtype=torch.float64)
        torch.testing.assert_close(layer(x)[0], expected(layer, x[0], options), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("options", [{}, {"adaptive_ridge": False, "solver": "conjugate_gradient"}], ids=str)
def test_a_sketch_of_all_dimensions_changes_nothing(options):
    torch.manual_seed(0)
    layer = build_mixer("gka", hidden_size=16, num_heads=2, sketch=8, iterations=100, **options).double()
    layer.sketch.basis.data = torch.linalg.qr(layer.sketch.basis.data)[0]  # float32 was not quite orthonormal
    whole = build_mixer("gka", hidden_size=16, num_heads=2, iterations=100, **options).double()
    whole.load_state_dict({name: x for name, x in layer.state_dict().items() if name != "sketch.basis"})
    x = torch.randn(1, 20, 16, dtype=torch.float64)
    torch.testing.assert_close(layer(x), whole(x), rtol=1e-8, atol=1e-10)


def test_the_sketch_begins_orthonormal_and_shrinks_the_state():
    layer = build_mixer("gka", hidden_size=16, num_heads=2, sketch=3)
    torch.testing.assert_close(layer.sketch.basis.mT @ layer.sketch.basis, torch.eye(3).expand(2, 3, 3))
    assert layer.state_size() == 2 * (3 * 3 + 8 * 8)
    alone = build_mixer("gka", hidden_size=16, num_heads=2, sketch=3, alpha_connection=False)
    assert alone.state_size() == 2 * (3 * 3 + 3 * 8)
    cache = LayerCache()
    alone(torch.randn(1, 4, 16), cache)
    assert cache.memory["H"].shape == (1, 2, 3, 3) and cache.memory["U"].shape == (1, 2, 3, 8)


def test_a_random_sketch_is_drawn_once_and_stays():
    torch.manual_seed(0)
    layer = build_mixer("gka", hidden_size=16, num_heads=2, sketch=3, sketch_basis="random").double()
    before = layer.sketch.basis.clone()
    torch.testing.assert_close(before.mT @ before, torch.eye(3).double().expand(2, 3, 3), rtol=1e-5, atol=1e-5)
    layer.requires_grad_()  # what a caller who unfreezes everything does
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0, weight_decay=0.1)
    layer(torch.randn(1, 5, 16, dtype=torch.float64)).sum().backward()
    optimizer.step()
    assert torch.equal(layer.sketch.basis, before) and "sketch.basis" in layer.state_dict()
    learned = build_mixer("gka", hidden_size=16, num_heads=2, sketch=3).double()
    learned.load_state_dict(layer.state_dict())
    x = torch.randn(1, 7, 16, dtype=torch.float64)
    torch.testing.assert_close(learned(x), layer(x))


def test_released_gates_have_biases_that_begin_at_zero():
    plain, released = (build_mixer("gka", hidden_size=16, num_heads=2, gate_bias=bias) for bias in (False, True))
    more = dict(released.named_parameters()).keys() - dict(plain.named_parameters()).keys()
    assert more == {"gain.b_proj.bias", "mix.b_proj.bias"}
    assert not released.gain.b_proj.bias.any() and not released.mix.b_proj.bias.any()


def test_names_of_gated_deltanet():
    """The same names: a trained Gated DeltaNet loads and continues."""
    gdn = build_mixer("gdn", hidden_size=16, num_heads=2, output_gate="silu")
    loaded = build_mixer("gka", hidden_size=16, num_heads=2).load_state_dict(gdn.state_dict(), strict=False)
    assert not loaded.unexpected_keys and loaded.missing_keys == ["mix.b_proj.weight"]


@pytest.mark.parametrize(
    "error, options, message",
    [
        (
            ValueError,
            {"solver": "jacobi"},
            "solver must be one of 'chebyshev', 'conjugate_gradient', 'exact', 'gradient_descent', .* got 'jacobi'",
        ),
        (ValueError, {"sketch": 5}, "sketch must be at most head_dim, 4, got 5"),
        (ValueError, {"sketch_basis": "fixed"}, "sketch_basis must be one of 'learned', 'random', got 'fixed'"),
        (TypeError, {"gate_bias": 1}, "gate_bias must be True or False"),
        (ValueError, {"sketch": 0}, "sketch must be a positive whole number, got 0"),
        (ValueError, {"ridge": 0}, "ridge must be positive"),
        (ValueError, {"iterations": 0}, "iterations must be a positive whole number"),
        (ValueError, {"decay": "channel"}, "decay must be one of 'none', 'head'"),
        (TypeError, {"alpha_connection": 1}, "alpha_connection must be True or False"),
    ],
)
def test_bad_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        build_mixer("gka", hidden_size=16, num_heads=4, **options)


def test_the_iteration_is_stable_through_five_layers():
    """The paper's figure 1e: its error in the gradients does not grow from the last layer to the first."""
    found = differences("cpu", None, head_dim=8, batch=1, length=64)
    assert max(found) <= 2e-3 and max(found) <= 3 * found[-1], found


def layers_of_presets(mixer):
    """Hidden size, heads and options of the mixer's layers in all presets, each once."""
    found = []
    for config in map(preset, PRESETS):
        for name, options in config.mixers():
            layer = {"hidden_size": config.hidden_size, "num_heads": config.num_heads, **options}
            if name == mixer and layer not in found:
                found.append(layer)
    return found


@pytest.mark.parametrize("mixer", ["gka", "mesa"])
def test_layers_of_presets_run_by_kernels(mixer, monkeypatch):
    """Under autocast the op gets what its kernels take: 16-bit inputs and few enough channels, by default."""
    given = []

    def called(q, k, v, *others, backend, **options):
        given.append((q, k, v, backend, options.get("solver", "chebyshev")))
        return v, (None, None)

    called.spec = MIXERS[mixer].layer.op.spec
    monkeypatch.setattr(MIXERS[mixer].layer, "op", staticmethod(called))
    layers = layers_of_presets(mixer)
    for layer in layers:
        built = build_mixer(mixer, **layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            built(torch.randn(1, 3, layer["hidden_size"]))
    assert len(given) == len(layers) >= 2
    for q, k, v, backend, solver in given:
        assert {x.dtype for x in (q, k, v)} == {torch.bfloat16} and max(x.shape[3] for x in (q, k, v)) <= WIDEST
        assert backend == "auto" and solver == "chebyshev"
