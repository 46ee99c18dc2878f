"""TRL's RewardTrainer: a reward model orders what it was trained on, from its folder too."""

from __future__ import annotations

import peft
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForSequenceClassification
from trl import RewardConfig, RewardTrainer

from fastweights.models import FastWeightsForSequenceClassification

from .small import lm, passages, settings, tokenizer


def pairs() -> Dataset:
    texts = passages(24)
    return Dataset.from_dict(
        {"chosen": [text + " good" for text in texts], "rejected": [text + " poor xq" for text in texts]}
    )


def scores(model, words, texts: list[str], side: str) -> torch.Tensor:
    words.padding_side = side
    batch = words([text + words.eos_token for text in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        return model.eval()(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, 0]


@pytest.mark.parametrize("adapted", [False, True], ids=["in full", "an adapter"])
def test_a_reward_model_orders_the_answers(tmp_path, adapted):
    lm().save_pretrained(tmp_path / "lm")
    words = tokenizer()  # its padding token will be the end-of-text token, with which every answer ends
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=1)
    trainer = RewardTrainer(
        model, settings(RewardConfig, tmp_path / "run", max_steps=16, per_device_train_batch_size=8), train_dataset=pairs(),
        processing_class=words, peft_config=peft.LoraConfig(task_type="SEQ_CLS", r=4) if adapted else None,
    )  # fmt: skip
    assert words.pad_token == words.eos_token
    trainer.train()
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert log[-1]["loss"] < log[0]["loss"] - 0.1
    chosen, rejected = pairs()["chosen"], pairs()["rejected"]
    for side in ("left", "right"):
        found = scores(trainer.model, words, chosen, side)
        assert (found > scores(trainer.model, words, rejected, side)).all()
        alone = torch.cat([scores(trainer.model, words, [text], side) for text in chosen[:4]])
        torch.testing.assert_close(found[:4], alone, rtol=1e-4, atol=1e-4)
    trainer.save_model(tmp_path / "model")
    loaded = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "lm" if adapted else tmp_path / "model", num_labels=1, pad_token_id=words.pad_token_id
    )
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "model") if adapted else loaded
    assert adapted or type(loaded) is FastWeightsForSequenceClassification
    torch.testing.assert_close(scores(loaded, words, chosen, "right"), scores(trainer.model, words, chosen, "right"))
