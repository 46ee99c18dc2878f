"""Softmax attention against its formula."""

import pytest
import torch

from fastweights.layers import SoftmaxAttention, attention
from fastweights.layers.attention import rotate, rotation


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"qk_norm": True}, {"rope_theta": None}])
def test_attention_is_a_softmax_over_earlier_tokens(options):
    torch.manual_seed(0)
    layer = SoftmaxAttention(hidden_size=16, num_heads=4, **options).double()
    x = torch.randn(1, 7, 16, dtype=torch.double)
    q, k, v = ((x @ p.weight.T).unflatten(2, (-1, 4)) for p in (layer.q_proj, layer.k_proj, layer.v_proj))
    if layer.rope_theta is not None:
        if options.get("qk_norm"):
            q, k = (y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        q, k = (rotate(y, *rotation(torch.arange(7)[None], y.shape[3], 10000.0, y.dtype)) for y in (q, k))
    k, v = (y.repeat_interleave(4 // y.shape[2], 2) for y in (k, v))
    o = torch.zeros_like(q)
    for t in range(7):
        for h in range(4):
            weights = (k[0, : t + 1, h] @ q[0, t, h] / 2).softmax(0)
            o[0, t, h] = weights @ v[0, : t + 1, h]
    torch.testing.assert_close(layer(x), o.flatten(2) @ layer.o_proj.weight.T)


def test_state_grows_with_the_sequence_and_the_key_value_heads():
    layer = SoftmaxAttention(hidden_size=16, num_heads=4, num_kv_heads=2)
    assert [layer.state_size(length) for length in (0, 1, 100)] == [0, 16, 1600]


@pytest.mark.parametrize(
    "error, options, message",
    [
        (ValueError, {"num_kv_heads": 3}, "num_kv_heads must divide num_heads, 4, got 3"),
        (ValueError, {"head_dim": 5}, "head_dim must be even .* got 5"),
        (ValueError, {"rope_theta": -1.0}, "rope_theta must be positive"),
        (TypeError, {"qk_norm": 1}, "qk_norm must be True or False, got 1"),
    ],
)
def test_bad_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        SoftmaxAttention(hidden_size=16, num_heads=4, **options)


def test_rotations_of_packed_sequences_depend_on_places_in_the_sequence_alone(monkeypatch):
    """In bfloat16 on a GPU, where rounded angles of other places would change the bits of a sequence that follows others."""
    rotated = []
    monkeypatch.setattr(attention, "takes_packed", lambda q, v: True)
    monkeypatch.setattr(attention, "_attend_packed", lambda q, k, v, *rest: rotated.append((q, k)) or v)
    layer = SoftmaxAttention(hidden_size=32, num_heads=2).to(torch.bfloat16)
    x = torch.randn(1, 40, 32).bfloat16()
    layer(x, cu_seqlens=torch.tensor([0, 17, 17, 40], dtype=torch.int32))
    layer(x[:, 17:], cu_seqlens=torch.tensor([0, 23], dtype=torch.int32))
    for packed, alone in zip(*rotated, strict=True):
        assert torch.equal(packed[:, 17:], alone)


def test_a_convolution_that_passes_its_input_on_leaves_attention_as_it_is():
    torch.manual_seed(0)
    bare = SoftmaxAttention(hidden_size=16, num_heads=4).double()
    layer = SoftmaxAttention(hidden_size=16, num_heads=4, conv_size=3).double()
    x = torch.randn(2, 7, 16, dtype=torch.double)
    state = {f"{part}_conv.weight": torch.eye(3, dtype=torch.double)[2].expand(16, 3) for part in "qkv"}
    layer.load_state_dict({**bare.state_dict(), **state})
    torch.testing.assert_close(layer(x), bare(x))
    layer.load_state_dict({**bare.state_dict(), **state, "v_conv.weight": state["v_conv.weight"].flip(1)})
    shifted = torch.cat([torch.zeros(2, 2, 16, dtype=torch.double), x[:, :-2]], 1)  # values of two tokens before
    flat = [bare.q_proj(x), bare.k_proj(x), bare.v_proj(shifted)]
    torch.testing.assert_close(layer(x), bare.mix_projected(x, flat))
    active = SoftmaxAttention(hidden_size=16, num_heads=4, activation="silu").double()
    active.load_state_dict(bare.state_dict())
    flat = [torch.nn.functional.silu(p(x)) for p in (bare.q_proj, bare.k_proj, bare.v_proj)]
    torch.testing.assert_close(active(x), bare.mix_projected(x, flat))
