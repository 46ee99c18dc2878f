"""TRL's SFTTrainer: the loss of packed documents is that of the same documents alone."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from fastweights.layers import MIXERS

from .small import HYBRID, lm, passages, settings, tokenizer

FORMS = {
    "rows": {},
    "padding_free": {"padding_free": True},
    "packed": {"packing": True, "max_length": 64},
    "packed by wrapping": {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
}


def trainer_of(model, folder, **options):
    data = Dataset.from_dict({"text": passages(24)})
    words = tokenizer()
    words.pad_token = words.eos_token
    return SFTTrainer(model, settings(SFTConfig, folder, **options), train_dataset=data, processing_class=words)


def documents(batch) -> list[torch.Tensor]:
    """The documents of a collated batch, each with the tokens that its own row holds."""
    ids = batch["input_ids"]
    if "attention_mask" in batch:
        return [row[mask.bool()] for row, mask in zip(ids, batch["attention_mask"])]
    starts = (batch["position_ids"][0] == 0).nonzero()[:, 0].tolist()
    return [ids[0, start:end] for start, end in zip(starts, [*starts[1:], ids.shape[1]])]


def loss_alone(model, batch) -> torch.Tensor:
    """The mean over all tokens but the first of each document, each of which is read alone."""
    losses = [F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="none") for one in documents(batch)]
    return torch.cat(losses).mean()


@pytest.mark.parametrize("form", FORMS)
def test_loss_and_gradients_are_those_of_the_documents_alone(tmp_path, form):
    model = lm()
    trainer = trainer_of(copy.deepcopy(model), tmp_path, **FORMS[form], gradient_checkpointing=False)
    batch = next(iter(trainer.get_train_dataloader()))
    assert len(documents(batch)) > (1 if form == "packed by wrapping" else 3)
    trainer.model.train()
    found = trainer.compute_loss(trainer.model, dict(batch))
    wanted = loss_alone(model.train(), batch)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    found.backward()
    wanted.backward()
    for name, parameter in model.named_parameters():
        gradient = trainer.model.get_parameter(name).grad
        assert (gradient - parameter.grad).norm() <= 1e-4 * parameter.grad.norm() + 1e-7, name


@pytest.mark.parametrize("mixer", MIXERS)
def test_packed_documents_of_every_mixer(tmp_path, mixer):
    trainer = trainer_of(lm(mixer), tmp_path, packing=True, max_length=48, gradient_checkpointing=False)
    batch = next(iter(trainer.get_train_dataloader()))
    with torch.no_grad():
        found = trainer.compute_loss(trainer.model.train(), dict(batch))
        torch.testing.assert_close(found, loss_alone(lm(mixer).train(), batch), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_it_trains_with_checkpointed_layers_and_the_folder_loads_again(tmp_path, form):
    trainer = trainer_of(lm(), tmp_path, **FORMS[form], max_steps=6)
    assert trainer.args.gradient_checkpointing
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    trainer.save_model(tmp_path / "model")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.arange(20)[None]
    assert torch.equal(loaded(ids).logits, trainer.model.eval()(ids).logits)
    assert loaded.config.use_cache and loaded.config.mixer == HYBRID


def test_evaluation_and_accumulation(tmp_path):
    """The logged loss is a mean over the tokens of all accumulated batches."""
    model = lm()
    trainer = trainer_of(
        copy.deepcopy(model),
        tmp_path,
        padding_free=True,
        gradient_accumulation_steps=3,
        max_steps=1,
        train_sampling_strategy="sequential",
    )
    batches = [batch for batch, _ in zip(trainer.get_train_dataloader(), range(3))]
    losses = [
        F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="none")
        for b in batches
        for one in documents(b)
    ]
    trainer.train()
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert abs(first - torch.cat(losses).mean().item()) < 2e-3
