"""A saved model comes back with its tokenizer, and whatever does not belong together is refused in one line."""

from __future__ import annotations

import json
import os

import pytest
import torch

from fastweights.environment import usable_memory
from fastweights.models.loading import load_language_model

from ..evaluation.small import model, save, tokenizer


def test_model_and_tokenizer_of_a_folder_and_of_a_run(tmp_path):
    folder = save(tmp_path / "run" / "model")
    for path in (folder, tmp_path / "run", str(folder)):
        lm, words = load_language_model(path)
        assert not lm.training and words("the").input_ids == tokenizer()("the").input_ids
        for name, value in model().state_dict().items():
            assert torch.equal(lm.state_dict()[name], value)
    assert load_language_model(folder, dtype="bfloat16")[0].dtype == torch.bfloat16


def break_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda folder: (folder / "config.json").unlink(), "holds no model: there is no config.json in it"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is damaged"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is damaged"),
        (
            lambda folder: break_config(folder, model_type="gpt2"),
            "of type 'fastweights', got 'gpt2'; `fastweights convert`",
        ),
        (lambda folder: break_config(folder, mixer="gd"), "cannot be loaded.*mixer"),
        (lambda folder: break_config(folder, num_hidden_layers=2), "num_hidden_layers is 2, and the weights are of 1"),
        (lambda folder: break_config(folder, hidden_size=24), "model"),
        (lambda folder: (folder / "model.safetensors").unlink(), "holds no weights: there is no model.safetensors"),
        (lambda folder: cut(folder / "model.safetensors"), "model.safetensors is no safetensors file"),
        (lambda folder: cut(folder / "tokenizer.json"), r"the tokenizer in .*\(tokenizer.json .* cannot be loaded"),
        (
            lambda folder: (folder / "tokenizer.json").write_text("{}"),
            r"\(tokenizer.json .* cannot be loaded.* is missing",
        ),
        (lambda folder: [path.unlink() for path in folder.glob("tokenizer*")], "holds no tokenizer; save it there"),
        (lambda folder: model(vocabulary=300).save_pretrained(folder), "at most the model's 300 tokens, got 400"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_does_not_belong_together(tmp_path, harm, message):
    folder = save(tmp_path / "model")
    harm(folder)
    with pytest.raises(ValueError, match=message):
        load_language_model(folder)


def test_weights_that_no_memory_holds(tmp_path, monkeypatch):
    folder = save(tmp_path / "model")
    assert 1e9 < usable_memory() < 1e15
    monkeypatch.setattr("fastweights.models.weight_files.usable_memory", lambda: 1000)
    with pytest.raises(ValueError, match=f"the weights in {folder} must fit into the memory of this machine"):
        load_language_model(folder)


@pytest.mark.skipif(not hasattr(os, "SEEK_HOLE"), reason="the system cannot tell where a file has holes")
def test_weights_of_holes(tmp_path, monkeypatch):
    """Counted on the disk, whatever their size."""
    folder = save(tmp_path / "model")
    monkeypatch.setattr("fastweights.models.weight_files.SMALL", 1000)
    load_language_model(folder)
    path = folder / "model.safetensors"
    os.truncate(path, 3 * path.stat().st_size)
    with pytest.raises(ValueError, match=f"the weights in {folder} must be numbers, but of [0-9,]+ bytes only"):
        load_language_model(folder)


def test_arguments(tmp_path):
    with pytest.raises(ValueError, match="MODEL must be a folder with a saved model"):
        load_language_model(tmp_path / "none")
    folder = save(tmp_path / "model")
    with pytest.raises(ValueError, match="device must be a torch device that this machine has, got 'abacus'"):
        load_language_model(folder, device="abacus")
    with pytest.raises(ValueError, match="device must be a torch device that this machine has, got 'meta'"):
        load_language_model(folder, device="meta")
    with pytest.raises(ValueError, match="dtype must be one of 'float32', 'bfloat16', 'float16', got 'int8'"):
        load_language_model(folder, dtype="int8")
