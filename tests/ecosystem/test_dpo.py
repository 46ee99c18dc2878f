"""TRL's DPOTrainer: the loss before the first step is log 2, and the chosen answers gain on the rejected ones."""

from __future__ import annotations

import math

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import DPOConfig, DPOTrainer

from .small import lm, passages, settings, tokenizer


def preferences() -> Dataset:
    texts = passages(16)
    return Dataset.from_dict(
        {
            "prompt": texts,
            "chosen": [" the end" + text[:9] for text in texts],
            "rejected": [" xq zz" + text[3:] for text in texts],
        }
    )


@pytest.mark.parametrize("adapted", [False, True], ids=["in full", "an adapter"])
def test_dpo(tmp_path, adapted):
    words = tokenizer()
    words.pad_token = words.eos_token
    lm().save_pretrained(tmp_path / "lm")  # from which the trainer loads what the answers are compared with
    trainer = DPOTrainer(
        AutoModelForCausalLM.from_pretrained(tmp_path / "lm"),
        args=settings(DPOConfig, tmp_path, max_steps=6, per_device_train_batch_size=8),
        train_dataset=preferences(),
        processing_class=words,
        peft_config=peft.LoraConfig(task_type="CAUSAL_LM", r=4) if adapted else None,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert (batch["attention_mask"] == 0).any()
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert abs(log[0]["loss"] - math.log(2)) < 1e-5 and log[-1]["loss"] < math.log(2) - 0.02
    assert log[-1]["rewards/margins"] > 0.05 > abs(log[0]["rewards/margins"])
    if not adapted:
        trainer.save_model(tmp_path / "model")
        loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), torch.arange(20)[None]
        assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)


def test_log_probabilities_are_those_of_the_answers_alone(tmp_path):
    words = tokenizer()
    words.pad_token = words.eos_token
    trainer = DPOTrainer(
        lm(), ref_model=lm(), args=settings(DPOConfig, tmp_path), train_dataset=preferences(), processing_class=words
    )
    batch = next(iter(trainer.get_train_dataloader()))
    labels = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, -100)
    given = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        found = trainer.model.train()(**given, labels=labels, fused_lm_head=True).log_probs.sum(1)
        for ids, mask, wanted_mask, sum_of_logs in zip(*given.values(), batch["completion_mask"], found):
            alone, answer = ids[mask.bool()], wanted_mask[mask.bool()].bool()
            logs = lm()(alone[None]).logits[0, :-1].log_softmax(-1).gather(1, alone[1:, None])[:, 0]
            torch.testing.assert_close(sum_of_logs, logs[answer[1:]].sum(), rtol=1e-4, atol=1e-4)
