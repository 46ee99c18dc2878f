"""Labels of texts and of tokens, and answers to questions: what a head says of a text does not depend on padding. Heads are
trained, saved and loaded as everywhere in transformers."""

from __future__ import annotations

import json

import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Trainer,
    TrainingArguments,
)

from fastweights import models
from fastweights.models.loading import load_language_model

from ..evaluation.small import tokenizer
from .mixers import few_mixers
from .small import HYBRID, VOCABULARY, config, model, tokens

HEADS = {
    "sequence": AutoModelForSequenceClassification,
    "token": AutoModelForTokenClassification,
    "question": AutoModelForQuestionAnswering,
}
LENGTHS = (12, 7, 3)
PAD = 0


def head(kind: str, mixer="gdn", **options):
    torch.manual_seed(0)
    return HEADS[kind].from_config(config(mixer, **{"num_labels": 3, "initializer_range": 0.2, **options})).eval()


def texts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def padded(rows: list[torch.Tensor], side: str, pad: int = PAD) -> tuple[torch.Tensor, torch.Tensor]:
    fill = {"batch_first": True, "padding_side": side}
    ids = torch.nn.utils.rnn.pad_sequence(rows, padding_value=pad, **fill)
    return ids, torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], **fill)


def answers(outputs) -> list[torch.Tensor]:
    return [outputs[name] for name in ("logits", "start_logits", "end_logits") if name in outputs]


def labels(kind: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a head learns from the last token: its class, the class of each token, the places of the two largest tokens."""
    if kind == "sequence":
        return {"labels": ids[:, -1] % 3}
    if kind == "token":
        return {"labels": ids % 3}
    return {"start_positions": ids.argmax(1), "end_positions": ids.argmin(1)}


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@few_mixers(HYBRID)
def test_a_text_gets_the_same_alone_and_padded(mixer):
    lm, rows = head("sequence", mixer), texts()
    wanted = torch.cat([lm(row[None]).logits for row in rows])
    for side in ("left", "right"):
        ids, mask = padded(rows, side)
        close(lm(ids, attention_mask=mask).logits, wanted)
    lm.train()
    found = lm(ids, attention_mask=mask, labels=torch.tensor([0, 1, 2]))
    found.loss.backward()
    close(found.loss, F.cross_entropy(wanted, torch.tensor([0, 1, 2])))
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lm.parameters())
    assert lm.score.weight.grad.abs().sum() > 0 and lm.model.embed_tokens.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["token", "question"])
def test_every_token_gets_the_same_alone_and_padded(kind, side):
    lm, rows = head(kind, HYBRID), texts()
    ids, mask = padded(rows, side)
    for found, *alone in zip(answers(lm(ids, attention_mask=mask)), *(answers(lm(row[None])) for row in rows)):
        for row, tokens_of_row, wanted in zip(found, mask.bool(), alone):
            close(row[tokens_of_row], wanted[0])


def test_the_last_token_is_found_in_text_that_ends_with_the_padding_token():
    """Its end-of-text token often is the padding token too. The mask tells them apart; without one the last other token is
    taken, as in transformers."""
    lm, rows = head("sequence", pad_token_id=5, eos_token_id=5), texts()
    ended = [torch.cat([row.masked_fill(row == 5, 6), torch.tensor([5, 5])]) for row in rows]
    for side in ("left", "right"):
        ids, mask = padded(ended, side, pad=5)
        close(
            lm(ids, attention_mask=mask).logits,
            torch.cat([lm(row[None], torch.ones(1, len(row))).logits for row in ended]),
        )
    ids, _ = padded(ended, "right", pad=5)
    close(lm(ids).logits, torch.cat([lm(row[None, :-2], torch.ones(1, len(row) - 2)).logits for row in ended]))


@pytest.mark.parametrize("pad", [None, PAD])
def test_without_a_mask_and_with_embeddings(pad):
    lm, rows = head("sequence", pad_token_id=pad), texts()
    wanted = torch.cat([lm(row[None], torch.ones(1, len(row))).logits for row in rows])
    if pad is not None:
        close(lm(padded(rows, "right")[0]).logits, wanted)
    several = torch.stack([rows[0], rows[0].flip(0)])
    close(lm(several).logits[:1], wanted[:1])
    ids, mask = padded(rows, "left")
    close(lm(inputs_embeds=lm.get_input_embeddings()(ids), attention_mask=mask).logits, wanted)


def test_a_cache_continues_a_text():
    lm, ids = head("sequence", HYBRID), texts()[0][None]
    cache = lm(ids[:, :8]).past_key_values
    close(lm(ids[:, 8:], past_key_values=cache).logits, lm(ids).logits)


@pytest.mark.parametrize(
    "options, given, wanted",
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0]), lambda x, y: F.mse_loss(x[:, 0], y)),
        ({"num_labels": 1}, torch.tensor([[0.5], [-1.0]]), lambda x, y: F.mse_loss(x, y)),
        ({"problem_type": "regression"}, torch.randn(2, 3), F.mse_loss),
        ({}, torch.tensor([2, 0]), F.cross_entropy),
        ({}, torch.tensor([2, -100]), F.cross_entropy),
        ({}, torch.tensor([[1.0, 0, 1], [0, 0, 1]]), F.binary_cross_entropy_with_logits),
        ({"problem_type": "multi_label_classification"}, torch.ones(2, 3), F.binary_cross_entropy_with_logits),
    ],
)
def test_losses_of_texts(options, given, wanted):
    lm, ids = head("sequence", **options), tokens()
    found = lm(ids, labels=given)
    torch.testing.assert_close(found.loss, wanted(found.logits, given))


def test_losses_of_tokens_and_answers():
    lm, ids = head("token"), tokens()
    given = (ids % 3).masked_fill(ids < 9, -100)
    found = lm(ids, labels=given)
    torch.testing.assert_close(found.loss, F.cross_entropy(found.logits.flatten(0, 1), given.flatten()))
    lm = head("question")
    start, end = torch.tensor([3, 19]), torch.tensor([18, 0])
    found = lm(ids, start_positions=start, end_positions=end)
    losses = F.cross_entropy(found.start_logits, start, ignore_index=19), F.cross_entropy(found.end_logits, end)
    torch.testing.assert_close(found.loss, sum(losses) / 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", HEADS)
def test_trainer_learns_and_the_folder_loads_again(tmp_path, kind):
    """From a language model's folder, with its gradients accumulated, and back into a language model."""
    model(tie_word_embeddings=True).save_pretrained(tmp_path / "lm")
    lm, info = HEADS[kind].from_pretrained(tmp_path / "lm", num_labels=3, pad_token_id=PAD, output_loading_info=True)
    assert {name.split(".")[0] for name in info["missing_keys"]} == {"qa_outputs" if kind == "question" else "score"}
    close(lm.model(tokens())[0], model(tie_word_embeddings=True).model(tokens())[0])
    ids = tokens(16, 6).clamp_min(1)
    rows = [{name: value[0] for name, value in {"input_ids": row, **labels(kind, row)}.items()} for row in ids.split(1)]
    arguments = TrainingArguments(
        tmp_path / "run", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=25, learning_rate=3e-2,
        report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1, gradient_checkpointing=True, save_strategy="no",
    )  # fmt: skip
    shapes = []

    def metrics(prediction):
        shapes.extend(
            np.shape(part) for part in (prediction.predictions if kind == "question" else [prediction.predictions])
        )
        return {"count": len(shapes)}

    trainer = Trainer(lm, arguments, train_dataset=rows, eval_dataset=rows, compute_metrics=metrics)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.7 * before
    assert shapes[-1] == {"sequence": (16, 3), "token": (16, 6, 3), "question": (16, 6)}[kind]
    first = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert abs(first - before) < 0.5 * before  # a mean over the accumulated batches, not their sum
    trainer.save_model(tmp_path / "trained")
    loaded = HEADS[kind].from_pretrained(tmp_path / "trained")
    assert type(loaded) is type(lm) and loaded.config.use_cache and loaded.config.pad_token_id == PAD
    for found, wanted in zip(answers(loaded(ids)), answers(lm.eval()(ids))):
        assert torch.equal(found, wanted)
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    assert torch.equal(back.model(ids)[0], lm.model(ids)[0])
    assert torch.equal(AutoModel.from_pretrained(tmp_path / "trained")(ids)[0], lm.model(ids)[0])


@pytest.mark.parametrize("kind", HEADS)
def test_adapters_train_the_head_in_full(tmp_path, kind):
    task = {"sequence": "SEQ_CLS", "token": "TOKEN_CLS", "question": "QUESTION_ANS"}[kind]
    adapters = peft.LoraConfig(task_type=task, r=2, init_lora_weights=False)
    lm, ids = peft.get_peft_model(head(kind, HYBRID), adapters), tokens()
    lm.train()(input_ids=ids, attention_mask=torch.ones_like(ids), **labels(kind, ids)).loss.backward()
    learning = {name for name, p in lm.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert learning == {name for name, p in lm.named_parameters() if p.requires_grad}
    assert any("modules_to_save" in name for name in learning) and any("lora_A" in name for name in learning)
    lm.eval().save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(head(kind, HYBRID), tmp_path)
    for found, wanted in zip(answers(loaded(input_ids=ids)), answers(lm(input_ids=ids))):
        assert torch.equal(found, wanted)
    with torch.no_grad():
        for found, wanted in zip(answers(loaded.merge_and_unload()(ids)), answers(lm(input_ids=ids))):
            close(found, wanted)


def test_labels_are_saved_by_name(tmp_path):
    names = {0: "bad", 1: "so-so", 2: "good"}
    head("sequence", id2label=names, label2id={name: n for n, name in names.items()}).save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.id2label == names and loaded.config.label2id["good"] == 2 and loaded.num_labels == 3
    assert AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=5, ignore_mismatched_sizes=True
    ).score.weight.shape == (5, 16)


def test_dropout_of_token_labels():
    assert [head("token", **options).dropout.p for options in ({}, {"classifier_dropout": 0.0})] == [0.1, 0.0]


@pytest.mark.parametrize("kind", HEADS)
def test_the_card_and_the_configuration_say_how_to_load(tmp_path, kind):
    lm = head(kind)
    tokenizer().save_pretrained(tmp_path)
    lm.save_pretrained(tmp_path)
    auto = HEADS[kind].__name__
    assert json.loads((tmp_path / "config.json").read_text())["how_to_load"].endswith(f"{auto}.from_pretrained")
    card = (tmp_path / "README.md").read_text()
    code = card.split("```python\n")[1].split("```")[0]
    task = {"sequence": "text-classification", "token": "token-classification", "question": "question-answering"}[kind]
    assert f"pipeline_tag: {task}\n" in card
    assert "causal language model" not in card and auto in code
    with pytest.raises(ValueError, match=f"must hold a language model, got a model for .*; load it with {auto}"):
        load_language_model(tmp_path)


def test_documents_may_be_packed_where_every_token_has_a_label():
    lm, rows = head("token", HYBRID), texts()
    starts = torch.tensor([0, *np.cumsum(LENGTHS)])
    packed = lm(torch.cat(rows)[None], cu_seqlens=starts).logits
    close(packed, torch.cat([lm(row[None]).logits for row in rows], 1))


EDGES = torch.tensor([0, 9, 19])
RESTARTS = torch.cat([torch.arange(9), torch.arange(10)])[None]


@pytest.mark.parametrize("kind", ["sequence", "question"])
@pytest.mark.parametrize(
    "name, given",
    [
        ("cu_seqlens", {"cu_seqlens": EDGES}),
        ("cu_seq_lens_q", {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES}),
        ("seq_idx", {"seq_idx": torch.tensor([[0] * 9 + [1] * 10])}),
        ("position_ids", {"position_ids": RESTARTS}),
    ],
)
def test_packed_documents_are_refused_where_a_row_has_one_label(kind, name, given):
    with pytest.raises(ValueError, match=f"{name} must"):
        head(kind)(tokens(1), **given)


def test_positions_of_padded_texts_are_taken():
    lm, rows = head("sequence", HYBRID), texts()
    ids, mask = padded(rows, "left")
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
    close(lm(ids, attention_mask=mask, position_ids=positions).logits, lm(ids, attention_mask=mask).logits)


@pytest.mark.parametrize(
    "kind, error, message, given",
    [
        ("sequence", ValueError, "labels must be from 0 to 2", {"labels": torch.tensor([0, 3])}),
        ("sequence", ValueError, r"labels must have the shape of the input, \[2\]", {"labels": torch.tensor([0])}),
        ("sequence", TypeError, "labels must be a tensor", {"labels": [0, 1]}),
        ("sequence", ValueError, r"labels must be \[2, 3\]", {"labels": torch.ones(2)}),
        ("sequence", ValueError, "attention_mask must show a token in every row, got none in row 1",
         {"attention_mask": torch.tensor([[1] * 19, [0] * 19])}),
        ("sequence", TypeError, "colour", {"colour": 1}),
        ("sequence", ValueError, "output_attentions must be False", {"output_attentions": True}),
        ("token", ValueError, "labels must be from 0 to 2", {"labels": torch.full((2, 19), 3)}),
        ("token", ValueError, "labels must be int64", {"labels": torch.ones(2, 19)}),
        ("token", ValueError, r"labels must have the shape of the input, \[2, 19\]", {"labels": torch.ones(2, 3).long()}),
        ("question", ValueError, "end_positions must be given with its counterpart", {"start_positions": torch.tensor([0, 1])}),
        ("question", ValueError, "start_positions must be int64",
         {"start_positions": torch.ones(2), "end_positions": torch.ones(2).long()}),
        ("question", ValueError, "end_positions must be columns of the row, from 0, got -1",
         {"start_positions": torch.tensor([0, 1]), "end_positions": torch.tensor([0, -1])}),
    ],
)  # fmt: skip
def test_bad_calls_are_refused(kind, error, message, given):
    with pytest.raises(error, match=message):
        head(kind)(tokens(), **given)


def test_a_reward_needs_numbers():
    with pytest.raises(
        ValueError, match="labels must be floating-point for problem_type 'regression', got torch.int64"
    ):
        head("sequence", num_labels=1)(tokens(), labels=torch.tensor([0, 1]))


@pytest.mark.slow
def test_compiled_without_breaks():
    lm, ids = head("sequence", HYBRID), tokens()
    compiled = torch.compile(lm, fullgraph=True, backend="eager")
    close(compiled(ids, use_cache=False).logits, lm(ids).logits)


def test_names():
    for name in ("SequenceClassification", "TokenClassification", "QuestionAnswering"):
        assert f"FastWeightsFor{name}" in models.__all__ and getattr(models, f"FastWeightsFor{name}")
