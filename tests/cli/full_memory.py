"""A model whose memory asks for too much, and what every command must say then."""

import pytest

from fastweights.cli import main
from fastweights.evaluation import load_language_model
from fastweights.layers import import_mixers, registry
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

from ..evaluation.small import TEXT, save

__all__ = ["RECALL", "check_one_line", "folder"]

HUNGRY = """
import torch
from fastweights.layers import MemoryLayer, register_mixer
from fastweights.ops import linear_attention


@register_mixer("hungry", summary="more than any memory", equation="S + k v^T", source="a test", state="H K V")
class Hungry(MemoryLayer):
    def rule(self, x, q, k, v, run):
        if x.device.type != "meta":
            torch.empty(2**50)
        return run(linear_attention, q, k, v, state=("S",))

    def state_size(self, length=1):
        return self.heads.value_heads * self.heads.key * self.heads.value
"""
RUN = """
output = "out"
cache = "cache"
length = 32
batch_size = 2
max_steps = 2
context_lengths = []
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
mixer = "hungry"
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
RECALL = "recall --pairs 2 --vocab-size 16 --width 8 --layers 1 --steps 2 --batch-size 2 --test-examples 2 --workers 1"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a saved model whose memory asks for too much."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    (tmp_path / "hungry.py").write_text(HUNGRY)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text(TEXT)
    import_mixers(["hungry.py"])
    save(tmp_path / "small")
    model, tokenizer = load_language_model(tmp_path / "small")
    config = FastWeightsConfig(**{**model.config.to_diff_dict(), "mixer": "hungry", "num_hidden_layers": 1})
    FastWeightsForCausalLM(config).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path


def check_one_line(capsys, command, remedy):
    capsys.readouterr()
    assert main([*command.split(), "--import", "hungry.py"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastweights: error: ") and "Traceback" not in line
    assert f"the device's memory is full; {remedy}" in line and "Tried to allocate 4,503,599,627,370,496 bytes" in line
