"""What holds for every layer, whatever its memory."""

import pytest
import torch

from fastweights.layers import LayerCache, build_mixer

from .variants import HIDDEN, VARIANTS, build, every_variant, options_are_slow

EXACT = {"rtol": 1e-9, "atol": 1e-11}


@pytest.fixture
def layer(variant):
    torch.manual_seed(0)
    return build(variant).double()


@pytest.fixture
def x():
    return torch.randn(2, 21, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@every_variant
def test_output_and_gradients(layer, x):
    x.requires_grad_()
    y = layer(x)
    assert y.shape == x.shape and y.dtype == x.dtype and y.isfinite().all()
    (y * torch.randn_like(y)).sum().backward()
    reached = {"x": x.grad} | {name: p.grad for name, p in layer.named_parameters() if p.requires_grad}
    assert [name for name, grad in reached.items() if grad is None or not grad.abs().sum() > 0] == []


@options_are_slow
def test_causal(layer, x):
    later = x.clone()
    later[:, 13] += 1
    before, after = layer(x), layer(later)
    torch.testing.assert_close(after[:, :13], before[:, :13], **EXACT)
    assert not torch.allclose(after[:, 13:], before[:, 13:])


@options_are_slow
@pytest.mark.parametrize(
    "lengths", [*(pytest.param(x, marks=pytest.mark.slow) for x in ([8, 13], [1] * 21)), [3, 1, 1, 16]]
)
def test_cache_continues_exactly(layer, x, lengths):
    cache = LayerCache()
    blocks = [layer(block, cache) for block in x.split(lengths, 1)]
    torch.testing.assert_close(torch.cat(blocks, 1), layer(x), **EXACT)


@options_are_slow
def test_state_size_is_what_the_cache_holds(layer, x):
    cache = LayerCache()
    layer(x, cache)
    assert cache.count == 2
    assert sum(tensor[0].numel() for tensor in cache.memory.values()) == layer.state_size(length=21)


@options_are_slow
def test_packed_is_separate(layer, x):
    row = x.flatten(0, 1)[None]
    edges = [0, 5, 5, 6, 30, 42]
    packed = layer(row, cu_seqlens=torch.tensor(edges))
    separate = [layer(row[:, a:b]) for a, b in zip(edges, edges[1:], strict=False) if a < b]
    torch.testing.assert_close(packed, torch.cat(separate, 1), **EXACT)


@options_are_slow
def test_packed_sequences_go_on_from_a_cache(layer, x):
    """Ragged prefill, a token for each sequence, a ragged block, another token: as if each had been alone."""
    whole, cache = layer(x), LayerCache()
    first = layer(torch.cat([x[:1, :9], x[1:, :4]], 1), cache, torch.tensor([0, 9, 13]))
    token = layer(torch.stack([x[0, 9:10], x[1, 4:5]]), cache)
    block = layer(torch.cat([x[:1, 10:12], x[1:, 5:11]], 1), cache, torch.tensor([0, 2, 8]))
    last = layer(torch.stack([x[0, 12:15], x[1, 11:14]]), cache)
    a = torch.cat([first[0, :9], token[0], block[0, :2], last[0]])
    b = torch.cat([first[0, 9:], token[1], block[0, 2:], last[1]])
    torch.testing.assert_close(a, whole[0, :15], **EXACT)
    torch.testing.assert_close(b, whole[1, :14], **EXACT)


@options_are_slow
def test_gradients_flow_through_the_cache(layer, x):
    x.requires_grad_()
    weight = torch.randn_like(x)
    (whole,) = torch.autograd.grad((layer(x) * weight).sum(), x)
    cache = LayerCache()
    blocks = torch.cat([layer(block, cache) for block in x.split([10, 11], 1)], 1)
    (segmented,) = torch.autograd.grad((blocks * weight).sum(), x)
    torch.testing.assert_close(segmented, whole, rtol=1e-7, atol=1e-10)


@options_are_slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(layer, x, dtype):
    wanted = layer(x)
    low = layer.to(dtype)(x.to(dtype))
    assert low.dtype == dtype
    error = (low.double() - wanted).norm() / wanted.norm()
    assert error < (0.06 if dtype == torch.bfloat16 else 0.01)


@options_are_slow
def test_autocast(layer, x):
    layer, x = layer.float(), x.float()
    wanted = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    (low.float() * torch.randn_like(wanted)).sum().backward()
    assert (low - wanted).norm() / wanted.norm() < 0.06
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters() if p.requires_grad)


@options_are_slow
def test_bad_input_is_refused(layer, x):
    cache = LayerCache()
    layer(x, cache)
    held = {name: tensor.clone() for name, tensor in cache.memory.items()}
    with pytest.raises(ValueError, match=f"x must be a tensor .*{HIDDEN}.*got"):
        layer(x[..., :-1])
    with pytest.raises(ValueError, match="time >= 1"):
        layer(x[:, :0])
    with pytest.raises(ValueError, match="cache must hold as many sequences as the input, 1, got 2"):
        layer(x[:1], cache)
    with pytest.raises(ValueError, match="cu_seqlens"):
        layer(x, cache, torch.tensor([0, 21]))
    assert all(torch.equal(cache.memory[name], tensor) for name, tensor in held.items())


@options_are_slow
def test_misspelt_options_are_refused(variant):
    with pytest.raises(ValueError, match=r"no option 'head_dims' \(did you mean 'head_dim'\?\)"):
        build_mixer(VARIANTS[variant][0], hidden_size=HIDDEN, num_heads=2, head_dims=4)
