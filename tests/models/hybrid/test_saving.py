"""Hybrids on the disk, in copies and in adapters."""

from __future__ import annotations

import copy
import json
import logging
import pickle

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fastweights.models import linearize

from .small import EVERY, hybrid, teacher, tokens


@pytest.mark.parametrize("model_type", EVERY)
def test_saved_and_loaded_bit_for_bit(model_type, tmp_path):
    lm = hybrid(model_type, "gka", keys="repeated")
    lm.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(lm) and torch.equal(loaded(tokens()).logits, lm(tokens()).logits)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == f"fastweights_{model_type}"
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors", ".md"}
    card = (tmp_path / "README.md").read_text()
    assert "`gka` in layer 0, `softmax` in layer 1, `gka` in layers 2-3" in card and "import fastweights.models" in card
    assert f"model type `fastweights_{model_type}`" in card


PUBLISHED = {
    "llama": {"rope_theta": 500000.0, "rope_scaling": {
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }},
    "qwen2": {"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2, "rope_theta": 1e6},
    "gemma3_text": {
        "sliding_window": 4, "sliding_window_pattern": 2, "rope_theta": 1e6, "rope_local_base_freq": 10000,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_from_a_configuration_as_published(model_type, tmp_path):
    """Rotations and windows as files of earlier versions of transformers have them, and another cache to generate with."""
    lm = teacher(model_type)
    lm.save_pretrained(tmp_path / "teacher")
    file = tmp_path / "teacher" / "config.json"
    config = {**json.loads(file.read_text()), **PUBLISHED[model_type]}
    for name in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        config.pop(name, None)
    file.write_text(json.dumps(config))
    lm = AutoModelForCausalLM.from_pretrained(tmp_path / "teacher")
    ids = tokens(2, 40)
    assert not torch.equal(lm(ids).logits, teacher(model_type)(ids).logits)
    lm.generation_config.cache_implementation = "static"
    for keep in ("all", "every:2"):
        linearize(lm, to="gdn", keep=keep).save_pretrained(tmp_path / keep[:3])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / keep[:3])
        assert torch.equal(loaded(ids).logits, lm(ids).logits) == (keep == "all")
        assert loaded.generate(ids, max_new_tokens=2).shape == (2, 42)


def test_in_parts_and_in_bfloat16(tmp_path):
    """Loaded in bfloat16 the frequencies of a teacher stay in float32, and so do those of its hybrid."""
    teacher().save_pretrained(tmp_path / "teacher")
    lm = linearize(LlamaForCausalLM.from_pretrained(tmp_path / "teacher", dtype=torch.bfloat16), to="gdn", conv_size=4)
    lm.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and torch.equal(loaded(tokens()).logits, lm(tokens()).logits)
    assert loaded(tokens(), labels=tokens()).loss.isfinite()


def test_the_class_of_the_teacher_warns_of_what_it_drops(tmp_path):
    hybrid(to="gka").save_pretrained(tmp_path)
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        LlamaForCausalLM.from_pretrained(tmp_path)
    finally:
        logger.removeHandler(handler)
    text = "\n".join(record.getMessage() for record in records)
    assert "fastweights_llama" in text and "self_attn.memory." in text


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda lm: pickle.loads(pickle.dumps(lm))], ids=["copy", "pickle"])
def test_a_copy_is_independent_and_the_same(copied):
    lm = hybrid("qwen3", "gka")
    wanted, other = lm(tokens()).logits, copied(lm)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.zero_()
    assert torch.equal(other(tokens()).logits, wanted)


def test_the_vocabulary_can_be_resized():
    lm = hybrid("qwen2")
    wanted = lm(tokens()).logits
    lm.resize_token_embeddings(70)
    assert lm.lm_head.weight is lm.model.embed_tokens.weight and lm.config.vocab_size == 70
    torch.testing.assert_close(lm(tokens()).logits[..., :64], wanted)


def test_an_adapter_learns_is_saved_and_merged(tmp_path):
    """The default targets are those that PEFT has for the teacher's type."""
    lm, ids = hybrid(to="gka"), tokens()
    before = lm(ids).logits
    lm = peft.get_peft_model(lm, peft.LoraConfig(task_type="CAUSAL_LM", r=2, init_lora_weights=False))
    assert lm.peft_config["default"].target_modules == {"q_proj", "v_proj"}
    lm.train()(input_ids=ids, labels=ids).loss.backward()
    learning = [name for name, p in lm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0]
    assert len(learning) == 2 * 2 * 4 and all("lora_" in name for name in learning)
    wanted = lm.eval()(input_ids=ids).logits
    assert not torch.allclose(wanted, before, atol=1e-3)
    lm.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(hybrid(to="gka"), tmp_path)
    assert torch.equal(loaded(input_ids=ids).logits, wanted)
    assert torch.equal(
        *(loaded.generate(input_ids=ids, max_new_tokens=4, do_sample=False, use_cache=c) for c in (True, False))
    )
    torch.testing.assert_close(loaded.merge_and_unload()(ids).logits, wanted, rtol=1e-3, atol=2e-4)


def test_all_linear_adapters_leave_the_empty_projections_of_a_memory_alone():
    lm = peft.get_peft_model(hybrid(to="gka"), peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear"))
    lm.train()(input_ids=tokens(), labels=tokens()).loss.backward()
    assert all(p.grad is not None for p in lm.parameters() if p.requires_grad)
