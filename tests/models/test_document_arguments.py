"""Documents packed as trainers send them (position_ids that start again, seq_idx, cu_seq_lens_q and cu_seq_lens_k) stay apart."""

from __future__ import annotations

from inspect import signature

import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainingArguments

from .mixers import few_mixers
from .small import HYBRID, model, tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MIXED = [*HYBRID, {"name": "softmax", "window": 3}, "gdn"]
LENGTHS = (4, 1, 9, 6)
FORMS = {
    "positions": {},
    "positions from 2": {"position_ids_start": 2},
    "cu_seq_lens": {"return_flash_attn_kwargs": True, "return_position_ids": False},
    "both": {"return_flash_attn_kwargs": True},
    "numbers": {"return_seq_idx": True, "return_position_ids": False},
    "numbers and positions": {"return_seq_idx": True},
    "all": {"return_seq_idx": True, "return_flash_attn_kwargs": True},
}
if "position_ids_start" not in signature(DataCollatorWithFlattening).parameters:  # before transformers 5.15
    del FORMS["positions from 2"]


def documents(lengths=LENGTHS):
    return list(tokens(1, sum(lengths)).split(lengths, 1))


def collated(form: str, lengths=LENGTHS):
    rows = [{"input_ids": ids[0].tolist(), "labels": ids[0].tolist()} for ids in documents(lengths)]
    return DataCollatorWithFlattening(**FORMS[form])(rows)


def gradients(lm):
    return {name: p.grad.clone() for name, p in lm.named_parameters() if p.grad is not None}


def total_loss(lm, lengths=LENGTHS):
    """Summed over the predicted tokens of documents that are read one at a time."""
    return sum(lm(ids, labels=ids, num_items_in_batch=1).loss for ids in documents(lengths) if ids.shape[1] > 1)


@few_mixers(MIXED)
@pytest.mark.parametrize("form", ["positions", pytest.param("both", marks=pytest.mark.slow)])
def test_collated_documents_equal_separate_ones(mixer, form):
    lm, batch = model(mixer, initializer_range=0.2).double(), collated(form)
    packed = lm(**batch, num_items_in_batch=1)
    packed.loss.backward()
    got = gradients(lm)
    lm.zero_grad()
    wanted = total_loss(lm)
    wanted.backward()
    torch.testing.assert_close(packed.loss, wanted, **CLOSE)
    torch.testing.assert_close(got, gradients(lm), rtol=1e-3, atol=1e-4)
    alone = torch.cat([lm(ids).logits for ids in documents()], 1)
    torch.testing.assert_close(packed.logits, alone, **CLOSE)
    together = lm(batch["input_ids"]).logits
    assert (together - alone).abs().max() > 1e-3  # documents that see each other give other logits


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_collator(form):
    lm = model(MIXED)
    packed = lm(**collated(form), num_items_in_batch=1)
    torch.testing.assert_close(packed.loss, total_loss(lm), **CLOSE)
    torch.testing.assert_close(lm.model(**{k: v for k, v in collated(form).items() if k != "labels"}).last_hidden_state,
                               lm(**collated("both"), output_hidden_states=True).hidden_states[-1], **CLOSE)  # fmt: skip


def test_first_tokens_of_documents_are_not_predicted():
    """Whatever the labels say: the collator puts -100 there, others do not."""
    lm, batch = model(MIXED), collated("positions")
    batch["labels"] = batch["input_ids"]
    torch.testing.assert_close(lm(**batch, num_items_in_batch=1).loss, total_loss(lm), **CLOSE)
    rows = {name: torch.cat([x, x]) for name, x in batch.items()}
    torch.testing.assert_close(lm(**rows, num_items_in_batch=1).loss, 2 * total_loss(lm), **CLOSE)


@few_mixers(MIXED)
def test_rows_that_hold_documents_and_padding(mixer):
    """Left, right and no padding; numbers at padding mean nothing."""
    lm, ids = model(mixer), tokens(3, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8, [1, 1, 1, 1, 1, 0, 0, 0]])
    positions = torch.tensor([[0, 9, 0, 1, 0, 1, 2, 3], [5, 6, 7, 0, 1, 2, 0, 0], [0, 0, 1, 2, 3, 4, 5, 6]])
    places = [(0, 2, 4), (0, 4, 8), (1, 0, 3), (1, 3, 6), (1, 6, 7), (1, 7, 8), (2, 0, 1), (2, 1, 5)]
    outputs = lm(ids, attention_mask=mask, position_ids=positions, labels=ids, num_items_in_batch=1)
    wanted = torch.zeros(())
    for row, start, stop in places:
        own = ids[row : row + 1, start:stop]
        alone = lm(own, labels=own, num_items_in_batch=1)
        torch.testing.assert_close(outputs.logits[row, start:stop], alone.logits[0], **CLOSE)
        wanted = wanted + (alone.loss if stop - start > 1 else 0)
    torch.testing.assert_close(outputs.loss, wanted, **CLOSE)


@pytest.mark.parametrize("shape", ["rows", "one row for all"])
def test_positions_that_only_count_change_nothing(shape):
    lm, ids = model(MIXED), tokens(2, 9)
    positions = torch.arange(9).expand(2 if shape == "rows" else 1, 9)
    assert torch.equal(lm(ids, position_ids=positions).logits, lm(ids).logits)
    assert torch.equal(lm(ids, position_ids=positions.int() + 40).logits, lm(ids).logits)


def test_positions_go_on_with_a_cache():
    lm, ids = model(MIXED), tokens(2, 12)
    wanted = lm(ids).logits
    cache = lm(ids[:, :5], position_ids=torch.arange(5)[None]).past_key_values
    for start, stop in ((5, 9), (9, 10), (10, 12)):
        step = lm(ids[:, start:stop], position_ids=torch.arange(start, stop)[None], past_key_values=cache)
        torch.testing.assert_close(step.logits, wanted[:, start:stop], **CLOSE)


@pytest.mark.parametrize("counted", ["tokens", "columns"])
def test_positions_of_padded_rows_go_on_with_a_cache(counted):
    lm, ids = model(MIXED), tokens(3, 10)
    mask = torch.tensor([[1] * 10, [0] * 3 + [1] * 7, [0] * 7 + [1] * 3])  # the first block of the last row is padding
    positions = (mask.cumsum(1) - 1).clamp_min(0) if counted == "tokens" else torch.arange(10).expand(3, 10)
    wanted, cache = lm(ids, attention_mask=mask).logits, None
    for start, stop in ((0, 4), (4, 8), (8, 9), (9, 10)):
        step = lm(
            ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
            past_key_values=cache, use_cache=True,
        )  # fmt: skip
        cache = step.past_key_values
        for row in range(3):
            own = mask[row, start:stop].bool()
            torch.testing.assert_close(step.logits[row, own], wanted[row, start:stop][own], **CLOSE)


def test_a_cache_of_packed_documents_goes_on():
    lm, first, second = model(MIXED), tokens(1, 9), tokens(1, 14)[:, 9:]
    cache = lm(first, position_ids=torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])).past_key_values
    assert cache.batch_size == 2
    step = {"cu_seqlens": torch.tensor([0, 2, 5]), "position_ids": torch.tensor([[4, 5, 5, 6, 7]])}
    with pytest.raises(ValueError, match=r"must continue .* at \[4, 5\], got \[0, 0\]"):
        lm(second, past_key_values=cache, position_ids=torch.tensor([[0, 1, 0, 1, 2]]))
    got = lm(second, past_key_values=cache, **step).logits
    for start, middle, begin, stop in ((0, 4, 0, 2), (4, 9, 2, 5)):
        alone = lm(torch.cat([first[:, start:middle], second[:, begin:stop]], 1)).logits[:, middle - start :]
        torch.testing.assert_close(got[:, begin:stop], alone, **CLOSE)


@pytest.mark.parametrize("change", ["copy", "repeat", "select", "reset"])
def test_positions_of_a_changed_cache(change):
    lm, ids = model("gdn"), tokens(2, 4)
    cache = lm(ids, attention_mask=torch.tensor([[1] * 4, [0] * 3 + [1]])).past_key_values
    expected = [4, 1]
    if change == "copy":
        cache = cache.copy()
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        expected = [4, 4, 1, 1]
    elif change == "select":
        cache.reorder_cache(torch.tensor([1, 0]))
        expected = [1, 4]
    else:
        cache.reset()
        expected = [0, 0]
    step = torch.zeros(len(expected), 1, dtype=torch.long)
    if change != "reset":
        with pytest.raises(ValueError, match="must continue where"):
            lm(step, past_key_values=cache, position_ids=torch.tensor([[0]] * len(expected)))
    lm(step, past_key_values=cache, position_ids=torch.tensor(expected)[:, None])


def test_generation_takes_positions_and_needs_none():
    lm, ids = model(MIXED, pad_token_id=0), tokens(2, 7)
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    options = {"attention_mask": mask, "max_new_tokens": 5, "do_sample": False}
    wanted = lm.generate(ids, **options)
    assert torch.equal(lm.generate(ids, position_ids=(mask.cumsum(1) - 1).clamp_min(0), **options), wanted)
    with pytest.raises(ValueError, match="past_key_values must hold as many sequences as the input"):
        lm.generate(ids[:1], position_ids=torch.tensor([[0, 1, 2, 0, 1, 2, 3]]), max_new_tokens=2)


@pytest.mark.parametrize(
    "form", [pytest.param(form, marks=() if form in ("positions", "numbers") else pytest.mark.slow) for form in FORMS]
)
def test_the_trainer_learns_from_collated_documents(tmp_path, form):
    """One step of gradient descent moves the weights by the gradient of separate documents."""
    lm = model(MIXED).train()
    rate = 0.5
    arguments = TrainingArguments(
        tmp_path, per_device_train_batch_size=len(LENGTHS), max_steps=1, learning_rate=rate, lr_scheduler_type="constant",
        optim="sgd", max_grad_norm=0.0, report_to=[], disable_tqdm=True, use_cpu=True, save_strategy="no",
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in lm.named_parameters()}
    (total_loss(lm) / (sum(LENGTHS) - len(LENGTHS))).backward()
    wanted = {name: before[name] - rate * p.grad for name, p in lm.named_parameters()}
    lm.zero_grad()
    rows = [{"input_ids": ids[0].tolist()} for ids in documents()]
    Trainer(lm, arguments, train_dataset=rows, data_collator=DataCollatorWithFlattening(**FORMS[form])).train()
    torch.testing.assert_close({name: p.detach() for name, p in lm.named_parameters()}, wanted, rtol=1e-3, atol=1e-4)


def test_what_has_no_meaning_here_is_taken():
    """The columns of the input, as older versions of transformers number them, and the token types of some tokenizers."""
    lm, ids = model(MIXED), tokens(2, 9)
    wanted = lm(ids)
    got = lm(ids[:, :6], cache_position=torch.arange(6), token_type_ids=torch.zeros_like(ids[:, :6]))
    rest = lm(ids[:, 6:], past_key_values=got.past_key_values, cache_position=torch.arange(6, 9))
    torch.testing.assert_close(torch.cat([got.logits, rest.logits], 1), wanted.logits, **CLOSE)
    with pytest.raises(ValueError, match="cache_position must be .* after the 9 of past_key_values, got 0 to 8"):
        lm(ids, past_key_values=wanted.past_key_values, cache_position=torch.arange(9))
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(lm.generate(ids, token_type_ids=torch.zeros_like(ids), **options), lm.generate(ids, **options))


EDGES = torch.tensor([0, 4, 9])


@pytest.mark.parametrize(
    "error, arguments, message",
    [
        (
            ValueError,
            {"position_ids": torch.tensor([[0, 1, 2, 4, 5, 6, 7, 8, 9]])},
            "must rise by one .* got 4 after 2",
        ),
        (ValueError, {"position_ids": torch.arange(8)[None]}, r"position_ids must be \[1, 9\].* got shape \[1, 8\]"),
        (ValueError, {"position_ids": torch.zeros(3, 1, 9).long()}, r"one number per token, got shape \[3, 1, 9\]"),
        (ValueError, {"position_ids": torch.zeros(1, 9)}, "position_ids must be int32 or int64"),
        (TypeError, {"position_ids": [[0] * 9]}, "position_ids must be an integer tensor"),
        (
            ValueError,
            {"position_ids": torch.tensor([[0, 1, 0, 1, 0, 1, 2, 3, 4]]), "cu_seqlens": EDGES},
            "position_ids must rise by one .* within every document of cu_seqlens",
        ),
        (ValueError, {"seq_idx": torch.zeros(1, 8).int()}, r"seq_idx must be \[1, 9\].* got shape \[1, 8\]"),
        (ValueError, {"seq_idx": torch.zeros(9).int()}, r"one number per token, got shape \[9\]"),
        (ValueError, {"seq_idx": torch.zeros(1, 9)}, "seq_idx must be int32 or int64"),
        (TypeError, {"seq_idx": [[0] * 9]}, "seq_idx must be an integer tensor"),
        (
            ValueError,
            {"seq_idx": torch.tensor([[0, 0, 1, 1, 0, 0, 2, 2, 2]])},
            "seq_idx must give all tokens of a document the same number.* comes back",
        ),
        (
            ValueError,
            {"seq_idx": torch.tensor([[0] * 4 + [1] * 5]), "position_ids": torch.tensor([[0, 1, 2, 4, 0, 1, 2, 3, 4]])},
            "must rise by one .* got 4 after 2",
        ),
        *(
            (
                ValueError,
                {"seq_idx": torch.tensor([numbers]), "cu_seqlens": EDGES},
                "seq_idx must change where the next",
            )
            for numbers in ([0] * 9, [0] * 5 + [1] * 4, [0] * 4 + [1] * 3 + [2] * 2)
        ),
        (ValueError, {"cache_position": torch.arange(1, 10)}, "cache_position must be .* after the 0 .* got 1 to 9"),
        (
            ValueError,
            {"cache_position": torch.arange(8)},
            r"cache_position must be int64 \[9\].* got torch.int64 \[8\]",
        ),
        (ValueError, {"cache_position": torch.arange(9.0)}, "cache_position must be int64"),
        (TypeError, {"cache_position": 0}, "cache_position must be int64"),
        (ValueError, {"cu_seq_lens_q": EDGES}, "cu_seq_lens_k must be given with its counterpart"),
        (ValueError, {"cu_seq_lens_k": EDGES}, "cu_seq_lens_q must be given with its counterpart"),
        (ValueError, {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES + 1}, "cu_seq_lens_k must be the same numbers"),
        (
            ValueError,
            {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES, "cu_seqlens": torch.tensor([0, 9])},
            "cu_seq_lens_q must be the same numbers as cu_seqlens",
        ),
        (TypeError, {"cu_seq_lens_q": [0, 4, 9], "cu_seq_lens_k": EDGES}, "cu_seq_lens_q must be an integer tensor"),
        (ValueError, {"cu_seq_lens_q": EDGES + 1, "cu_seq_lens_k": EDGES + 1}, "must rise from 0 to the length 9"),
    ],
)
def test_what_does_not_fit_is_refused(error, arguments, message):
    for lm in (model(), model().model):
        with pytest.raises(error, match=message):
            lm(tokens(1, 9), **arguments)


def test_positions_that_do_not_continue_are_refused():
    lm, ids = model(), tokens(2, 9)
    cache = lm(ids).past_key_values
    for start in (0, 8, 10):
        with pytest.raises(ValueError, match=rf"must continue .* at \[9, 9\], got \[{start}, {start}\]"):
            lm(ids[:, :3], position_ids=torch.arange(start, start + 3)[None], past_key_values=cache)
    with pytest.raises(ValueError, match="past_key_values must hold as many sequences as the input, 4, got 2"):
        lm(ids[:, :3], position_ids=torch.tensor([[9, 0, 1]]), past_key_values=cache)
    assert cache.columns == 9
