"""Transformers up to 5.14, whose layers copy the functions of their module when they are built.

The module here has the names and the copying of that version, around functions of the installed one.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from copy import deepcopy
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from packaging.version import Version
from torch import Tensor, nn
from transformers.models.qwen3_next import modeling_qwen3_next

from fastweights.integrations.transformers import accelerate, patching, restore
from tests.integrations.tiny_models import EARLIER

pytestmark = pytest.mark.skipif(EARLIER, reason="an earlier version is installed itself, for test_transformers.py")
NAME = "transformers.models.earlier.modeling_earlier"
COPIED = ("causal_conv1d_fn", "causal_conv1d_update", "chunk_gated_delta_rule", "recurrent_gated_delta_rule")


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """None stands for packages that are not installed."""
    module = ModuleType(NAME)
    module.chunk_gated_delta_rule = module.fused_recurrent_gated_delta_rule = None
    module.causal_conv1d_fn = module.causal_conv1d_update = None
    module.torch_chunk_gated_delta_rule = modeling_qwen3_next.torch_chunk_gated_delta_rule
    module.torch_recurrent_gated_delta_rule = modeling_qwen3_next.torch_recurrent_gated_delta_rule
    module.torch_causal_conv1d_update = modeling_qwen3_next.causal_conv1d_update
    monkeypatch.setitem(sys.modules, "transformers.models.earlier", ModuleType("transformers.models.earlier"))
    monkeypatch.setitem(sys.modules, NAME, module)
    module.Layer, module.DecoderLayer = Layer, DecoderLayer
    monkeypatch.setattr(patching, "FAMILIES", ("earlier",))
    monkeypatch.setattr(patching, "COPYING_ENDS", Version("99"))
    yield module
    restore()


class Layer(nn.Module):
    __module__ = NAME

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        found = sys.modules[NAME]
        self.conv1d = nn.Conv1d(24, 24, 4, padding=3, groups=24)
        self.causal_conv1d_fn = found.causal_conv1d_fn
        self.causal_conv1d_update = found.causal_conv1d_update or found.torch_causal_conv1d_update
        self.chunk_gated_delta_rule = found.chunk_gated_delta_rule or found.torch_chunk_gated_delta_rule
        self.recurrent_gated_delta_rule = (
            found.fused_recurrent_gated_delta_rule or found.torch_recurrent_gated_delta_rule
        )

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        x, seq_idx = x.mT, kwargs.get("seq_idx")
        if self.causal_conv1d_fn is None:
            x = F.silu(self.conv1d(x)[..., : x.shape[-1]])
        else:
            weight, bias = self.conv1d.weight.squeeze(1), self.conv1d.bias
            x = self.causal_conv1d_fn(x=x, weight=weight, bias=bias, activation="silu", seq_idx=seq_idx)
        q, k, v = x.mT.unflatten(2, (6, 4)).split(2, 2)
        gates = {"g": -q[..., 0].abs(), "beta": k[..., 0].sigmoid()}
        ends = kwargs.get("cu_seq_lens_q")
        return self.chunk_gated_delta_rule(q, k, v, **gates, use_qk_l2norm_in_kernel=True, cu_seqlens=ends)[0]


class OlderLayer(Layer):
    """As before 5.9."""

    __module__ = NAME

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DecoderLayer(nn.Module):
    __module__ = NAME

    def __init__(self, memory: type[Layer] = Layer) -> None:
        super().__init__()
        self.linear_attn = memory()

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.linear_attn(x, **(kwargs if type(self.linear_attn) is Layer else {}))


X = torch.randn(2, 30, 24, generator=torch.Generator().manual_seed(0))
RULE = *X[..., :12].unflatten(2, (3, 1, 4)).unbind(2), -X[..., :1].abs(), X[..., :1].sigmoid()  # q, k, v, g, beta


@pytest.mark.parametrize("named", [True, False])
def test_layers_that_exist_and_layers_built_later(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, named: bool
) -> None:
    """Whether accelerate is given the model, or its layers come by when they are called."""
    monkeypatch.setattr(patching, "_is_installed", lambda family: True)  # it has no file
    layer = Layer()
    before = {name: getattr(layer, name) for name in COPIED}
    wanted = layer(X)
    assert accelerate(layer if named else None) == ("earlier",)
    for current, at_once in ((layer, named), (Layer(), True)):
        assert not at_once or all(hasattr(getattr(current, name), "replaces") for name in COPIED)
        torch.testing.assert_close(current(X), wanted, atol=1e-5, rtol=1e-4)
        assert all(hasattr(getattr(current, name), "replaces") for name in COPIED)
    later, copied = Layer(), deepcopy(layer)
    restore()
    assert all(getattr(layer, name) is x for name, x in before.items())
    assert module.causal_conv1d_fn is None
    for kept in (later, copied):  # ours stand in them, and call the originals
        assert torch.equal(kept.chunk_gated_delta_rule(*RULE)[0], layer.chunk_gated_delta_rule(*RULE)[0])
        torch.testing.assert_close(kept(X), wanted, atol=1e-6, rtol=1e-6)


def test_layers_are_pickled_without_ours(module: ModuleType) -> None:
    layer = Layer()
    wanted = layer(X)
    accelerate(layer)
    written = pickle.dumps(layer)
    restore()
    read = pickle.loads(written)
    assert read.chunk_gated_delta_rule is module.torch_chunk_gated_delta_rule
    torch.testing.assert_close(read(X), wanted, atol=1e-6, rtol=1e-6)


def test_what_ours_do_not_take(module: ModuleType) -> None:
    """The convolution that stood in the layer itself has no function to go back to: ours computes it."""
    layer = Layer().double()
    wanted = layer(X.double())
    accelerate(layer)
    assert torch.equal(layer(X.double()), wanted)
    with pytest.raises(ValueError, match="seq_idx must be None"):
        layer(X.double(), seq_idx=torch.zeros(2, 30))


def test_packed_sequences(module: ModuleType) -> None:
    layer = Layer()
    accelerate(layer)
    convolve = layer.causal_conv1d_fn
    weight, (first, second) = layer.conv1d.weight.squeeze(1), X[:1].mT.split([12, 18], 2)
    seq_idx = torch.tensor([[0] * 12 + [1] * 18], dtype=torch.int32)
    alone = torch.cat([convolve(first, weight), convolve(second, weight)], 2)
    assert torch.equal(convolve(X[:1].mT, weight, seq_idx=seq_idx), alone)


def test_packed_sequences_by_cumulative_lengths(module: ModuleType) -> None:
    """The convolution gets them too."""
    layer = DecoderLayer()
    accelerate(layer)
    row, ends = X.reshape(1, 60, 24), torch.tensor([0, 25, 60], dtype=torch.int32)
    alone = torch.cat([layer(part) for part in row.split([25, 35], 1)], 1)
    torch.testing.assert_close(layer(row, cu_seq_lens_q=ends), alone, atol=1e-5, rtol=1e-4)
    older = DecoderLayer(OlderLayer)
    with pytest.raises(ValueError, match="cu_seq_lens_q must be None for OlderLayer"):
        older(row, cu_seq_lens_q=ends)
    older(row, cu_seq_lens_q=ends[[0, 2]])  # of one document
