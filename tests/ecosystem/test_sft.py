"""TRL's SFTTrainer with packed documents: every mixer, checkpointed layers, and what is saved and loaded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from transformers import AutoModelForCausalLM
from trl import SFTConfig, SFTTrainer

from fastweights.layers import MIXERS

from .small import HYBRID, lm, passages, settings, tokenizer

FORMS = {
    "padded rows": {},
    "padding_free": {"padding_free": True, "max_length": None},
    "packed": {"packing": True, "max_length": 64},
    "packed by wrapping": {"packing": True, "packing_strategy": "wrapped", "max_length": 32},
}


def trainer_of(model, folder, **options):
    data = Dataset.from_dict({"text": passages(24)})
    words = tokenizer()
    words.pad_token = words.eos_token
    return SFTTrainer(model, settings(SFTConfig, folder, **options), train_dataset=data, processing_class=words)


def loss_alone(model, batch) -> torch.Tensor:
    """The mean over all tokens but the first of each packed document, each of which is read alone."""
    documents = batch["input_ids"][0].tensor_split((batch["position_ids"][0] == 0).nonzero()[1:, 0])
    assert len(documents) > 3
    losses = [F.cross_entropy(model(one[None]).logits[0, :-1], one[1:], reduction="none") for one in documents]
    return torch.cat(losses).mean()


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


def test_a_model_is_loaded_from_its_folder(tmp_path):
    lm().save_pretrained(tmp_path / "model")
    trainer = trainer_of(str(tmp_path / "model"), tmp_path / "run", model_init_kwargs={"dtype": "float32"})
    ids = torch.arange(20)[None]
    assert torch.equal(trainer.model.eval()(ids).logits, lm()(ids).logits)
