"""TRL's SFTTrainer trains on packed and on padded texts as on each text alone."""

from __future__ import annotations

import pytest
import torch

from fastweights.data.text import TextTokenizer
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
pytestmark = pytest.mark.slow

TEXTS = ["one two three", "two", "three three one two one", "four five one", "five", "one one"] * 2
TOKENIZER = TextTokenizer(vocab_size=300).train(["one two three four five " * 20])
MIXERS = ["pgdn", {"name": "softmax", "window": 3}, "softmax", "mamba2"]
RATE = 0.5


def model(**options) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=300, hidden_size=16, num_hidden_layers=len(MIXERS), num_heads=2, mixer=MIXERS,
        eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, **options,
    )  # fmt: skip
    return FastWeightsForCausalLM(config).double()


@pytest.fixture(scope="module")
def truth():
    """The mean over the predicted tokens of texts that are read alone, and the weights after a step of gradient descent."""
    lm, losses = model(), []
    for text in TEXTS:
        ids = torch.tensor([*TOKENIZER(text)["input_ids"], TOKENIZER.eos_token_id])
        losses.append(torch.nn.functional.cross_entropy(lm(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: (p - RATE * p.grad).detach() for name, p in lm.named_parameters()}


@pytest.mark.parametrize("chunked_loss", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"packing": True, "max_length": 64},  # one row
        {"packing": True, "max_length": 16, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"padding_free": True, "max_length": None},
        {"padding_free": True, "max_length": None, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
        {"padding_free": True, "max_length": None, "pad_to_multiple_of": 32},
        {"max_length": 64},
        {"max_length": 64, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 3},
    ],
    ids=str,
)
def test_a_step_is_that_of_texts_alone(tmp_path, truth, options, chunked_loss):
    settings = {
        "per_device_train_batch_size": len(TEXTS), "max_steps": 1, "learning_rate": RATE, "lr_scheduler_type": "constant",
        "optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, "report_to": [], "use_cpu": True, "bf16": False,
        "disable_tqdm": True, "save_strategy": "no", "gradient_checkpointing": False,
    }  # fmt: skip
    trainer = trl.SFTTrainer(
        model(chunked_loss=chunked_loss),
        trl.SFTConfig(str(tmp_path), **{**settings, **options}),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=TOKENIZER,
    )
    if options.get("packing"):
        batches = list(trainer.get_train_dataloader())
        assert len(batches) == options.get("gradient_accumulation_steps", 1)  # a step reads every text
        assert all({"seq_idx", "position_ids", "cu_seq_lens_q"} <= set(batch) for batch in batches)
    trainer.train()
    logged = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert abs(logged - truth[0]) < 1e-6
    got = {name: p.detach() for name, p in trainer.model.named_parameters()}
    torch.testing.assert_close(got, truth[1], rtol=1e-5, atol=1e-6)
