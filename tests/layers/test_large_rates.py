"""Parameters that layers take the exponential of: however large or small, outputs and gradients stay finite and right."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fastweights.layers import MIXERS, LayerCache, Mixer, build_mixer
from fastweights.layers.decay import HeadDecay, KimiDecay, SoftplusDecay
from fastweights.ops.linear_rows import linear_rows
from fastweights.ops.step_decay import step_decay
from tests.fast_set import fast_where
from tests.kernels.cases import DEVICE
from tests.models.mixers import SOME, is_fast

VALUES = (89.0, 1000.0, -1000.0)


def rates_of(layer: nn.Module) -> list[str]:
    """The parameters without weight decay, most of them logarithms of rates, and biases of gates."""
    marked = [
        f"{path}.{name}".lstrip(".")
        for path, module in layer.named_modules()
        for name in getattr(module, "_no_weight_decay", ())
    ]
    return [name for name, p in layer.named_parameters() if name in marked and p.ndim == 1]


def made(mixer: str, parameter: str, value: float, dtype: torch.dtype) -> tuple[Mixer, Tensor]:
    torch.manual_seed(0)
    layer = build_mixer(mixer, hidden_size=16, num_heads=2).to(dtype)
    with torch.no_grad():
        layer.get_parameter(parameter).fill_(value)
    return layer, torch.randn(2, 40, 16, dtype=dtype, requires_grad=True)


@fast_where(lambda given: given["dtype"] == torch.bfloat16 and is_fast(given["mixer"], SOME))
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_outputs_and_gradients_are_finite(mixer: str, dtype: torch.dtype) -> None:
    for parameter in rates_of(build_mixer(mixer, hidden_size=16, num_heads=2)):
        for value in VALUES:
            layer, x = made(mixer, parameter, value, dtype)
            y = layer(x)
            y.float().square().sum().backward()
            found = {"y": y, "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}
            bad = [name for name, z in found.items() if z is not None and not z.isfinite().all()]
            assert not bad, (parameter, value, bad)
            cache = LayerCache()
            with torch.no_grad():
                pieces = [layer(x[:, :39], cache), layer(x[:, 39:], cache)]
            assert torch.cat(pieces, 1).isfinite().all(), (parameter, value)


def exact_decay(x: Tensor, bias: Tensor, A_log: Tensor) -> Tensor:
    """exp(g) in float64, without a number that overflows: -g = exp(A_log + log softplus(z))."""
    z = x.double() + bias.double()
    log_step = torch.where(z < -30, z, torch.log(nn.functional.softplus(z.clamp_min(-40))))
    return torch.exp(-torch.exp((A_log.double() + log_step).clamp_max(700.0)))


PAIRS = [
    (A, z) for A in (-1000.0, -90.0, 0.0, 40.0, 60.0, 88.0, 89.0, 1000.0) for z in (-1000.0, -A, 1 - A, 0.0, 1000.0)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [HeadDecay, KimiDecay])
def test_decays_and_their_gradients_are_right(kind: type[SoftplusDecay], dtype: torch.dtype) -> None:
    heads, channels = len(PAIRS), 1 if kind is HeadDecay else 2
    layer = kind(4, heads) if kind is HeadDecay else kind(4, heads, channels)  # type: ignore[call-arg]
    layer = layer.to(dtype)
    A_log, z = (torch.tensor(column) for column in zip(*PAIRS))
    with torch.no_grad():
        layer.A_log.copy_(A_log)
        layer.dt_bias.copy_(z.repeat_interleave(channels))
    step = torch.zeros(1, 3, heads * channels, dtype=dtype)
    g = layer.convert_step(step)
    g.exp().sum().backward()
    exact = [p.detach().double().requires_grad_() for p in (layer.dt_bias, layer.A_log)]
    wanted = exact_decay(step, exact[0], exact[1].repeat_interleave(channels))
    wanted.sum().backward()
    torch.testing.assert_close(g.exp().double().flatten(2), wanted, rtol=1e-4, atol=1e-6)
    for p, e in zip((layer.dt_bias, layer.A_log), exact, strict=True):
        torch.testing.assert_close(p.grad.double(), e.grad, rtol=2 * torch.finfo(dtype).eps + 1e-4, atol=1e-6)


@pytest.mark.kernels
def test_kernels_have_the_same_decays() -> None:
    A_log, z = (torch.tensor(column, device=DEVICE) for column in zip(*PAIRS))
    x, w = torch.zeros(2, 1, 16, device=DEVICE), torch.zeros(len(PAIRS), 16, device=DEVICE)
    (g,) = linear_rows(x, w, kind="decay", bias=z, other=A_log)
    torch.testing.assert_close(g.exp().double(), exact_decay(x[..., :1], z, A_log), rtol=1e-4, atol=1e-6)
    _, g = step_decay(x[..., :1].expand(-1, -1, len(PAIRS)).contiguous(), z, A_log)
    assert g.isfinite().all()
    large = z > -30
    wanted = exact_decay(x[..., :1], z[large], A_log[large])
    torch.testing.assert_close(g[..., large].exp().double(), wanted, rtol=1e-4, atol=1e-6)
    A_log[0] = float("nan")
    _, g = step_decay(x[..., :1].expand(-1, -1, len(PAIRS)).contiguous(), z, A_log)
    assert g[..., 0].isnan().all() and g[..., 1:].isfinite().all()
