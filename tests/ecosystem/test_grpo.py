"""TRL's GRPOTrainer, which generates with the model while it trains it."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

from .small import HYBRID, lm, passages, settings, tokenizer

SAMPLES, LENGTH = 4, 8


@pytest.mark.parametrize("mixer", ["gdn", HYBRID, "softmax"], ids=str)
def test_grpo(tmp_path, mixer):
    """Rewards, advantages and log-probabilities are those of the completions, and the model moves towards the reward."""
    seen: list[tuple[list[str], list[float]]] = []

    def reward(completions, **_):
        scores = [float(sum(text.count(letter) for letter in "eao")) for text in completions]
        seen.append((completions, scores))
        return scores

    words = tokenizer()
    words.pad_token = words.eos_token
    words.padding_side = "left"
    options = settings(
        GRPOConfig, tmp_path, num_generations=SAMPLES, per_device_train_batch_size=2 * SAMPLES, max_completion_length=LENGTH,
        max_steps=4, beta=0.0, temperature=1.0,
    )  # fmt: skip
    trainer = GRPOTrainer(
        lm(mixer), reward, options, train_dataset=Dataset.from_dict({"prompt": passages(8)}), processing_class=words
    )
    made = []
    original = trainer._generate_and_score_completions

    def recording(inputs):
        made.append((original(inputs), {name: p.detach().clone() for name, p in trainer.model.named_parameters()}))
        return made[-1][0]

    trainer._generate_and_score_completions = recording
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert len(made) == len(seen) == 4
    for (batch, _), (completions, scores) in zip(made, seen):
        assert len(completions) == 2 * SAMPLES and batch["completion_ids"].shape[1] <= LENGTH
        groups = torch.tensor(scores).view(-1, SAMPLES)
        wanted = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
        torch.testing.assert_close(batch["advantages"].cpu(), wanted.flatten(), rtol=1e-4, atol=1e-4)
    logged = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert logged == pytest.approx([sum(scores) / len(scores) for _, scores in seen], abs=1e-4)
    moved = [name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])]
    assert len(moved) > 0.9 * len(before)
    trainer.save_model(tmp_path / "model")
    loaded, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "model"), torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits) and loaded.config.use_cache


def test_log_probabilities_of_padded_prompts(tmp_path):
    """The prompts of a group have different lengths and are padded on the left, the completions on the right."""
    words = tokenizer()
    words.pad_token = words.eos_token
    trainer = GRPOTrainer(
        lm(), lambda completions, **_: [0.0] * len(completions),
        settings(GRPOConfig, tmp_path, num_generations=2, per_device_train_batch_size=8, max_completion_length=LENGTH),
        train_dataset=Dataset.from_dict({"prompt": passages(8)}), processing_class=words,
    )  # fmt: skip
    trainer.model.train()
    batch = trainer._generate_and_score_completions([{"prompt": text} for text in passages(4) for _ in range(2)])
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    assert (batch["prompt_mask"][:, 0] == 0).any()
    with torch.no_grad():
        logits = trainer.model.eval()(ids, attention_mask=mask).logits
        for row, one, shown, done in zip(logits, ids, mask.bool(), batch["completion_mask"]):
            alone = lm()(one[shown][None]).logits[0]
            torch.testing.assert_close(row[shown], alone, rtol=1e-4, atol=1e-4)
            assert done.sum() >= 1
