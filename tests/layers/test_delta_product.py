"""DeltaProduct's layer against its equations, token by token and step by step."""

import pytest
import torch
import torch.nn.functional as F

from fastweights.layers import DeltaProduct, build_mixer


def unit(x):
    return x / (x @ x + 1e-6).sqrt()


def test_its_equations():
    torch.manual_seed(0)
    heads, width, steps = 2, 4, 3
    layer = DeltaProduct(
        hidden_size=8, num_heads=heads, decay="head", householders=steps, conv_size=None, activation="none", output_norm=False
    ).double()  # fmt: skip
    p, x = dict(layer.named_parameters()), torch.randn(9, 8, dtype=torch.float64)
    S, outputs = torch.zeros(heads, width, width, dtype=torch.float64), []
    for now in x:
        q, k, v = (p[f"qkv.{name}_proj.weight"] @ now for name in "qkv")
        beta = 2 * torch.sigmoid(p["gain.b_proj.weight"] @ now)
        g = -p["decay.A_log"].exp() * F.softplus(p["decay.a_proj.weight"] @ now + p["decay.dt_bias"])
        for h in range(heads):
            S[h] *= g[h].exp()
            for step in range(steps):
                part = slice((h * steps + step) * width, (h * steps + step + 1) * width)
                key = unit(k[part])
                S[h] = S[h] + beta[h * steps + step] * torch.outer(key, v[part] - S[h].T @ key)
        q = q.view(heads, width)
        outputs.append(torch.cat([S[h].T @ unit(q[h]) * width**-0.5 for h in range(heads)]))
    wanted = torch.stack(outputs) @ p["output.o_proj.weight"].T
    torch.testing.assert_close(layer(x[None])[0], wanted, rtol=1e-9, atol=1e-11)


def test_one_query_has_several_keys():
    with pytest.raises(ValueError, match="shared_qk must be False"):
        build_mixer("deltaproduct", hidden_size=8, num_heads=2, shared_qk=True)
