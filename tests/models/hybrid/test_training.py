"""Hybrids in transformers' Trainer, with checkpointed activations, compiled, and with weights that accelerate keeps elsewhere."""

from __future__ import annotations

import accelerate
import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from fastweights.layers.weight_decay import undecayed_parameters

from .small import CLOSE, hybrid, tokens

ROWS = [{"input_ids": row, "labels": row} for row in tokens(8, 12).tolist()]


def trainer(lm, folder, **changes) -> Trainer:
    arguments = TrainingArguments(
        folder, **{
            "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 12, "learning_rate": 1e-2,
            "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "save_strategy": "no", **changes,
        },
    )  # fmt: skip
    return Trainer(lm, arguments, train_dataset=ROWS, data_collator=DataCollatorWithFlattening())


@pytest.mark.slow
def test_trainer_takes_packed_rows(tmp_path):
    """The loss is a mean over the labels that tokens predict, 11 of the 12 of a row, in all micro-batches of a step."""
    lm = hybrid("qwen3", "gka")
    with torch.no_grad():
        wanted = torch.stack(
            [lm(tokens(8, 12)[row : row + 1], labels=tokens(8, 12)[row : row + 1]).loss for row in range(8)]
        )
    running = trainer(lm, tmp_path)
    running.train()
    losses = [entry["loss"] for entry in running.state.log_history if "loss" in entry]
    assert losses[0] == pytest.approx(wanted.mean().item(), rel=1e-4)
    assert losses[-1] < losses[0] - 0.5
    assert not lm.config.use_cache
    running.save_model(tmp_path / "model")
    loaded = type(lm).from_pretrained(tmp_path / "model")
    assert loaded.config.use_cache and (tmp_path / "model" / "README.md").is_file()


def test_trainer_leaves_parameters_of_memories_undecayed(tmp_path):
    lm = hybrid("qwen3", "kda")
    decayed = set(trainer(lm, tmp_path).get_decay_parameter_names(lm))
    alone = undecayed_parameters(lm)
    assert any("self_attn.memory" in name and "A_log" in name for name in alone) and not alone & decayed
    assert "model.layers.0.self_attn.q_proj.weight" in decayed


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_activations_give_the_same_gradients(reentrant):
    ids, gradients = tokens(), []
    for checkpointed in (False, True):
        lm = hybrid("gemma3_text", "pgdn").train()
        if checkpointed:
            lm.gradient_checkpointing_enable({"use_reentrant": reentrant})
        lm(ids, labels=ids, attention_mask=torch.tensor([[0] * 4 + [1] * 7, [1] * 11])).loss.backward()
        gradients.append({name: p.grad for name, p in lm.named_parameters()})
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@torch.no_grad()
def test_with_weights_that_accelerate_keeps_elsewhere(tmp_path):
    lm, ids = hybrid("qwen3", "gka"), tokens()
    wanted, generated = lm(ids).logits, lm.generate(ids, max_new_tokens=3, do_sample=False)
    lm.save_pretrained(tmp_path)
    loaded = type(lm).from_pretrained(tmp_path, device_map={"": "cpu"})
    assert torch.equal(loaded(ids).logits, wanted)
    offloaded = accelerate.cpu_offload(lm, execution_device=torch.device("cpu"))
    assert torch.equal(offloaded(ids).logits, wanted)
    assert torch.equal(offloaded.generate(ids, max_new_tokens=3, do_sample=False), generated)


@pytest.mark.slow
@torch.no_grad()
def test_compiled():
    lm, ids = hybrid("llama", "gka"), tokens()
    wanted = lm(ids, use_cache=False).logits
    torch.testing.assert_close(torch.compile(lm, backend="aot_eager")(ids, use_cache=False).logits, wanted, **CLOSE)
