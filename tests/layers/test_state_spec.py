"""What a layer keeps per sequence, without reading anything, and the states before the first token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fastweights.layers import MIXERS, LayerCache, Mixer, build_mixer
from fastweights.layers.mixer import token_of

MEMORIES = [name for name in MIXERS if name not in ("softmax", "vla-softmax")]


def described(cache: LayerCache) -> list[dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    return [{name: (tuple(x.shape[1:]), x.dtype) for name, x in held.items()} for held in (cache.memory, cache.context)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MEMORIES)
def test_state_spec_is_what_a_cache_holds(name, dtype):
    layer = build_mixer(name, hidden_size=32, num_heads=2).to(dtype).eval()
    cache = LayerCache()
    with torch.no_grad():
        layer(torch.randn(1, 3, 32, dtype=dtype), cache)
    spec = layer.state_spec()
    assert described(spec) == described(cache)
    assert all(x.is_meta for x in [*spec.memory.values(), *spec.context.values()])
    assert described(build_mixer(name, hidden_size=32, num_heads=2).state_spec(dtype)) == described(cache)
    assert all(not x.is_meta for x in layer.parameters())


@pytest.mark.parametrize("name", [*MEMORIES, "softmax"])
def test_sequences_begin_from_the_initial_state(name):
    layer, x_BTD = build_mixer(name, hidden_size=32, num_heads=2).eval(), torch.randn(3, 7, 32)
    cache = layer.initial_state(3)
    with torch.no_grad():
        torch.testing.assert_close(layer(x_BTD, cache), layer(x_BTD, LayerCache()))


def test_inputs_have_the_dtype_of_a_layer_whose_weights_are_quantised():
    layer = build_mixer("gdn", hidden_size=32, num_heads=2).half()
    projection = layer.qkv.q_proj
    projection.weight = nn.Parameter(projection.weight.detach().to(torch.int8), requires_grad=False)
    projection.weight_scale = nn.Parameter(torch.ones(1))
    first = next(x for x in layer.parameters() if x.is_floating_point())
    assert first is projection.weight_scale and token_of(layer).dtype == torch.float16


def test_initial_states_need_not_be_zero():
    assert build_mixer("lattice", hidden_size=32, num_heads=2).initial_state(1).memory["S"].any()


def test_a_memory_that_grows_has_no_spec():
    with pytest.raises(ValueError, match="SoftmaxAttention has no state_spec, as its memory grows"):
        build_mixer("softmax", hidden_size=32, num_heads=2).state_spec()


def test_bad_calls():
    layer = build_mixer("gdn", hidden_size=32, num_heads=2)
    with pytest.raises(ValueError, match="count must be a positive whole number"):
        layer.initial_state(0)

    class Nameless(Mixer):
        def state_size(self, length: int = 1) -> int:
            return 0

    with pytest.raises(ValueError, match="Nameless must have the attribute hidden_size"):
        Nameless().initial_state(1)
