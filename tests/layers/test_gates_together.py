"""Gates whose projections are one matrix product against gates taken one by one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from fastweights.layers import MIXERS, build_mixer, memory_layer, shared_input

# Columns of that product with two heads of 8 channels; 0 where there is none, with fewer than two gates of this kind.
COLUMNS = {
    "gdn": 4, "kda": 10, "pdn": 6, "pgdn": 8, "pkda": 14, "comba": 4, "pla": 4, "pgla": 20, "gka": 6, "mesa": 4, "lattice": 4,
    "palimpsa-d": 4, "pmamba2": 8, "pmamba2-tied": 4, "pmamba2-key": 8, "gated-deltaproduct": 6,
}  # fmt: skip


def answers(mixer: torch.nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    y = mixer(x)
    towards = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=y.dtype)
    return [y, *torch.autograd.grad(y, [x, *mixer.parameters()], towards, materialize_grads=True)]


@pytest.fixture
def products(monkeypatch):
    """The number of columns of each joined product."""
    found = []
    for module in (memory_layer, shared_input):
        monkeypatch.setattr(module, "trains_on_gpu", lambda x: True)
    monkeypatch.setattr(shared_input, "sums_gradients", lambda x: False)
    monkeypatch.setattr(shared_input, "F", SimpleNamespace(linear=lambda x, W: found.append(len(W)) or F.linear(x, W)))
    return found


@pytest.mark.parametrize("name", MIXERS)
def test_values_and_gradients(name, request):
    torch.manual_seed(0)
    mixer = build_mixer(name, hidden_size=16, num_heads=2).double()
    x = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    one_by_one = answers(mixer, x)
    products = request.getfixturevalue("products")
    torch.testing.assert_close(answers(mixer, x), one_by_one)
    assert products == ([COLUMNS[name]] if name in COLUMNS else [])


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"])
@pytest.mark.parametrize(
    ("name", "part", "left"),
    [
        ("gka", "decay", 4),
        ("gka", "gain.b_proj", 4),
        ("lattice", "step.gate", 0),
        ("pgla", "decay.gk_proj", 4),
        ("pkda", "decay.f_proj", 6),
    ],
)
def test_gates_with_hooks_are_called(products, name, part, hook, left):
    """So that the hook runs. left: columns of the other gates, 0 where there is only one."""
    mixer, seen = build_mixer(name, hidden_size=16, num_heads=2), []
    getattr(mixer.get_submodule(part), hook)(lambda *given: seen.append(1))
    mixer(torch.randn(1, 3, 16, requires_grad=True)).sum().backward()
    assert seen and products == [left] * (left > 0)


def test_gates_with_a_bias_are_called(products):
    """The product has none."""
    build_mixer("gka", hidden_size=16, num_heads=2, gate_bias=True)(torch.randn(1, 3, 16, requires_grad=True))
    assert products == []
