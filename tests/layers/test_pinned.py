"""First weights, parameter names and saved models stay as they were when `pinned.json` and `checkpoint/` were written."""

import json

import pytest
import torch
from safetensors.torch import load_file

from fastweights.layers.registry import ORDER
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

from .pinned import (
    CHECKPOINT,
    LAYERS,
    MODELS,
    STORED,
    default_layer,
    fingerprint,
    first_layer,
    first_model,
    published,
    tokens,
)

PINNED = json.loads(STORED.read_text())


def assert_as_pinned(module, pinned):
    got = fingerprint(module)
    assert got["keys"] == pinned["keys"]
    assert got["values"] == pytest.approx(pinned["values"], rel=1e-6, abs=1e-6)


def test_every_layer_is_pinned():
    assert set(PINNED["layers"]) == set(LAYERS) and {LAYERS[name][0] for name in LAYERS} == set(ORDER)
    assert set(PINNED["defaults"]) == {name for name in ORDER if published(name)}


@pytest.mark.parametrize("name", LAYERS)
def test_first_weights_of_layers(name):
    assert_as_pinned(first_layer(name), PINNED["layers"][name])


@pytest.mark.parametrize("name", PINNED["defaults"])
def test_first_weights_of_layers_by_default(name):
    assert_as_pinned(default_layer(name), PINNED["defaults"][name])


@pytest.mark.parametrize("name", MODELS)
def test_first_weights_of_models(name):
    assert_as_pinned(first_model(name), PINNED["models"][name])


def test_old_checkpoint_loads_strictly_and_answers_as_before():
    saved = json.loads((CHECKPOINT / "config.json").read_text())
    model = FastWeightsForCausalLM(FastWeightsConfig.from_dict(saved)).eval()
    model.load_state_dict(load_file(CHECKPOINT / "model.safetensors"), strict=True)
    wanted = torch.tensor(json.loads((CHECKPOINT / "logits.json").read_text()))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens()).logits, wanted, rtol=1e-4, atol=1e-5)
        loaded = FastWeightsForCausalLM.from_pretrained(CHECKPOINT)
        torch.testing.assert_close(loaded(tokens()).logits, wanted, rtol=1e-4, atol=1e-5)
