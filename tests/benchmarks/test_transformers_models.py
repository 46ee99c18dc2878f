"""The models of transformers that are timed, as far as no GPU is needed."""

from __future__ import annotations

import sys

import pytest
import torch
import transformers_models
from transformers_models import MODELS, build

from fastweights.integrations.transformers import FAMILIES


@pytest.mark.parametrize("name", MODELS)
def test_models_have_real_heads(name: str) -> None:
    assert name in FAMILIES
    model = build(name, "meta")
    layers = [layer for layer in model.modules() if hasattr(layer, "conv1d")]
    assert len(layers) == 3 and all(layer.conv1d.weight.shape[0] >= 64 * 128 for layer in layers)
    assert next(model.parameters()).dtype == torch.bfloat16


def test_unknown_models_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["transformers_models.py", "--only", "llama"])
    with pytest.raises(SystemExit):
        transformers_models.main()
    assert "--only must name models of qwen3_next, kimi_linear, got llama" in capsys.readouterr().err
