"""RWKV-7's time mixing against its published equations, token by token and head by head."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.layers import RWKV7, LayerCache, build_mixer
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

HEADS, WIDTH = 2, 12


@pytest.fixture
def layer() -> RWKV7:
    """With parameters of any size, so that each of them counts."""
    torch.manual_seed(0)
    made = RWKV7(hidden_size=WIDTH, num_heads=HEADS, value_residual=True, value_rank=3, gate_rank=5).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return made


def by_hand(layer: RWKV7, x: Tensor, first: Tensor) -> Tensor:
    """One sequence [T, D]. The state is the paper's wkv [V, K] per head."""
    p = dict(layer.named_parameters())
    K = WIDTH // HEADS
    wkv, before, outputs = torch.zeros(HEADS, K, K, dtype=x.dtype), torch.zeros_like(x[0]), []
    for now, v_first in zip(x, first):
        r_x, d_x, k_x, v_x, a_x, g_x = (now + (before - now) * mu for mu in p["shift.mix"])
        r, k, v = p["q_proj.weight"] @ r_x, p["k_proj.weight"] @ k_x, p["v_proj.weight"] @ v_x
        nu = torch.sigmoid(p["value_mix.base"] + p["value_mix.up.weight"] @ (p["value_mix.down.weight"] @ v_x))
        v = v + nu * (v_first - v)
        d = p["decay.base"] + p["decay.up.weight"] @ torch.tanh(p["decay.down.weight"] @ d_x)
        w = torch.exp(-torch.exp(torch.tensor(-0.5, dtype=x.dtype)) * torch.sigmoid(d))
        a = torch.sigmoid(p["rate.base"] + p["rate.up.weight"] @ (p["rate.down.weight"] @ a_x))
        g = p["g_proj.2.weight"] @ torch.sigmoid(p["g_proj.0.weight"] @ g_x)
        kappa = k * p["keys.erase"].flatten()
        k = k * (1 + (a - 1) * p["keys.share"].flatten())
        mixed = []
        for h in range(HEADS):
            at = slice(h * K, (h + 1) * K)
            unit = kappa[at] / kappa[at].norm()
            transition = torch.diag(w[at]) - torch.outer(unit, a[at] * unit)
            wkv[h] = wkv[h] @ transition + torch.outer(v[at], k[at])
            y = F.layer_norm(wkv[h] @ r[at], (K,), p["norm.weight"][at], p["norm.bias"][at], 64e-5)
            mixed.append(y + (r[at] * p["bonus.rho"][h] * k[at]).sum() * v[at])
        outputs.append(p["o_proj.weight"] @ (g * torch.cat(mixed)))
        before = now
    return torch.stack(outputs)


def test_published_equations(layer: RWKV7) -> None:
    x, first = torch.randn(2, 70, WIDTH, dtype=torch.float64), torch.randn(2, 70, WIDTH, dtype=torch.float64)
    wanted = torch.stack([by_hand(layer, *pair) for pair in zip(x, first)])
    torch.testing.assert_close(layer(x, first_values=first), wanted, rtol=1e-8, atol=1e-10)


def test_values_of_the_first_layer_go_on_from_a_cache(layer: RWKV7) -> None:
    first = build_mixer("rwkv7", hidden_size=WIDTH, num_heads=HEADS).double()
    x = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    cache, values = LayerCache(), []
    for piece in x.split([4, 1, 4], 1):
        values.append(first.values(piece, cache))
        first(piece, cache)
    torch.testing.assert_close(torch.cat(values, 1), first.values(x))


def test_first_values_belong_to_the_value_residual(layer: RWKV7) -> None:
    x = torch.randn(1, 3, WIDTH, dtype=torch.float64)
    with pytest.raises(ValueError, match="first_values must be given with value_residual"):
        layer(x)
    with pytest.raises(ValueError, match=r"first_values must have shape \[1, 3, 12\]"):
        layer(x, first_values=x[..., :6])
    with pytest.raises(ValueError, match="first_values must be None without value_residual"):
        build_mixer("rwkv7", hidden_size=WIDTH, num_heads=HEADS).double()(x, first_values=x)
    with pytest.raises(ValueError, match="value_rank must be None without value_residual"):
        build_mixer("rwkv7", hidden_size=WIDTH, num_heads=HEADS, value_rank=3)


def test_ranks_are_those_of_the_released_code() -> None:
    """Decay, value and gate of models of 768, 2048 and 4096 channels, by the formulas of the released code."""
    for width, ranks in {768: (64, 32, 128), 2048: (96, 64, 256), 4096: (128, 96, 480)}.items():
        with torch.device("meta"):
            made = RWKV7(hidden_size=width, num_heads=width // 64, value_residual=True)
        assert (made.decay.up.in_features, made.value_mix.up.in_features, made.g_proj[0].out_features) == ranks


def test_a_model_hands_the_values_of_its_first_layer_on() -> None:
    """To later layers, also under checkpointing and from token to token; without them the answer is another."""
    residual = {"name": "rwkv7", "value_residual": True}
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "num_hidden_layers": 3, "intermediate_size": 8}
    model = FastWeightsForCausalLM(FastWeightsConfig(**sizes, mixer=["gdn", "rwkv7", residual])).double()
    ids, seen = torch.arange(12).view(2, 6) % 11, []
    model.model.layers[2].mixer.register_forward_pre_hook(
        lambda mixer, x, given: seen.append(given["first_values"]), with_kwargs=True
    )
    model.model.layers[1].mixer.v_proj.register_forward_hook(lambda module, x, y: seen.append(y))
    logits = model(ids).logits
    values, again, first_values = seen
    assert torch.equal(values, again) and torch.equal(values, first_values)
    logits.sum().backward()
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable()
    model.train()(ids).logits.sum().backward()
    for parameter, gradient in zip(model.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, gradient)
    model.gradient_checkpointing_disable()
    model.eval()
    tokens = model.generate(ids, max_new_tokens=4, do_sample=False)
    for t in range(6, 10):
        assert torch.equal(model(tokens[:, :t]).logits[:, -1].argmax(-1), tokens[:, t])
