"""The pool of states: every tensor of a layer's cache has a place of its own in a block, and nothing else is written."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import MIXERS, LayerCache, build_mixer
from fastweights.serving.vllm.pool import Layout, gather, scatter

MEMORIES = [name for name in MIXERS if name not in ("softmax", "vla-softmax")]


def tensors(cache: LayerCache) -> dict[str, torch.Tensor]:
    return {**cache.memory, **cache.context}


@pytest.mark.parametrize("name", MEMORIES)
def test_states_return_from_the_pool(name):
    mixer = build_mixer(name, hidden_size=32, num_heads=2).eval()
    layout = Layout(mixer.state_spec())
    blocks = torch.full((6, layout.size + 48), 7, dtype=torch.uint8)  # rows further apart than a block is long
    pools, rows = layout.pools(blocks[:, : layout.size]), torch.tensor([4, 1])
    cache = LayerCache()
    with torch.no_grad():
        mixer(torch.randn(2, 5, 32), cache)
    scatter(pools, rows, cache)
    read = gather(pools, rows)
    assert read.memory.keys() == cache.memory.keys() and read.context.keys() == cache.context.keys()
    for key, x in tensors(cache).items():
        assert torch.equal(tensors(read)[key], x)
    assert (blocks[[0, 2, 3, 5]] == 7).all() and (blocks[:, layout.size :] == 7).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_aligned_and_apart(dtype):
    layout = Layout(build_mixer("vla-conv", hidden_size=24, num_heads=2).state_spec(dtype))
    ends = [place.offset + torch.Size(place.shape).numel() * place.dtype.itemsize for place in layout.places]
    assert all(place.offset % 16 == 0 for place in layout.places)
    assert all(end <= after.offset for end, after in zip(ends, layout.places[1:])) and ends[-1] <= layout.size
