"""Heads divided among processes: which mixers allow it, and what is said of the others."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import MIXERS
from fastweights.models import FastWeightsConfig
from fastweights.serving.vllm import split
from fastweights.serving.vllm.split import check_parts, part_of_config, part_of_weight

# Decays that follow from the number of heads; parameters of several tensors in one; heads that see each other.
WHOLE = ("retnet", "mamba2", "palimpsa-m", "vla", "vla-conv")


def config(mixer, **sizes):
    sizes = {"hidden_size": 64, "num_heads": 4, **sizes}
    layers = len(mixer) if isinstance(mixer, list) else 1
    return FastWeightsConfig(vocab_size=64, num_hidden_layers=layers, mixer=mixer, **sizes)


@pytest.mark.parametrize("name", MIXERS)
def test_the_outputs_of_the_parts_add_up_or_the_mixer_is_refused(name):
    if name not in WHOLE:
        check_parts(config(name), 2)
        return
    with pytest.raises(ValueError, match=f"tensor_parallel_size must be 1 for a model with {name}, got 2"):
        check_parts(config(name), 2)


def test_options_that_count_heads_are_divided():
    whole = config([{"name": "gdn", "num_v_heads": 8}, {"name": "softmax", "num_kv_heads": 2}], intermediate_size=96)
    part = part_of_config(whole, 2)
    assert (part.num_heads, part.intermediate_size, part.hidden_size) == (2, 48, 64)
    assert part.mixers() == [
        ("gdn", {"num_v_heads": 4, "head_dim": 16}),
        ("softmax", {"num_kv_heads": 1, "head_dim": 16}),
    ]
    assert whole.num_heads == 4 and whole.mixer_of(0)[1] == {"num_v_heads": 8}
    check_parts(whole, 2)
    layout = {"softmax_layers": [1], "softmax_options": {"num_kv_heads": 2}}
    hybrid = FastWeightsConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        mixer={"name": "gdn", "num_v_heads": 8},
        **layout,
    )
    assert part_of_config(hybrid, 2).mixers() == part.mixers()


@pytest.mark.parametrize(
    ("mixer", "sizes", "message"),
    [
        ("gdn", {"num_heads": 1}, "num_heads must be a multiple of tensor_parallel_size, 2, got 1"),
        ("gdn", {"intermediate_size": 97}, "intermediate_size must be a multiple of tensor_parallel_size, 2, got 97"),
        ({"name": "softmax", "num_kv_heads": 1}, {}, "mixer of layer 0: num_kv_heads must be a multiple of"),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(mixer, sizes, message):
    with pytest.raises(ValueError, match=message):
        check_parts(config(mixer, **sizes), 2)


def test_a_wrong_part_of_the_weights_is_found(monkeypatch):
    monkeypatch.setattr(split, "part_of_weight", lambda x, shape, rank, parts: part_of_weight(x, shape, 0, parts))
    with pytest.raises(ValueError, match="do not add up"):
        check_parts(config("gdn"), 2)


def test_a_part_is_taken_along_the_dimension_that_is_smaller():
    weight = torch.arange(12).view(2, 6)
    assert part_of_weight(weight, torch.Size((2, 3)), 1, 2).tolist() == [[3, 4, 5], [9, 10, 11]]
    assert part_of_weight(weight, torch.Size((1, 6)), 0, 2).tolist() == [[0, 1, 2, 3, 4, 5]]
    assert part_of_weight(weight, weight.shape, 1, 2) is weight
