"""A memory that is full ends every command with one line that names what needs less, on a CPU as on a GPU."""

from __future__ import annotations

import errno

import pytest
import torch

from fastweights.cli import main
from fastweights.evaluation import load_language_model
from fastweights.layers import import_mixers, registry
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.out_of_memory import OutOfMemory, within_memory

from ..evaluation.small import TEXT, save

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


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        ("train run.toml", "a smaller batch_size"),
        ("evaluate model --text text.txt --lengths 16", "a smaller --block"),
        ("inspect model --text text.txt --tokens 8 --every 4", "a smaller --tokens"),
        ("generate model Once", "a smaller --block"),
        pytest.param(
            f"{RECALL} --mixers hungry --learning-rates 0.01",
            "a smaller batch_size, or fewer workers",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_one_line(folder, capsys, command, remedy):
    capsys.readouterr()
    assert main([*command.split(), "--import", "hungry.py"]) == 1
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("fastweights: error: ") and "Traceback" not in line
    assert f"the device's memory is full; {remedy}" in line and "Tried to allocate 4,503,599,627,370,496 bytes" in line


def allocate_on_the_cpu():
    torch.empty(2**50)


def allocate_in_python():
    bytearray(2**60)


def map_a_file():
    raise OSError(errno.ENOMEM, "Cannot allocate memory")


def overflow():
    torch.empty(2**40, 2**40)


@pytest.mark.parametrize("fails", [allocate_on_the_cpu, allocate_in_python, map_a_file, overflow])
def test_every_kind_of_error_for_a_full_memory(fails):
    with pytest.raises(OutOfMemory, match=r"^the device's memory is full; less needs less"), within_memory("less"):
        fails()


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), OSError(errno.ENOSPC, "full"), ValueError("x")])
def test_other_errors_stay_as_they_are(error):
    with pytest.raises(type(error)) as raised, within_memory("less"):
        raise error
    assert raised.value is error
