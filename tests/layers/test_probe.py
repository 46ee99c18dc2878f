"""Probes: what the layers show of their inside, and that nothing else changes."""

from functools import wraps

import pytest
import torch

from fastweights.layers import MIXERS, LayerCache, SoftmaxAttention, build_mixer, probe
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from tests.fast_set import fast_where

from .variants import HIDDEN, OPTIONS, VARIANTS, build

EXACT = {"rtol": 1e-9, "atol": 1e-11}
STATES = [name for name, (mixer, _) in VARIANTS.items() if MIXERS[mixer].layer is not SoftmaxAttention]


def made(variant):
    torch.manual_seed(0)
    return build(variant).double(), torch.randn(2, 13, HIDDEN, dtype=torch.float64)


def model(mixers):
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=11, hidden_size=8, num_heads=2, intermediate_size=0, num_hidden_layers=len(mixers), mixer=mixers
    )
    return FastWeightsForCausalLM(config).eval(), torch.arange(20).view(2, 10) % 11


@fast_where(lambda given: given["variant"] not in OPTIONS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_name_of_a_layer_is_seen_and_the_output_stays(variant):
    layer, x = made(variant)
    wanted = layer(x)
    names = [name for name in layer.probe_names() if name != "state"]
    with probe(layer, *names) as seen:
        assert torch.equal(layer(x), wanted)
    assert set(seen) == set(names) and seen.layers == [""]
    for name, values in seen.items():
        assert list(values) == [0], name
        assert values[0].isfinite().all() and not values[0].requires_grad, name
        if name != "ridge":
            assert values[0].shape[:2] == x.shape[:2], name
    recorded = []
    layer._listener = recorded.append
    layer(x)
    shown = {name for internals in recorded for name, value in internals.items() if value is not None}
    assert shown - {"output_gate"} == set(names) - {"output_gate"}


@pytest.mark.parametrize("variant", [pytest.param(x, marks=pytest.mark.slow if x in OPTIONS else ()) for x in STATES])
def test_states_are_those_of_a_cached_reading(variant):
    layer, x = made(variant)
    with torch.no_grad(), probe(layer, "state", every=4) as seen:
        layer(x)
    assert seen.ends == [4, 8, 12, 13]
    cache = LayerCache()
    with torch.no_grad():
        for place, block in enumerate(x.split(4, 1)):
            layer(block, cache)
            assert set(seen["state"][0]) == set(cache.memory)
            for name, tensor in cache.memory.items():
                assert torch.equal(seen["state"][0][name][:, place], tensor), name


def test_the_write_follows_the_delta_rule():
    """S_t from S_(t-1) and what is seen: decays, gains, keys, write keys and states belong together."""
    for variant in ("gdn", "pkda", "pgdn longhorn", "pgdn amplify", "longhorn decay"):
        layer, x = made(variant)
        names = [name for name in ("g", "beta", "write_key", "k", "v", "q", "o") if name in layer.probe_names()]
        with torch.no_grad(), probe(layer, *names, "state", every=1) as seen:
            layer(x)
        k, v, q, S = seen["k"][0], seen["v"][0], seen["q"][0], seen["state"][0]["S"]
        k, q = (y.repeat_interleave(v.shape[2] // y.shape[2], 2) for y in (k, q))
        w = seen["write_key"].get(0, k) if "write_key" in seen else k
        w = w.repeat_interleave(v.shape[2] // w.shape[2], 2)
        a = seen["g"][0].exp() if "g" in seen else torch.ones(())
        a = a[..., None] if a.ndim == 3 else a
        before = torch.cat([torch.zeros_like(S[:, :1]), S[:, :-1]], 1) * a[..., None]
        error = v - torch.einsum("btgkv,btgk->btgv", before, k)
        after = before + seen["beta"][0][..., None, None] * w[..., None] * error[..., None, :]
        torch.testing.assert_close(S, after, **EXACT)
        o = torch.einsum("btgkv,btgk->btgv", S, q) / k.shape[-1] ** 0.5
        torch.testing.assert_close(seen["o"][0], o, **EXACT)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "variant", ["rls", "rls decay", "rls grouped", "vla", "vla refresh", "vla long keys", "vla identity"]
)
def test_the_write_follows_the_inverse_gram_matrix(variant, packed):
    """S_t = S_(t-1) + beta w (v - S_(t-1)^T k)^T with the write keys that rls and vla form inside, from a cache on."""
    layer, x = made(variant)
    edges = torch.tensor([0, 5, 13]) if packed else None
    cache = LayerCache()
    names = [name for name in ("beta", "write_key", "k", "v") if name in layer.probe_names()]
    with torch.no_grad():
        layer(x[:, :2], cache)
        before = cache.memory["S"]
        with probe(layer, *names, "state", every=1) as seen:
            layer(x[:1] if packed else x, cache, edges)
    S, k, v, w = seen["state"][0]["S"], seen["k"][0], seen["v"][0], seen["write_key"][0]
    k = k.repeat_interleave(v.shape[2] // k.shape[2], 2)
    if variant.startswith("vla") and layer.options.normalize_keys:
        k = k / k.norm(dim=-1, keepdim=True)
    last = torch.cat([before[:1, None], S[:, :4], before[1:, None], S[:, 5:-1]], 1) if packed else None
    last = torch.cat([before[:, None], S[:, :-1]], 1) if last is None else last
    beta = seen["beta"][0] if "beta" in seen else torch.ones_like(v[..., 0])
    error = v - torch.einsum("btgkv,btgk->btgv", last, k)
    after = last + beta[..., None, None] * w[..., None] * error[..., None, :]
    torch.testing.assert_close(S, after, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("variant", ["pgdn grouped", "gka", "vla", "palimpsa-m", "lattice similarity", "rls"])
def test_states_of_packed_sequences_are_those_of_each_alone(variant):
    layer, x = made(variant)
    edges = [0, 6, 6, 7, 13]
    with torch.no_grad():
        with probe(layer, "state", "v", every=3) as packed:
            layer(x[:1], cu_seqlens=torch.tensor(edges))
        assert packed.ends == [3, 6, 7, 10, 13] and packed["v"][0].shape[:2] == (1, 13)
        place = 0
        for a, b in zip(edges, edges[1:], strict=False):
            if a == b:
                continue
            with probe(layer, "state", every=3) as alone:
                layer(x[:1, a:b])
            count = len(alone.ends)
            for name, states in alone["state"][0].items():
                torch.testing.assert_close(packed["state"][0][name][:, place : place + count], states, **EXACT)
            place += count


def test_states_begin_from_the_cache_and_leave_it_alone():
    layer, x = made("pgdn")
    with torch.no_grad():
        with probe(layer, "state", every=2) as whole:
            layer(x)
        cache = LayerCache()
        layer(x[:, :6], cache)
        with probe(layer, "state", every=2) as rest:
            y = layer(x[:, 6:], cache=cache)
        torch.testing.assert_close(y, layer(x)[:, 6:], **EXACT)
        torch.testing.assert_close(rest["state"][0]["S"], whole["state"][0]["S"][:, 3:], **EXACT)
        torch.testing.assert_close(cache.memory["S"], whole["state"][0]["S"][:, -1], **EXACT)


def test_layers_of_a_model_are_told_apart():
    lm, tokens = model(["gdn", "softmax", "mesa", {"name": "gdn", "output_gate": "silu"}])
    with torch.no_grad(), probe(lm, "beta", "ridge", "output_gate", "state", every=4) as seen:
        lm(tokens)
    assert seen.layers == [f"model.layers.{index}.mixer" for index in range(4)]
    assert sorted(seen["beta"]) == sorted(seen["state"]) == [0, 2, 3]
    assert list(seen["ridge"]) == [2] and list(seen["output_gate"]) == [3]
    assert seen["output_gate"][3].shape == (2, 10, 2, 4) and seen["state"][2]["H"].shape == (2, 3, 2, 4, 4)
    mixer = lm.model.layers[3].mixer
    inputs = []
    mixer.register_forward_hook(lambda module, arguments, y: inputs.append(arguments[0]))
    with torch.no_grad(), probe(lm, "output_gate", "beta") as seen:
        lm(tokens)
    gate = torch.nn.functional.silu(inputs[0] @ mixer.output.g_proj.weight.T).view(2, 10, 2, 4)
    torch.testing.assert_close(seen["output_gate"][3], gate)
    torch.testing.assert_close(seen["beta"][3], mixer.gain(inputs[0]))


def test_gradients_flow_on_request():
    layer, x = made("gdn")
    with probe(layer, "beta", "state", every=5, detach=False) as seen:
        layer(x)
    for value, parameter in (
        (seen["beta"][0], layer.gain.b_proj.weight),
        (seen["state"][0]["S"], layer.qkv.k_proj.weight),
    ):
        (gradient,) = torch.autograd.grad(value.sum(), parameter, retain_graph=True)
        assert gradient.abs().sum() > 0
    with probe(layer, "beta", "state", every=5) as seen:
        layer(x)
    assert not seen["beta"][0].requires_grad and not seen["state"][0]["S"].requires_grad


def test_nothing_is_left_behind():
    layer, x = made("pgdn")
    with pytest.raises(RuntimeError, match="stop"), probe(layer, "beta", "write_key", "state") as seen:
        layer(x)
        raise RuntimeError("stop")
    assert layer._listener is None and "_listener" not in vars(layer) and not layer._forward_pre_hooks
    count = len(seen["beta"][0])
    layer(x[:1])
    assert len(seen["beta"][0]) == count
    with probe(layer, "beta"):
        pass


def test_nobody_listening_costs_no_tensor_work(monkeypatch):
    """Neither the write keys of the fused rule nor the output gate are formed for a probe that nobody opened."""
    import fastweights.layers.preconditioner as module

    calls = []
    original = module.precondition_keys
    counted = wraps(original)(lambda *a, **k: calls.append(1) or original(*a, **k))
    monkeypatch.setattr(module, "precondition_keys", counted)
    layer, x = made("pkda")
    monkeypatch.setattr(layer.output, "gate_values", lambda x: calls.append(2))
    layer(x)
    with probe(layer, "beta"):
        layer(x)
    assert calls == []
    with probe(layer, "write_key", "output_gate"):
        layer(x)
    assert sorted(calls) == [1, 2]


@pytest.mark.slow
def test_a_compiled_layer_has_one_graph_and_can_be_probed():
    torch._dynamo.reset()  # graphs of other layers count towards the limit of recompilations of one `forward`
    torch.manual_seed(0)
    layer, x = build("pgdn"), torch.randn(1, 12, HIDDEN)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    with torch.no_grad():
        wanted = compiled(x)
        assert len(graphs) == 1
        with probe(compiled, "beta", "state", every=6) as seen:
            torch.testing.assert_close(compiled(x), wanted, rtol=1e-4, atol=1e-5)
        assert seen["beta"][0].shape == (1, 12, 2) and seen["state"][0]["S"].shape[1] == 2
        torch.testing.assert_close(compiled(x), wanted, rtol=0, atol=0)
    assert len(graphs) == 1


@pytest.mark.parametrize(
    "names, message",
    [
        (["bata"], r"no layer of the model shows 'bata' \(did you mean 'beta'\?\); they show q, k, v, o, state, beta"),
        (["beta", "g"], "no layer of the model shows 'g'"),
        (["write_key"], "no layer of the model shows 'write_key'"),
        ([], "names must be given; the layers of the model show q, k, v"),
    ],
)
def test_wrong_names_are_refused(names, message):
    lm, _ = model(["deltanet", "deltanet"])
    with pytest.raises(ValueError, match=message), probe(lm, *names):
        pass


def test_what_cannot_be_probed_is_refused():
    with pytest.raises(ValueError, match="must contain a fastweights.layers.Mixer"), probe(torch.nn.Linear(2, 2), "q"):
        pass
    layer = build_mixer("softmax", hidden_size=8, num_heads=2)
    with pytest.raises(ValueError, match="no layer of the model shows 'state'"), probe(layer, "state"):
        pass
    layer, _ = made("gdn")
    with pytest.raises(ValueError, match="every must be a positive whole number, got 0"), probe(layer, "q", every=0):
        pass
    with pytest.raises(ValueError, match="open to another probe"), probe(layer, "q"), probe(layer, "beta"):
        pass
    assert layer._listener is None
