"""The chunked cross-entropy: the ordinary loss, value and gradients, without all the logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastweights.models import loss
from fastweights.models.loss import causal_lm_loss, summed_cross_entropy

from .live_bytes import LargestTensor
from .small import HYBRID, VOCABULARY, model, tokens


def draw(dtype: torch.dtype = torch.float64, time: int = 23) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(time, 7, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(11, 7, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
    target = torch.randint(11, (time,), generator=generator)
    target[[0, 4, time - 1]] = -100
    return hidden, weight, target


def value_and_gradients(loss: torch.Tensor, *leaves: torch.Tensor) -> list[torch.Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("chunk", [1, 5, 23, 1000, None])
def test_value_and_gradients_are_exact(chunk):
    hidden, weight, target = draw()
    ordinary = F.cross_entropy(hidden @ weight.T, target, ignore_index=-100, reduction="sum")
    chunked = summed_cross_entropy(hidden, weight, target, chunk)
    wanted = value_and_gradients(3 * ordinary, hidden, weight)
    for got, exact in zip(value_and_gradients(3 * chunked, hidden, weight), wanted, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("needed", [(True, True), (True, False), (False, True)], ids=str)
def test_rows_of_zeros_behind_the_weight_change_nothing(needed, monkeypatch):
    """11 tokens are filled up to 64."""
    hidden, weight, target = draw()
    for leaf, learns in zip((hidden, weight), needed, strict=True):
        leaf.requires_grad_(learns)
    leaves = [leaf for leaf in (hidden, weight) if leaf.requires_grad]
    wanted = value_and_gradients(summed_cross_entropy(hidden, weight, target, 5), *leaves)
    products = []
    monkeypatch.setattr(loss, "needs_padding", lambda weight, dtype: products.append(dtype) or True)
    found = value_and_gradients(summed_cross_entropy(hidden, weight, target, 5), *leaves)
    for got, exact in zip(found, wanted, strict=True):
        assert got.is_contiguous() and got.shape == exact.shape
        torch.testing.assert_close(got, exact, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(summed_cross_entropy(hidden, weight, target, 5), wanted[0])
    assert len(products) == 2


class OnGPU(torch.Tensor):
    is_cuda = True


def test_only_16_bits_on_a_gpu_need_padding():
    odd, even = torch.zeros(11, 7), torch.zeros(16, 7)
    for dtype, wanted in ((torch.bfloat16, True), (torch.float16, True), (torch.float32, False)):
        assert loss.needs_padding(odd.as_subclass(OnGPU), dtype) is wanted
        assert not loss.needs_padding(even.as_subclass(OnGPU), dtype) and not loss.needs_padding(odd, dtype)


def test_large_logits_stay_finite():
    hidden, weight, target = draw()
    results = value_and_gradients(summed_cross_entropy(1e4 * hidden, weight, target, 5), hidden, weight)
    assert all(x.isfinite().all() for x in results)


def test_bfloat16_sums_in_float32():
    """Many chunks: a weight gradient summed in bfloat16 would lose the small parts."""
    hidden, weight, target = draw(torch.bfloat16, time=4000)
    exact = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    wanted = value_and_gradients(
        F.cross_entropy(exact[0] @ exact[1].T, target, ignore_index=-100, reduction="sum"), *exact
    )
    results = value_and_gradients(summed_cross_entropy(hidden, weight, target, 8), hidden, weight)
    assert [x.dtype for x in results] == [torch.float32, torch.bfloat16, torch.bfloat16]
    for got, right, bound in zip(results, wanted, (1e-3, 6e-3, 4e-3), strict=True):
        assert (got.double() - right).norm() <= bound * right.norm()


def test_autocast_computes_like_the_ordinary_layer():
    hidden, weight, target = draw(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        chunked = summed_cross_entropy(hidden, weight, target, 5)
        ordinary = F.cross_entropy(F.linear(hidden, weight).float(), target, ignore_index=-100, reduction="sum")
    torch.testing.assert_close(chunked, ordinary)
    wanted = value_and_gradients(ordinary, hidden, weight)
    for got, right in zip(value_and_gradients(chunked, hidden, weight), wanted, strict=True):
        assert got.dtype == torch.float32
        assert (got - right).norm() <= 1e-2 * right.norm()


def test_frozen_weight_gets_no_gradient():
    hidden, weight, target = draw()
    summed_cross_entropy(hidden, weight.requires_grad_(False), target, 5).backward()
    assert weight.grad is None and hidden.grad.abs().sum() > 0


def test_without_gradients(monkeypatch):
    monkeypatch.setattr("fastweights.models.loss.cross_entropy_gradients", None)  # which nobody calls
    hidden, weight, target = draw()
    with torch.no_grad():
        assert not summed_cross_entropy(hidden, weight, target, 5).requires_grad


def test_nothing_to_predict_is_nan_as_in_torch():
    hidden, weight, _ = draw()
    labels = torch.full((1, 23), -100)
    assert causal_lm_loss(hidden[None], weight, labels).isnan()
    assert causal_lm_loss(hidden[None], weight, labels, num_items_in_batch=4) == 0


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch):
    monkeypatch.setattr("fastweights.models.loss.SMALLEST_CHUNK", 4)
    monkeypatch.setattr("fastweights.models.loss.CHUNK_NUMBERS", {"cpu": 4 * 1600})
    largest = {}
    for chunked in (True, False):
        lm = model("gdn", vocab_size=1600, chunked_loss=chunked).train()
        with LargestTensor() as watch:
            lm(tokens(2, 64), labels=tokens(2, 64)).loss.backward()
        largest[chunked] = watch.numel
    assert largest[False] >= 2 * 64 * 1600
    assert largest[True] == 1600 * 16  # the weight's gradient; a chunk of logits is 4 * 1600


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("items", [None, 9, torch.tensor(9)])
def test_model_has_the_same_loss_and_gradients_either_way(monkeypatch, tied, items):
    monkeypatch.setattr("fastweights.models.loss.SMALLEST_CHUNK", 5)
    monkeypatch.setattr("fastweights.models.loss.CHUNK_NUMBERS", {"cpu": 1})
    ids = tokens(1, 24)
    labels = ids.masked_fill(ids == ids[0, 3], -100)
    call = {"labels": labels, "cu_seqlens": torch.tensor([0, 9, 9, 24]), "num_items_in_batch": items}
    results = []
    for chunked in (True, False):
        lm = model(HYBRID, tie_word_embeddings=tied, chunked_loss=chunked).train()
        loss = lm(ids, **call).loss
        loss.backward()
        results.append((loss.detach(), {name: p.grad for name, p in lm.named_parameters()}))
    torch.testing.assert_close(results[0], results[1])


def test_which_logits_come_with_the_loss():
    lm, ids = model(), tokens()
    every = lm(ids).logits
    evaluated = lm(ids, labels=ids)
    assert torch.equal(evaluated.logits, every)
    assert torch.equal(lm(ids, labels=ids, logits_to_keep=2).logits, every[:, -2:])
    lm.train()
    outputs = lm(ids, labels=ids)
    assert outputs.logits is None and list(outputs) == ["loss"]
    torch.testing.assert_close(outputs.loss, evaluated.loss)
    assert torch.equal(lm(ids, labels=ids, logits_to_keep=0).logits, every)
    assert torch.equal(lm(ids).logits, every)
    lm.config.chunked_loss = False
    assert torch.equal(lm(ids, labels=ids).logits, every)
    assert torch.equal(lm(ids, labels=ids, logits_to_keep=1).logits, every[:, -1:])


def test_a_changed_output_layer_or_loss_is_called():
    ids, lm = tokens(), model().train()
    lm.lm_head.register_forward_hook(lambda module, args, result: 2 * result)
    outputs = lm(ids, labels=ids)
    wanted = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, wanted)

    lm = model().train()
    lm.lm_head = torch.nn.Linear(16, VOCABULARY, bias=True)
    torch.nn.init.normal_(lm.lm_head.bias)
    outputs = lm(ids, labels=ids)
    wanted = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, wanted)

    lm = model().train()
    lm.lm_head.forward = lambda hidden: 3 * F.linear(hidden, lm.lm_head.weight)
    outputs = lm(ids, labels=ids)
    wanted = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, wanted)

    lm = model().train()
    lm.loss_function = lambda logits, labels, **rest: logits.sum() + labels.sum()
    outputs = lm(ids, labels=ids)
    torch.testing.assert_close(outputs.loss, outputs.logits.sum() + ids.sum())


@pytest.mark.parametrize("hooked", [False, True])
def test_a_given_output_layer_keeps_its_parameters_and_its_class(hooked):
    lm, ids = model().train(), tokens()
    given = nn.Linear(lm.config.hidden_size, VOCABULARY, bias=False).eval()
    if hooked:
        given.register_forward_hook(lambda *called: None)
    lm.set_output_embeddings(given)
    assert type(given) is nn.Linear and lm.lm_head.weight is given.weight and not lm.lm_head.training
    assert (lm(ids, labels=ids).logits is None) != hooked


@pytest.mark.parametrize("tied", [False, True])
def test_a_resized_vocabulary_keeps_the_chunked_loss(tied):
    lm, ids = model(tie_word_embeddings=tied).train(), tokens()
    lm.resize_token_embeddings(VOCABULARY + 3)
    outputs = lm(ids, labels=ids)
    assert outputs.logits is None
    logits = lm(ids).logits
    assert logits.shape[-1] == VOCABULARY + 3
    torch.testing.assert_close(outputs.loss, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
