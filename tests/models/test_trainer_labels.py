"""transformers' Trainer divides by the labels that are predicted: losses and gradients are means over them, whatever the padding,
the packing and the number of micro-batches of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from fastweights.data.text import TextTokenizer

from .small import HYBRID, VOCABULARY, model, tokens

LENGTHS = (5, 9, 12, 3, 7, 11)
TEXTS = [ids[:length] for ids, length in zip(tokens(6, 12), LENGTHS, strict=True)]
RATE = 0.5


def padded(side: str):
    def collate(rows):
        texts = [row["input_ids"] for row in rows]
        rows = torch.nn.utils.rnn.pad_sequence(texts, True, -1, padding_side=side)
        mask = rows != -1
        return {"input_ids": rows * mask, "attention_mask": mask.long(), "labels": rows.where(mask, -100)}

    return collate


def packed(form: str):
    """Labels that say nothing about where documents begin."""

    def collate(rows):
        texts = [row["input_ids"] for row in rows]
        row, lengths = torch.cat(texts)[None], torch.tensor([len(text) for text in texts])
        number = torch.arange(len(texts)).repeat_interleave(lengths)[None]
        edges = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
        documents = {
            "cu_seqlens": {"cu_seqlens": edges},
            "cu_seq_lens": {"cu_seq_lens_q": edges.int(), "cu_seq_lens_k": edges.int()},
            "seq_idx": {"seq_idx": number.int()},
            "mask": {"attention_mask": number + 1},
            "position_ids": {"position_ids": torch.cat([torch.arange(int(length)) for length in lengths])[None]},
        }
        return {"input_ids": row, "labels": row.clone(), **documents[form]}

    return collate


BATCHES = {
    **{f"padded on the {side}": padded(side) for side in ("left", "right")},
    **{form: packed(form) for form in ("cu_seqlens", "cu_seq_lens", "seq_idx", "mask", "position_ids")},
}


def trainer(lm, folder, batch_size, collate, **options):
    arguments = TrainingArguments(
        folder, per_device_train_batch_size=batch_size, gradient_accumulation_steps=len(TEXTS) // batch_size, max_steps=1,
        learning_rate=RATE, lr_scheduler_type="constant", optim="sgd", max_grad_norm=0.0, logging_steps=1, report_to=[],
        disable_tqdm=True, use_cpu=True, save_strategy="no", remove_unused_columns=False,
        per_device_eval_batch_size=len(TEXTS), **options,
    )  # fmt: skip
    rows = [{"input_ids": text} for text in TEXTS]
    return Trainer(lm, arguments, train_dataset=rows, eval_dataset=rows, data_collator=collate)


@pytest.fixture(scope="module")
def truth():
    """The mean over the predicted tokens of texts that are read alone, and the weights after a step of gradient descent."""
    lm = model(HYBRID).double()
    losses = []
    for text in TEXTS:
        logits = lm(text[None]).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, text[1:], reduction="none"))
    loss = torch.cat(losses).mean()
    loss.backward()
    return loss.item(), {name: (p - RATE * p.grad).detach() for name, p in lm.named_parameters()}


def check(trained, truth):
    loss, weights = truth
    assert abs(trained.evaluate()["eval_loss"] - loss) < 1e-8
    trained.train()
    logged = next(entry["loss"] for entry in trained.state.log_history if "loss" in entry)
    assert abs(logged - loss) < 1e-6
    got = {name: p.detach() for name, p in trained.model.named_parameters()}
    torch.testing.assert_close(got, weights, rtol=1e-7, atol=1e-9)


STEPS = [
    pytest.param(batch, size, marks=() if size == 2 or batch == "padded on the left" else pytest.mark.slow)
    for batch in BATCHES
    for size in (6, 2, 3)
]


@pytest.mark.parametrize(("batch", "batch_size"), STEPS)
def test_a_step_is_that_of_texts_alone(tmp_path, truth, batch, batch_size):
    check(trainer(model(HYBRID).double(), tmp_path, batch_size, BATCHES[batch]), truth)


def test_label_smoothing_and_losses_of_ones_own(tmp_path, truth):
    """They get the labels without those that no token predicts, too."""
    counts = []

    def compute_loss(outputs, labels, num_items_in_batch):
        target = labels[:, 1:]
        counts.append((int((target != -100).sum()), int(num_items_in_batch)))
        return (
            torch.nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), target.flatten(), reduction="sum")
            / num_items_in_batch
        )

    lm = model(HYBRID, chunked_loss=False).double()
    own = trainer(lm, tmp_path, 2, padded("left"))
    own.compute_loss_func = compute_loss
    own.train()
    assert sum(count for count, _ in counts) == counts[0][1] == sum(LENGTHS) - len(LENGTHS)
    got = {name: p.detach() for name, p in own.model.named_parameters()}
    torch.testing.assert_close(got, truth[1], rtol=1e-7, atol=1e-9)
    smoothed = [
        trainer(model(HYBRID).double(), tmp_path, 6, padded(side), label_smoothing_factor=0.1).evaluate()["eval_loss"]
        for side in ("left", "right")
    ]
    assert abs(smoothed[0] - smoothed[1]) < 1e-6


def test_the_labels_of_metrics_stay_as_they_were(tmp_path):
    seen = []
    lm = trainer(model(HYBRID), tmp_path, 6, packed("cu_seqlens"))
    lm.compute_metrics = lambda prediction: seen.append(prediction.label_ids) or {}
    lm.evaluate()
    assert np.array_equal(seen[0], torch.cat(TEXTS)[None])


def test_other_models_are_counted_as_before(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    trainer(model(HYBRID), tmp_path, 6, padded("left"))
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 16)
    llama = LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, **sizes)
    )
    other = trainer(llama, tmp_path, 6, padded("left"))
    batch = padded("left")([{"input_ids": text} for text in TEXTS])
    labels = batch["labels"]
    assert int(other._get_num_items_in_batch([batch], torch.device("cpu"))) in (
        int((labels[:, 1:] != -100).sum()),
        int((labels != -100).sum()),  # before transformers 5.10.1
    )
    assert batch["labels"] is labels


def test_a_model_with_adapters(tmp_path, truth):
    peft = pytest.importorskip("peft")
    lm = peft.get_peft_model(model(HYBRID).double(), peft.LoraConfig(task_type="CAUSAL_LM"))  # adapters begin at zero
    evaluated = trainer(lm, tmp_path, 6, padded("left")).evaluate()
    assert abs(evaluated["eval_loss"] - truth[0]) < 1e-8


def test_a_model_may_be_left_without_the_count(tmp_path):
    """Trainer then takes the mean of each micro-batch."""
    lm = model(HYBRID)
    lm.accepts_loss_kwargs = False
    assert not trainer(lm, tmp_path, 2, padded("left")).model_accepts_loss_kwargs
    assert trainer(model(HYBRID), tmp_path, 2, padded("left")).model_accepts_loss_kwargs


def test_batches_of_another_kind_are_left_alone(tmp_path):
    """Such as the prompts of TRL's GRPOTrainer, and the labels of whole rows."""
    counting = trainer(model(HYBRID), tmp_path, 6, padded("left"))._get_num_items_in_batch
    assert counting([[{"prompt": "one"}]], torch.device("cpu")) is None
    labels = torch.tensor([1, 0, 1])
    batch = {"labels": labels}
    counting([batch], torch.device("cpu"))
    assert batch["labels"] is labels


def test_wrong_documents_are_refused_as_by_the_model(tmp_path):
    def collate(rows):
        return {**packed("cu_seqlens")(rows), "cu_seqlens": [0, 47]}

    with pytest.raises(TypeError, match="cu_seqlens must be an integer tensor"):
        trainer(model(HYBRID), tmp_path, 6, collate).train()


def test_a_tokenizer_of_ones_own_and_the_collator_of_transformers(tmp_path):
    """It pads on the left, where the collator's labels count the first token of every shorter row."""
    tokenizer = TextTokenizer(vocab_size=300).train(["one two three " * 20])
    texts = ["one two three", "two", "three three one two one"]
    rows = [tokenizer(text) for text in texts]
    lm = model(HYBRID, vocab_size=300).double()
    losses = []
    for row in rows:
        ids = torch.tensor(row["input_ids"])
        losses.append(torch.nn.functional.cross_entropy(lm(ids[None]).logits[0, :-1], ids[1:], reduction="none"))
    arguments = TrainingArguments(tmp_path, per_device_eval_batch_size=3, report_to=[], disable_tqdm=True, use_cpu=True)
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
    assert collate([{**row} for row in rows])["attention_mask"][:, -1].all()
    evaluated = Trainer(lm, arguments, eval_dataset=rows, data_collator=collate).evaluate()
    assert abs(evaluated["eval_loss"] - torch.cat(losses).mean().item()) < 1e-8
