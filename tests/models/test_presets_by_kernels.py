"""No preset runs a memory rule in PyTorch on CUDA: every op that its layers call by default has kernels for those options."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.layers import build_mixer
from fastweights.models import PRESETS, preset
from fastweights.ops.framework import call
from fastweights.ops.framework.kernel_backend import kernels
from fastweights.ops.framework.spec import OpSpec

pytest.importorskip("triton")
WITHOUT_A_MEMORY = ("softmax", "vla-softmax")


def layers_of_presets() -> dict[str, tuple[str, dict[str, Any]]]:
    """Mixer and options of every layer with a memory, once per width of a head."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name in PRESETS:
        config = preset(name)
        for mixer, options in config.mixers():
            form = json.dumps([mixer, options, config.hidden_size // config.num_heads], sort_keys=True)
            if mixer not in WITHOUT_A_MEMORY and form not in found:
                found[form] = mixer, {"hidden_size": config.hidden_size, "num_heads": config.num_heads, **options}
    return found


LAYERS = layers_of_presets()


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Op and backend of every choice, made as on a GPU. A kernel gives results without numbers."""
    found: list[tuple[str, str]] = []
    choose = call.choose_backend

    def recorded(spec: OpSpec, *given: Any) -> str:
        found.append((spec.name, choose(spec, *given)))
        return found[-1][1]

    def shapes_alone(backend: kernels, tensors: Any, options: Any, save: bool) -> Any:
        return backend.fake(tensors, options)

    monkeypatch.setattr(call, "_passed", {})  # no choice of an earlier call, and none is kept
    monkeypatch.setattr(call, "takes_kernels", lambda backend, x: backend != "torch")
    monkeypatch.setattr(call, "choose_backend", recorded)
    monkeypatch.setattr(kernels, "forward", shapes_alone)
    return found


@pytest.mark.parametrize(("mixer", "layer"), LAYERS.values(), ids=LAYERS)
def test_every_rule_of_a_preset_has_kernels(mixer: str, layer: dict[str, Any], choices: list[tuple[str, str]]) -> None:
    """The forward of a training step in bfloat16 at the preset's sizes, on tensors without numbers."""
    with torch.device("meta"):
        built = build_mixer(mixer, **layer).to(torch.bfloat16)
        y: Tensor = built(torch.empty(2, 130, layer["hidden_size"], dtype=torch.bfloat16))
    assert y.shape == (2, 130, layer["hidden_size"])
    assert choices and {backend for _, backend in choices} == {"triton"}, choices
