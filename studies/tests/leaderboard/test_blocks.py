"""Every mixer in the matched block, by the modules that its layer has and their first values."""

import pytest
import torch
from fastweights_studies.leaderboard.blocks import LACKS
from torch import nn

from fastweights.layers import MIXERS, MixerChoice, build_mixer, in_block
from fastweights.layers.decay import FixedDecay, GLADecay, SoftplusDecay
from fastweights.layers.norms import GatedRMSNorm, GroupedRMSNorm
from fastweights.layers.projections import ShortConvolution, ValueSkip

WIDTH, HEADS = 32, 4
WINDOWS = 16.0 * 256 ** (torch.arange(HEADS) / (HEADS - 1))


def built(name, block="matched", **options):
    choice = in_block(MixerChoice(name, options), block, HEADS)
    torch.manual_seed(0)
    return build_mixer(choice.name, hidden_size=WIDTH, num_heads=HEADS, **choice.options)


def first_windows(layer):
    """Of every learned decay, [heads] each: the mean over the channels of a head."""
    found = []
    for module in layer.modules():
        if isinstance(module, SoftplusDecay):
            g = -module.A_log.exp()[:, None] * nn.functional.softplus(module.dt_bias).view(HEADS, -1)
        elif isinstance(module, GLADecay):
            g = nn.functional.logsigmoid(module.gk_proj[1].bias).view(HEADS, -1) / module.divisor
        else:
            continue
        found.append((1 / -torch.expm1(g)).mean(1).detach())
    return found


def convolved_channels(layer):
    """Channels behind convolutions of four tokens."""
    widths = {module.width for module in layer.modules() if isinstance(module, ShortConvolution)}
    assert widths <= {4}
    return sum(len(module.weight) for module in layer.modules() if isinstance(module, ShortConvolution))


@pytest.mark.parametrize("name", MIXERS)
def test_a_mixer_of_the_matched_block_has_its_parts(name):
    layer, lacks = built(name), LACKS.get(name, {})
    steps = 2 if "deltaproduct" in name else 1
    wanted = 0 if "convolution" in lacks else WIDTH * (1 + 2 * steps)
    assert convolved_channels(layer) == wanted
    assert all(module.bias is None for module in layer.modules() if isinstance(module, ShortConvolution))
    assert getattr(layer.options, "activation", "silu") == "silu"
    assert ("gate" in lacks and name == "rwkv7") == any(
        "g_proj" in n or "gate_down" in n for n, _ in layer.named_modules()
    )
    assert getattr(layer, "widths", [0])[0] == 0  # channels of the gate in the joint projection of Mamba-2
    assert not any(isinstance(module, ValueSkip) for module in layer.modules())
    found = first_windows(layer)
    assert bool(found) == ("windows" not in lacks)
    for windows in found:
        torch.testing.assert_close(windows, WINDOWS, rtol=2e-3, atol=0)
    norms = [module for module in layer.modules() if isinstance(module, (GatedRMSNorm, GroupedRMSNorm))]
    assert [norm.eps for norm in norms] == ([] if "norm" in lacks and not norms else [1e-12])
    assert all(norm.groups == HEADS for norm in norms if isinstance(norm, GroupedRMSNorm))
    assert "norm" in lacks or norms
    x = torch.randn(1, 6, WIDTH)
    assert layer(x).isfinite().all()


def test_the_table_of_what_is_lacking_is_about_mixers_and_parts():
    assert set(LACKS) <= set(MIXERS)
    assert {part for lacks in LACKS.values() for part in lacks} == {"convolution", "windows", "gate", "skip", "norm"}
    fixed = [name for name in MIXERS if any(isinstance(module, FixedDecay) for module in built(name).modules())]
    assert fixed == ["retnet"]


@pytest.mark.parametrize("name", MIXERS)
def test_each_part_is_added_by_its_block_alone(name):
    matched, lacks = built(name), LACKS.get(name, {})
    gate, skip = built(name, "with-gate"), built(name, "with-skip")
    bare, own = built(name, "without-convolution"), built(name, "with-own-windows")

    def parts(layer):
        filters = [module.width for module in layer.modules() if isinstance(module, ShortConvolution)]
        return {
            "gate": getattr(layer.options, "output_gate", None) == "silu",
            "skip": any(isinstance(module, ValueSkip) for module in layer.modules()),
            "convolution": bool(filters) and min(filters) > 1,
            "windows": [tuple(windows.tolist()) for windows in first_windows(layer)],
        }

    base = parts(matched)
    for layer, part in ((gate, "gate"), (skip, "skip"), (bare, "convolution"), (own, "windows")):
        assert {one for one, value in parts(layer).items() if value != base[one]} == ({part} - set(lacks))
