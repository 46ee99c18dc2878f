"""Keys of a saved configuration that this library does not know: the model loads, one warning names them, and they are kept. By
hand they are refused."""

from __future__ import annotations

import copy
import json
import warnings

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from fastweights.conversion import convert
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.loading import load_config

from .small import config, model, tokens

# What users and tools write: transformers' own keys, unsloth's, a remark.
KEYS = {
    "note": "trained on Tuesday",
    "rope_theta": 10000.0,
    "loss_type": "ForCausalLMLoss",
    "tokenizer_class": "LlamaTokenizerFast",
    "unsloth_version": "2026.11.1",
    "torchscript": False,
    "head_dim": 8,
    "pretraining_tp": 1,
    "generator": "a name that transformers looks for",
    "tags": ["a", {"b": [1, None]}],
}
READERS = {
    "FastWeightsConfig.from_pretrained": FastWeightsConfig.from_pretrained,
    "AutoConfig.from_pretrained": AutoConfig.from_pretrained,
    "from_json_file": lambda folder: FastWeightsConfig.from_json_file(folder / "config.json"),
    "from_dict": lambda folder: FastWeightsConfig.from_dict(json.loads((folder / "config.json").read_text())),
    "load_config": load_config,
    "FastWeightsForCausalLM": lambda folder: FastWeightsForCausalLM.from_pretrained(folder).config,
    "AutoModelForCausalLM": lambda folder: AutoModelForCausalLM.from_pretrained(folder).config,
    "AutoModel": lambda folder: AutoModel.from_pretrained(folder).config,
}


def write(folder, **keys):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def read_with_warning(read, folder):
    """What `read` gives, and its only warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = read(folder)
    messages = [str(one.message) for one in caught if "does not know" in str(one.message)]
    assert len(messages) == 1, messages
    return found, messages[0]


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_keeps_them_and_names_them_once(tmp_path, reader):
    lm = model()
    for key, value in KEYS.items():
        setattr(lm.config, key, value)
    lm.save_pretrained(tmp_path / "one")
    found, message = read_with_warning(READERS[reader], tmp_path / "one")
    assert {key: getattr(found, key) for key in KEYS} == KEYS
    assert all(f"'{key}'" in message for key in KEYS)
    found.save_pretrained(tmp_path / "two")
    again, _ = read_with_warning(READERS["AutoConfig.from_pretrained"], tmp_path / "two")
    assert again.to_diff_dict() == found.to_diff_dict() and again.note == KEYS["note"]


def test_the_model_is_the_same(tmp_path):
    lm, ids = model(), tokens()
    lm.save_pretrained(tmp_path)
    write(tmp_path, **KEYS)
    loaded, _ = read_with_warning(AutoModelForCausalLM.from_pretrained, tmp_path)
    assert torch.equal(loaded(ids).logits, lm(ids).logits)
    assert torch.equal(loaded(ids, labels=ids).loss, lm(ids, labels=ids).loss)
    assert torch.equal(loaded.generate(ids, max_new_tokens=3), lm.generate(ids, max_new_tokens=3))
    assert copy.deepcopy(loaded.config).note == KEYS["note"]
    assert convert(loaded, to="pgdn").config.note == KEYS["note"]


def test_a_misspelt_field_is_named_beside_the_field(tmp_path):
    config().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"num_heads"', '"num_head"').replace('"mixer"', '"mixr"'))
    found, message = read_with_warning(AutoConfig.from_pretrained, tmp_path)
    assert "'num_head' (did you mean 'num_heads'?)" in message and "'mixr' (did you mean 'mixer'?)" in message
    assert found.num_heads == FastWeightsConfig().num_heads and found.num_head == 2


@pytest.mark.parametrize("key", ["num_head", "hiddensize", "note", "rope_theta", "unsloth_version", "num_layers"])
def test_by_hand_they_are_refused(tmp_path, key):
    config().save_pretrained(tmp_path)
    write(tmp_path, note="kept")
    with pytest.raises(ValueError, match=f"no key '{key}'"):
        FastWeightsConfig(**{key: 8})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for reader in (FastWeightsConfig, AutoConfig):
            with pytest.raises(ValueError, match=f"no key '{key}'"):
                reader.from_pretrained(tmp_path, **{key: 8})
        with pytest.raises(ValueError, match=f"no key '{key}'"):
            FastWeightsConfig.from_dict({}, **{key: 8})


def test_fields_of_heads_are_known():
    made = FastWeightsConfig(
        num_labels=3,
        problem_type="single_label_classification",
        classifier_dropout=0.0,
        token_classification_bias=False,
    )
    assert made.num_labels == 3 and len(made.id2label) == 3
    named = FastWeightsConfig(id2label={0: "a", 1: "b", 2: "c"}, label2id={"a": 0, "b": 1, "c": 2})
    assert named.num_labels == 3 and named.id2label[2] == "c"


@pytest.mark.parametrize(
    "keys",
    [
        {"to_dict": 3, "mixers": [], "layer_types": ["full_attention"], "num_branches": 7},
        {"__class__": "x", "__dict__": {}, "_auto_class": "evil", "_attn_implementation_internal": "a/b"},
        {"max_length": 20, "temperature": 0.3, "do_sample": True},
        {"base_model_tp_plan": {"layers.*": "colwise"}, "attribute_map": {"vocab_size": "hidden_size"}},
    ],
    ids=["methods", "private", "settings of generation", "plans"],
)
def test_what_would_change_the_configuration_is_named_and_left_out(tmp_path, keys):
    lm = model()
    lm.save_pretrained(tmp_path / "one")
    write(tmp_path / "one", **keys)
    loaded, message = read_with_warning(AutoModelForCausalLM.from_pretrained, tmp_path / "one")
    assert all(f"'{key}'" in message for key in keys)
    assert loaded.config.to_diff_dict() == {**lm.config.to_diff_dict(), "dtype": "float32"}
    loaded.save_pretrained(tmp_path / "two")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FastWeightsConfig.from_pretrained(tmp_path / "two")


def test_a_warning_stays_one_short_line(tmp_path):
    config().save_pretrained(tmp_path)
    write(tmp_path, **{f"key\n\x1b[31m{'x' * 9000}{n}": n for n in range(3000)})
    _, message = read_with_warning(AutoConfig.from_pretrained, tmp_path)
    assert message.isprintable() and len(message) < 2000 and message.endswith("and 2980 more")


def test_no_code_is_named_where_none_is(tmp_path):
    """TRL reads `auto_map` of every model that it loads from a folder."""
    config().save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).auto_map == {}
    assert "auto_map" not in (tmp_path / "config.json").read_text()
