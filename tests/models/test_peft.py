"""LoRA adapters of the peft library on the projections."""

from __future__ import annotations

import peft
import pytest
import torch

from fastweights.models.configuration import LORA_TARGETS
from tests.fast_set import fast_where

from .mixers import FEW, every_mixer, is_fast
from .small import HYBRID, model, tokens

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def adapted(targets: str | list[str] = PROJECTIONS, **options):
    lm = model([*HYBRID, "pkda"])
    torch.manual_seed(0)
    return peft.get_peft_model(
        lm, peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=targets, init_lora_weights=False, **options)
    )


@pytest.mark.parametrize("targets", [PROJECTIONS, "all-linear"], ids=["projections", "all-linear"])
def test_only_the_adapters_learn(targets):
    lm, ids = adapted(targets).train(), tokens()
    lm(input_ids=ids, labels=ids).loss.backward()
    learning = {name for name, p in lm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learning == {name for name, p in lm.named_parameters() if p.requires_grad}
    assert all("lora_" in name for name in learning)
    layers = lm.base_model.model.model.layers
    assert len(learning) >= 2 * len(PROJECTIONS) * len(layers)


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@every_mixer()
def test_every_mixer_takes_adapters_and_gives_them_back(mixer):
    lm = model(mixer).double().train()
    adapters = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear", init_lora_weights=False)
    lm, ids = peft.get_peft_model(lm, adapters), tokens()
    lm(input_ids=ids, labels=ids).loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in lm.parameters() if p.requires_grad)
    wanted = lm.eval()(input_ids=ids).logits
    torch.testing.assert_close(lm.merge_and_unload()(ids).logits, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("mixer", ["pla", "pgla", "pmamba2", "pmamba2-key", "pdn", "pgdn", "pkda"])
def test_a_preconditioner_is_trained_in_full(mixer):
    """PEFT wraps the module. The copy in the wrapper is used, and gives what the module gave."""
    lm, ids = model(mixer).eval(), tokens()
    wanted = lm(ids).logits
    lm = peft.get_peft_model(lm, peft.LoraConfig(task_type="CAUSAL_LM", r=2, modules_to_save=["preconditioner"]))
    torch.testing.assert_close(lm.eval()(input_ids=ids).logits, wanted)
    lm(input_ids=ids, labels=ids).loss.backward()
    copies = [p for name, p in lm.named_parameters() if "modules_to_save" in name]
    assert copies and all(p.grad is not None and p.grad.abs().sum() > 0 for p in copies)


@every_mixer()
def test_every_mixer_has_default_targets(mixer):
    lm = peft.get_peft_model(model(mixer), peft.LoraConfig(task_type="CAUSAL_LM", r=2))
    layers = lm.base_model.model.model.layers
    for layer in layers:
        adapted = [name for name, _ in layer.mixer.named_parameters() if "lora_" in name]
        assert {"o_proj", "out_proj"} & {name.split(".lora")[0].split(".")[-1] for name in adapted}
        assert {"q_proj", "qk_proj", "in_proj"} & {name.split(".lora")[0].split(".")[-1] for name in adapted}
        assert not any("lora_" in name for name, _ in layer.mlp.named_parameters())


def test_default_targets_are_known_where_peft_comes_last(monkeypatch):
    """After the model was made: PEFT's table is filled when it asks the model for its configuration."""
    lm = model()
    monkeypatch.delitem(peft.utils.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING, "fastweights", raising=False)
    adapters = peft.get_peft_model(lm, peft.LoraConfig(r=2)).peft_config["default"]
    assert adapters.target_modules == set(LORA_TARGETS)


def test_merged_and_reloaded_say_the_same(tmp_path):
    lm, ids = adapted().eval(), tokens()
    wanted = lm(input_ids=ids).logits
    assert not torch.allclose(wanted, model([*HYBRID, "pkda"])(ids).logits, atol=1e-3)
    lm.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(model([*HYBRID, "pkda"]), tmp_path)
    assert torch.equal(loaded(input_ids=ids).logits, wanted)
    torch.testing.assert_close(lm.merge_and_unload()(ids).logits, wanted, rtol=1e-4, atol=1e-5)


def test_an_adapter_on_the_output_layer_reaches_the_loss():
    lm, ids = adapted(["lm_head"]).train(), tokens()
    outputs = lm(input_ids=ids, labels=ids)
    wanted = torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, wanted)
    outputs.loss.backward()
    assert all(p.grad.abs().sum() > 0 for p in lm.parameters() if p.requires_grad)


def test_generation_with_an_adapter():
    lm, ids = adapted().eval(), tokens(2, 7)
    cached, plain = (lm.generate(input_ids=ids, max_new_tokens=5, do_sample=False, use_cache=c) for c in (True, False))
    assert torch.equal(cached, plain)
