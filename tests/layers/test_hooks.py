"""Every module that holds parameters is called when its layer runs, so that what others put around a call takes effect: hooks,
offloaded weights that come back for it, adapters."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import MIXERS, LayerCache

from .variants import build, options_are_slow


@options_are_slow
def test_hooks_of_every_module_run(variant):
    layer = build(variant)
    x, cache, seen = (
        torch.randn(2, 5, layer.hidden_size, generator=torch.Generator().manual_seed(1)),
        LayerCache(),
        set(),
    )
    names = {name for name, part in layer.named_modules() if any(True for _ in part.parameters())}
    for name in names:
        layer.get_submodule(name).register_forward_hook(lambda *given, name=name: seen.add(name))

    def called(*given):
        seen.clear()
        y = layer(*given)
        return y, names - seen

    y, missed = called(x)
    assert not missed and y.requires_grad
    layer.eval()
    with torch.no_grad():
        assert not called(x, cache)[1]
        assert called(x[:, :1], cache)[1] <= {"first"}  # a learned first state has had its turn
        assert not called(x.flatten(0, 1)[None], None, torch.tensor([0, 3, 3, 10]))[1]


@pytest.mark.parametrize("name", MIXERS)
def test_calls_give_what_shortcuts_past_them_gave(name):
    layer = build(name).eval()
    x, found = torch.randn(2, 5, layer.hidden_size, generator=torch.Generator().manual_seed(1)), []
    for _ in range(2):
        cache = LayerCache()
        found.append([layer(x, cache), layer(x[:, :1], cache)])
        for part in layer.modules():
            part.register_forward_pre_hook(lambda *given: None)
    torch.testing.assert_close(found[1], found[0])
