"""Rotary positions for longer contexts: the frequencies of transformers, and the layer's attention with them."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fastweights.layers import LayerCache, build_mixer
from fastweights.layers.attention import rotation
from fastweights.layers.rope_scaling import RopeScaling, check_scaling

YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize("theta", [10000.0, 5e6])
@pytest.mark.parametrize(
    "scaling",
    [
        YARN,
        {**YARN, "factor": 2.0, "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.5},
        {**YARN, "original_max_position_embeddings": 8},  # every channel turns less than once
        {"rope_type": "linear", "factor": 4.0},
    ],
)
def test_frequencies_are_those_of_transformers(theta, scaling):
    config = LlamaConfig(
        hidden_size=256,
        num_attention_heads=2,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": theta, **scaling},
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, "cpu")
    plain = theta ** (-torch.arange(64, dtype=torch.float32) / 64)
    torch.testing.assert_close(RopeScaling(**scaling).scale_frequencies(plain, theta), expected, rtol=1e-5, atol=0)
    cos, sin = rotation(torch.tensor([[3]]), 128, theta, torch.float32, check_scaling("rope_scaling", scaling))
    torch.testing.assert_close(cos[0, 0, 0], (3 * expected).cos() * amplitude)
    torch.testing.assert_close(sin[0, 0, 0], (3 * expected).sin() * amplitude)
    assert RopeScaling(**scaling).amplitude == pytest.approx(amplitude)


def test_a_layer_with_scaled_positions_decodes_as_it_reads():
    torch.manual_seed(0)
    layer = build_mixer("softmax", hidden_size=32, num_heads=2, rope_scaling=YARN).double().eval()
    plain = build_mixer("softmax", hidden_size=32, num_heads=2).double().eval()
    plain.load_state_dict(layer.state_dict())
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    whole = layer(x)
    assert not torch.allclose(whole, plain(x), atol=1e-4)
    cache = LayerCache()
    pieces = [layer(x[:, :5], cache=cache)]
    cache = layer.fixed_cache(cache, 9)
    pieces += [layer(x[:, token : token + 1], cache=cache) for token in range(5, 9)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("scaling", "words"),
    [
        ({"rope_type": "ntk", "factor": 2}, "rope_type of rope_scaling must be one of"),
        ({"rope_type": "yarn", "factor": 2}, "original_max_position_embeddings of rope_scaling must be a positive"),
        ({**YARN, "factor": 0.5}, "factor of rope_scaling must be a finite number, at least 1"),
        ({**YARN, "beta": 3}, "no key 'beta'"),
        ({"factor": 3}, "must have the key 'rope_type'"),
        ("yarn", "rope_scaling must be a table"),
    ],
)
def test_bad_scalings(scaling, words):
    with pytest.raises((ValueError, TypeError), match=words):
        build_mixer("softmax", hidden_size=32, num_heads=2, rope_scaling=scaling)
