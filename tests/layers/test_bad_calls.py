"""Bad arguments of layers, registry, probes and the check of a user's layer are refused at once, in words of the argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastweights.layers import (
    MIXERS,
    LayerCache,
    Mixer,
    SoftmaxAttention,
    build_mixer,
    import_mixers,
    probe,
    register_mixer,
)
from fastweights.layers.mixer import check_input
from fastweights.layers.projections import ShortConvolution
from fastweights.testing import check_mixer

from ..bad_calls import check_refused

WIDTH = 16
X = torch.zeros(2, 5, WIDTH)


def layer(name: str = "gdn", **options: Any) -> Mixer:
    return build_mixer(name, **{"hidden_size": WIDTH, "num_heads": 2, **options})


def filled(name: str = "gdn", sequences: int = 2) -> LayerCache:
    cache = LayerCache()
    layer(name)(torch.zeros(sequences, 5, WIDTH), cache)
    return cache


FORWARDS: dict[str, tuple[str, tuple[Any, ...]]] = {
    "an array": ("x", (np.zeros((2, 5, WIDTH)),)),
    "a list": ("x", ([[0.0] * WIDTH],)),
    "rank 2": ("x", (X[0],)),
    "rank 4": ("x", (X[None],)),
    "another width": ("x", (X[..., 1:],)),
    "no tokens": ("x", (X[:, :0],)),
    "double": ("x", (X.double(),)),
    "half": ("x", (X.half(),)),
    "whole numbers": ("x", (X.long(),)),
    "complex numbers": ("x", (X.to(torch.complex64),)),
    "meta": ("x", (X.to("meta"),)),
    "sparse": ("x", (X.to_sparse(),)),
    "nested": ("x", (torch.nested.nested_tensor([X[0], X[0]]),)),
    "jagged": ("x", (torch.nested.nested_tensor([X[0], X[0]], layout=torch.jagged),)),
    "MKL-DNN's layout": ("x", (X.to_mkldnn(),)),
    "quantised": ("x", (torch.quantize_per_tensor(X, 0.1, 0, torch.qint8),)),
    "a dictionary as cache": ("cache", (X, {})),
    "a tensor as cache": ("cache", (X, X)),
    "a cache of other sequences": ("cache", (X, filled(sequences=3))),
    "a list as lengths": ("cu_seqlens", (X[:1], None, [0, 5])),
    "float lengths": ("cu_seqlens", (X[:1], None, torch.tensor([0.0, 5.0]))),
    "lengths that end early": ("cu_seqlens", (X[:1], None, torch.tensor([0, 4]))),
    "lengths that step down": ("cu_seqlens", (X[:1], None, torch.tensor([0, 4, 3, 5]))),
    "lengths without numbers": ("cu_seqlens", (X[:1], None, torch.tensor([0, 5], device="meta"))),
    "sparse lengths": ("cu_seqlens", (X[:1], None, torch.tensor([0, 5]).to_sparse())),
    "nested lengths": ("cu_seqlens", (X[:1], None, torch.nested.nested_tensor([torch.tensor([0, 5])]))),
    "complex lengths": ("cu_seqlens", (X[:1], None, torch.tensor([0, 5]).to(torch.complex64))),
    "lengths of two rows": ("cu_seqlens", (X, None, torch.tensor([0, 5]))),
}


@pytest.mark.parametrize("mixer", MIXERS)
def test_forward_of_every_layer(mixer: str, tmp_path: Path) -> None:
    made = layer(mixer)
    for argument, given in FORWARDS.values():
        check_refused(argument, lambda given=given: made(*given), tmp_path)  # type: ignore[misc]
    for length in (-1, 1.5, "4", None):
        check_refused("length", lambda length=length: made.state_size(length), tmp_path)  # type: ignore[misc]
    for dtype in ("float32", 3, np.float32, X, torch.int64, torch.complex64):
        check_refused("dtype", lambda dtype=dtype: made.state_spec(dtype), tmp_path)  # type: ignore[misc]
    for count in (0, -1, 1.5, "2", None, X):
        check_refused("count", lambda count=count: made.initial_state(count), tmp_path)  # type: ignore[misc]


@pytest.mark.parametrize(
    "mixer", [name for name in MIXERS if "conv_size" in inspect.signature(MIXERS[name].layer).parameters]
)
def test_convolutions_of_every_layer_are_short(mixer: str, tmp_path: Path) -> None:
    check_refused("conv_size", lambda: layer(mixer, conv_size=10**9), tmp_path)


@pytest.mark.parametrize("mixer", MIXERS)
def test_the_cache_of_a_layer_of_another_kind(mixer: str) -> None:
    with pytest.raises(ValueError, match="cache must be one that this layer has filled"):
        layer(mixer)(X, filled("gdn" if MIXERS[mixer].layer is SoftmaxAttention else "softmax"))


def test_x_of_another_dtype_passes_under_autocast_and_to_quantized_weights() -> None:
    made = layer()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        made(X.bfloat16())
    with pytest.raises(ValueError, match="x must be of the dtype"):
        made(X.bfloat16())
    made.register_parameter("packed", nn.Parameter(torch.zeros(3, dtype=torch.uint8), requires_grad=False))
    check_input(made, X.bfloat16(), None, None)


class Own(Mixer):
    """A layer of a user."""

    def __init__(self, *, hidden_size: int, num_heads: int, rate: float = 1.0) -> None:
        super().__init__()
        self.hidden_size = hidden_size

    def state_size(self, length: int = 1) -> int:
        return 0


WORDS = {"summary": "s", "equation": "e", "source": "s", "state": "0"}

CALLS: dict[str, tuple[str, Callable[[], object]]] = {
    "an unknown mixer": ("mixer", lambda: layer("gnd")),
    "a mixer by number": ("mixer", lambda: layer(3)),  # type: ignore[arg-type]
    "an unknown option": ("option", lambda: layer(decai="none")),
    "no width": ("hidden_size", lambda: layer(hidden_size=0)),
    "a float width": ("hidden_size", lambda: layer(hidden_size=16.0)),
    "no heads": ("num_heads", lambda: layer(num_heads=0)),
    "heads that do not divide": ("num_heads", lambda: layer(num_heads=3)),
    "heads too wide": ("head_dim", lambda: layer(head_dim=10**9)),
    "a negative head": ("head_dim", lambda: layer(head_dim=-8)),
    "10^9 heads": ("num_heads", lambda: layer(num_heads=10**9, head_dim=8)),
    "10^9 value heads": ("num_v_heads", lambda: layer(num_v_heads=2 * 10**9)),
    "a width of 10^12": ("hidden_size", lambda: layer(hidden_size=10**12, head_dim=8)),
    "a convolution of 10^9": ("conv_size", lambda: layer(conv_size=10**9)),
    "a convolution by name": ("conv_size", lambda: layer(conv_size="wide")),
    "an expansion of NaN": ("expand_v", lambda: layer(expand_v=float("nan"))),
    "an epsilon of infinity": ("norm_eps", lambda: layer(norm_eps=float("inf"))),
    "an unknown backend": ("backend", lambda: layer(backend="cuda")),
    "a flag by number": ("normalize_qk", lambda: layer(normalize_qk=1)),
    "a negative layer index": ("layer_idx", lambda: layer(layer_idx=-1)),
    "a layer index by name": ("layer_idx", lambda: layer(layer_idx="first")),
    "a name with spaces": ("name", lambda: register_mixer("my own", layer=Own, **WORDS)),
    "a name by number": ("name", lambda: register_mixer(3, layer=Own, **WORDS)),  # type: ignore[call-overload]
    "a name that is taken": ("mixer", lambda: register_mixer("gdn", layer=Own, **WORDS)),
    "no class": ("layer", lambda: register_mixer("own", layer=nn.Linear, **WORDS)),  # type: ignore[type-var]
    "an instance": ("layer", lambda: register_mixer("own", layer=layer(), **WORDS)),  # type: ignore[call-overload]
    "options in a list": ("options", lambda: register_mixer("own", layer=Own, options=["rate"], **WORDS)),  # type: ignore[call-overload]
    "an option that it lacks": ("option", lambda: register_mixer("own", layer=Own, options={"rat": 1}, **WORDS)),
    "an empty summary": ("summary", lambda: register_mixer("own", layer=Own, **{**WORDS, "summary": ""})),
    "a state by number": ("state", lambda: register_mixer("own", layer=Own, **{**WORDS, "state": 3})),  # type: ignore[call-overload]
    "no description": ("summary", lambda: register_mixer("own", layer=Own)),  # type: ignore[call-overload]
    "a description too many": ("colour", lambda: register_mixer("own", layer=Own, **WORDS, colour="red")),  # type: ignore[call-overload]
    "modules in a string": ("modules", lambda: import_mixers("mine")),
    "a module by number": ("modules", lambda: import_mixers([3])),  # type: ignore[list-item]
    "a probe of a function": ("model", lambda: probe(abs, "q").__enter__()),  # type: ignore[arg-type]
    "a probe of a model without mixers": ("model", lambda: probe(nn.Linear(2, 2), "q").__enter__()),
    "a probe of nothing": ("names", lambda: probe(layer()).__enter__()),
    "a probe of an unknown name": ("stat", lambda: probe(layer(), "stat").__enter__()),
    "a probe by number": ("names", lambda: probe(layer(), 3).__enter__()),  # type: ignore[arg-type]
    "a state every 0 tokens": ("every", lambda: probe(layer(), "q", every=0).__enter__()),
    "a state every half token": ("every", lambda: probe(layer(), "q", every=0.5).__enter__()),  # type: ignore[arg-type]
    "detach by number": ("detach", lambda: probe(layer(), "q", detach=1).__enter__()),  # type: ignore[arg-type]
    "a check of no mixer": ("layer", lambda: check_mixer(nn.Linear(2, 2))),  # type: ignore[arg-type]
    "a check of a class": ("layer", lambda: check_mixer(Own)),  # type: ignore[arg-type]
    "a check of 3 tokens": ("length", lambda: check_mixer(layer(), length=3)),
    "a check of half a token": ("length", lambda: check_mixer(layer(), length=20.5)),  # type: ignore[arg-type]
    "a check of 10^10 tokens": ("length", lambda: check_mixer(layer(), length=10**10)),
    "a check with a negative width": ("hidden_size", lambda: check_mixer(layer(), hidden_size=-1)),
    "a check with a width by name": ("hidden_size", lambda: check_mixer(layer(), hidden_size="16")),  # type: ignore[arg-type]
    "a check within nothing": ("tolerance", lambda: check_mixer(layer(), tolerance=-1.0)),
    "a check within NaN": ("tolerance", lambda: check_mixer(layer(), tolerance=float("nan"))),
    "a check of a negative seed": ("seed", lambda: check_mixer(layer(), seed=-1)),
    "a check of a seed by name": ("seed", lambda: check_mixer(layer(), seed="one")),  # type: ignore[arg-type]
    "a convolution without channels": ("channels", lambda: ShortConvolution(0)),
    "a convolution without width": ("width", lambda: ShortConvolution(4, width=0)),
}


@pytest.mark.parametrize("name", CALLS)
def test_other_calls(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(*CALLS[name], tmp_path)
