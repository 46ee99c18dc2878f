"""transformers' Trainer: trains on the loss alone, and gets logits where metrics are computed from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from .small import HYBRID, VOCABULARY, model, tokens

ROWS = [{"input_ids": row, "labels": row} for row in tokens(8, 12)]
# Trainer divides the losses of the 11 predicted tokens of a row by the labels that it counts: before 5.10.1 also the first one.
COUNTED = 12 if Version(transformers.__version__) < Version("5.10.1") else 11


@pytest.mark.parametrize("checkpointed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_trains_and_evaluates(tmp_path, checkpointed):
    shapes = []

    def accuracy(prediction):
        shapes.append(prediction.predictions.shape)
        guessed, wanted = prediction.predictions[:, :-1].argmax(-1), prediction.label_ids[:, 1:]
        return {"accuracy": float(np.mean(guessed == wanted))}

    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=20, learning_rate=2e-2,
        gradient_checkpointing=checkpointed, report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1,
    )  # fmt: skip
    trainer = Trainer(model(HYBRID), arguments, train_dataset=ROWS, eval_dataset=ROWS, compute_metrics=accuracy)
    before = trainer.evaluate()
    trainer.train()
    after = trainer.evaluate()
    assert shapes == [(8, 12, VOCABULARY)] * 2
    assert after["eval_loss"] < before["eval_loss"] - 0.5
    assert after["eval_accuracy"] > before["eval_accuracy"]
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert abs(first * COUNTED / 11 - np.log(VOCABULARY)) < 0.1  # a mean over the accumulated batches, not their sum
    assert torch.isfinite(torch.tensor(after["eval_loss"]))


def test_a_saved_model_returns_a_cache(tmp_path):
    """transformers' Trainer switches the cache off for training; without one, decoding would read everything again."""
    arguments = TrainingArguments(
        tmp_path / "run", max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True, save_steps=1
    )
    trainer = Trainer(model(HYBRID), arguments, train_dataset=ROWS)
    assert not trainer.model.config.use_cache
    trainer.train()
    trainer.save_model(tmp_path / "model")
    for folder in (tmp_path / "model", tmp_path / "run" / "checkpoint-1"):
        loaded = AutoModelForCausalLM.from_pretrained(folder)
        assert loaded.config.use_cache and loaded.generation_config.use_cache is not False
        assert loaded(tokens()).past_key_values is not None
    without = model(use_cache=False)
    without.save_pretrained(tmp_path / "without")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "without")(tokens()).past_key_values is None
