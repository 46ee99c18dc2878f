"""Numbers of documents, as seq_idx or as the values of the attention mask, keep the documents of a row apart."""

from __future__ import annotations

import pytest
import torch

from fastweights.models.rows import predicted_labels

from .mixers import few_mixers
from .small import HYBRID, model, tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
MIXED = [*HYBRID, {"name": "softmax", "window": 3}, "gdn"]
# Padding on either side and in between; the numbers need not rise, nor begin at one.
NUMBERS = torch.tensor([[1, 1, 1, 2, 3, 3, 3, 3], [0, 0, 4, 4, 2, 2, 2, 2], [1, 1, 0, 1, 5, 5, 5, 0]])
DOCUMENTS = [
    (0, [0, 1, 2]),
    (0, [3]),
    (0, [4, 5, 6, 7]),
    (1, [2, 3]),
    (1, [4, 5, 6, 7]),
    (2, [0, 1, 3]),
    (2, [4, 5, 6]),
]
# The last token of the third row's first document follows on padding, so that nothing predicts it.
PREDICTED = torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1], [0, 0, 0, 1, 0, 1, 1, 1], [0, 1, 0, 0, 0, 1, 1, 0]]).bool()
FORMS = {
    "mask": {"attention_mask": NUMBERS},
    "float mask": {"attention_mask": NUMBERS.double()},
    "unsigned mask": {"attention_mask": NUMBERS.to(torch.uint8)},
    "seq_idx": {"seq_idx": (NUMBERS - 1).int()},
    "seq_idx and padding": {"seq_idx": NUMBERS.int(), "attention_mask": NUMBERS != 0},
    "both": {"seq_idx": NUMBERS - 1, "attention_mask": NUMBERS},
}


def test_the_documents_of_these_tests():
    assert {(row, place) for row, places in DOCUMENTS for place in places} == {
        (r, c) for r, c in NUMBERS.nonzero().tolist()
    }


@few_mixers(MIXED)
def test_documents_equal_separate_ones(mixer):
    lm, ids = model(mixer, initializer_range=0.2), tokens(3, 8)
    lm = lm.double()
    outputs = [lm(ids, labels=ids, **FORMS[form]) for form in ("mask", "seq_idx")]
    losses = []
    for row, places in DOCUMENTS:
        alone = lm(ids[row : row + 1, places]).logits[0]
        for packed in outputs:
            torch.testing.assert_close(packed.logits[row, places], alone, **CLOSE)
        places = torch.tensor(places)
        predicted = PREDICTED[row, places].nonzero()[:, 0]
        losses.append(
            torch.nn.functional.cross_entropy(alone[predicted - 1], ids[row, places[predicted]], reduction="none")
        )
    for packed in outputs:
        torch.testing.assert_close(packed.loss, torch.cat(losses).mean(), **CLOSE)
    together = lm(ids, attention_mask=NUMBERS != 0).logits
    assert (together - outputs[0].logits).abs().max() > 1e-3  # documents that see each other give other logits


@pytest.mark.parametrize("form", FORMS)
def test_every_form(form):
    lm, ids = model(MIXED), tokens(3, 8)
    wanted, got = (lm(ids, labels=ids, **FORMS[name]) for name in ("mask", form))
    assert torch.equal(got.logits, wanted.logits) and torch.equal(got.loss, wanted.loss)
    labels = predicted_labels(ids, **FORMS[form])
    assert torch.equal(labels[:, 1:] != -100, PREDICTED[:, 1:])


def test_one_row_of_numbers_serves_all_rows():
    lm, ids = model(MIXED), tokens(2, 8)
    numbers = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2]], dtype=torch.int32)
    assert torch.equal(lm(ids, seq_idx=numbers).logits, lm(ids, seq_idx=numbers.expand(2, 8)).logits)


@pytest.mark.parametrize("number", [1, 5])
def test_a_mask_of_one_number_changes_nothing(number):
    lm, ids = model(MIXED), tokens(2, 8)
    assert torch.equal(lm(ids, attention_mask=torch.full_like(ids, number)).logits, lm(ids).logits)


def test_rows_of_padding_alone():
    lm, ids = model(MIXED), tokens(2, 4)
    numbers = torch.tensor([[-1] * 4, [0, 0, 1, 1]])
    for documents in ({"seq_idx": numbers}, {"attention_mask": numbers + 1}):
        got = lm(ids, **documents)
        assert not got.logits[0].any()
        torch.testing.assert_close(got.logits[1, 2:], lm(ids[1:, 2:]).logits[0], **CLOSE)
        assert got.past_key_values.batch_size == 3
    assert not lm(ids, seq_idx=torch.full_like(ids, -1)).logits.any()


def test_documents_of_a_mask_go_on_with_a_cache():
    """The cache holds one sequence per document of the columns before, those without new tokens too."""
    lm, ids = model(MIXED), tokens(2, 9)
    mask = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 2], [0, 3, 3, 3, 3, 3, 3, 0, 3]])
    cache = lm(ids[:, :5], attention_mask=mask[:, :5]).past_key_values
    assert cache.batch_size == 3
    steps = [lm(ids[:, a:b], attention_mask=mask[:, :b], past_key_values=cache).logits for a, b in ((5, 8), (8, 9))]
    got = torch.cat(steps, 1)
    for row, places in ((0, [3, 4, 5, 6, 7, 8]), (1, [1, 2, 3, 4, 5, 6, 8])):
        new = [place for place in places if place >= 5]
        alone = lm(ids[row : row + 1, places]).logits[0, -len(new) :]
        torch.testing.assert_close(got[row, [place - 5 for place in new]], alone, **CLOSE)
    another = torch.tensor([[1, 1, 1, 2, 2, 2, 2, 2, 2, 4], [0, 3, 3, 3, 3, 3, 3, 0, 3, 3]])
    with pytest.raises(ValueError, match="past_key_values must hold as many sequences as the input, 4, got 3"):
        lm(ids[:, :1], attention_mask=another, past_key_values=cache)


NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize("values", [[0, -1e9], [0, -INFINITY], [1, NAN], [1, INFINITY], [1, 0.5], [-1, 1]], ids=str)
@pytest.mark.parametrize("place", ["tokens", "tokens that the cache has read", "generate"])
def test_other_values_of_a_mask_are_refused(values, place):
    """Whether all values are wrong or one: additive masks, NaN, fractions, negative numbers."""
    lm, ids = model(), tokens(2, 6)
    cache = None if place == "tokens" else lm(ids[:, :3]).past_key_values
    for columns in (1, 3):
        mask = torch.full((2, 6), float(values[0]))
        mask[1, :columns] = values[1]
        with pytest.raises(ValueError, match=r"attention_mask must be 0 for padding.* got values from .*== 0\)\.long"):
            if place == "generate":
                lm.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1)
            else:
                lm(ids[:, 0 if cache is None else 3 :], attention_mask=mask, past_key_values=cache)


@pytest.mark.parametrize(
    "mask, message",
    [
        (torch.ones(2, 6, dtype=torch.complex64), "0 for padding.* got torch.complex64; pass bool, integers or floats"),
        (torch.ones(2, 6).to_sparse(), r"a dense tensor, got torch.sparse_coo; pass attention_mask.to_dense\(\)"),
        (torch.ones(2, 6, device="meta"), "0 for padding.* got a tensor on meta; pass numbers"),
    ],
)
def test_other_kinds_of_masks_are_refused(mask, message):
    with pytest.raises(ValueError, match=f"attention_mask must be {message}"):
        model()(tokens(2, 6), attention_mask=mask)


def test_contradictions_are_refused():
    lm, ids = model(), tokens(1, 6)
    with pytest.raises(
        ValueError, match="attention_mask must give all tokens of a document the same number.* comes back"
    ):
        lm(ids, attention_mask=torch.tensor([[1, 1, 2, 2, 1, 1]]))
    with pytest.raises(ValueError, match="attention_mask must be None or all ones with cu_seqlens"):
        lm(ids, attention_mask=torch.tensor([[1, 1, 2, 2, 2, 2]]), cu_seqlens=torch.tensor([0, 2, 6]))
    for name in ("seq_idx", "cu_seqlens"):
        documents = {"seq_idx": torch.zeros(1, 6).int(), "cu_seqlens": torch.tensor([0, 6])}
        with pytest.raises(ValueError, match=rf"{name} must be None in generate\(\)"):
            lm.generate(ids, max_new_tokens=1, **{name: documents[name]})
    with pytest.raises(ValueError, match=r"attention_mask must be 1 for tokens .* in generate\(\)"):
        lm.generate(ids, max_new_tokens=1, attention_mask=torch.tensor([[1, 1, 2, 2, 2, 2]]))
