"""docs/layers.md: its examples run, and its table of probe names is complete."""

import re
from pathlib import Path

import pytest
import torch

from fastweights.layers import MIXERS, build_mixer, registry
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.testing import check_mixer

TEXT = (Path(__file__).parents[2] / "docs" / "layers.md").read_text("utf-8")
LAYER, PROBE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    names: dict = {"__name__": "example"}
    exec(LAYER, names)
    return names


def test_the_example_layer_keeps_the_contract(example):
    torch.manual_seed(0)
    layer = build_mixer("squared", hidden_size=8, num_heads=2, power=3)
    assert type(layer) is example["Squared"] and layer.options.power == 3
    check_mixer(layer.double())


def test_the_example_of_probes_runs():
    sizes = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "num_hidden_layers": 2}
    names = {"model": FastWeightsForCausalLM(FastWeightsConfig(**sizes)).eval(), "tokens": torch.arange(7)[None]}
    exec(PROBE, names)
    assert names["seen"]["beta"][0].shape == (1, 7, 2) and names["seen"]["state"][0]["S"].shape == (1, 1, 2, 4, 4)


def test_the_table_names_every_probe():
    rows = [line.split("|")[1] for line in TEXT.partition("## Probes")[2].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert named == {name for spec in MIXERS.values() for name in spec.layer.probes}
