"""The language model's forward: loss, caches, packing, padding, checkpointing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from transformers import DynamicCache

from fastweights.layers import MIXERS
from fastweights.models import FastWeightsForCausalLM, FastWeightsModel, modeling
from tests.fast_set import fast_where

from .mixers import FEW, every_mixer, is_fast, some_mixers
from .small import HYBRID, VOCABULARY, config, model, tokens

CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@some_mixers(HYBRID)
def test_loss_falls_on_a_fixed_batch(mixer):
    lm, ids = model(mixer).train(), tokens(4, 12)
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        loss = lm(ids, labels=ids).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - torch.tensor(float(VOCABULARY)).log().item()) < 0.2
    assert losses[-1] < losses[0] - 0.5


@every_mixer(HYBRID)
def test_cached_decoding_equals_the_full_forward(mixer):
    lm, ids = model(mixer), tokens(2, 19)
    with torch.no_grad():
        whole = lm(ids, use_cache=False)
        assert whole.past_key_values is None
        prefill = lm(ids[:, :11])
        steps = [prefill.logits] + [
            lm(ids[:, [t]], past_key_values=prefill.past_key_values).logits for t in range(11, 19)
        ]
    torch.testing.assert_close(torch.cat(steps, 1), whole.logits, **CLOSE)


def test_no_cache_while_training_unless_asked_for():
    lm = model().train()
    assert lm(tokens()).past_key_values is None
    assert lm(tokens(), use_cache=True).past_key_values is not None
    assert model(use_cache=False)(tokens()).past_key_values is None


def test_loss_is_the_shifted_cross_entropy():
    lm, ids = model(), tokens()
    labels = ids.clone()
    labels[0, :5] = -100
    outputs = lm(ids, labels=labels)
    wanted = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    torch.testing.assert_close(outputs.loss, wanted)
    summed = lm(ids, labels=labels, num_items_in_batch=torch.tensor(7)).loss
    torch.testing.assert_close(summed, wanted * (labels[:, 1:] != -100).sum() / 7)


@every_mixer(HYBRID)
def test_packed_batch_has_the_logits_and_loss_of_its_sequences(mixer):
    lm, ids = model(mixer), tokens(1, 24)
    edges = [0, 4, 15, 24]
    packed = lm(ids, labels=ids, cu_seqlens=torch.tensor(edges))
    alone = [lm(ids[:, a:b], labels=ids[:, a:b]) for a, b in zip(edges, edges[1:], strict=False)]
    torch.testing.assert_close(packed.logits, torch.cat([one.logits for one in alone], 1), **CLOSE)
    lengths = torch.tensor([3.0, 10.0, 8.0])
    wanted = (torch.stack([one.loss for one in alone]) * lengths).sum() / lengths.sum()
    torch.testing.assert_close(packed.loss, wanted)


@fast_where(lambda given: given["side"] == "left" or is_fast(given["mixer"], FEW))
@every_mixer(HYBRID)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_equals_unpadded(mixer, side):
    lm, ids = model(mixer), tokens(3, 16)
    lengths = [16, 9, 1]
    places = [slice(16 - n, 16) if side == "left" else slice(0, n) for n in lengths]
    mask = torch.zeros(3, 16, dtype=torch.long)
    for n, place in enumerate(places):
        mask[n, place] = 1
    with torch.no_grad():
        padded = lm(ids, attention_mask=mask, output_hidden_states=True)
        after = torch.cat([mask, mask.new_ones(3, 2)], 1)
        step = lm(ids[:, :2], attention_mask=after, past_key_values=padded.past_key_values).logits
        for n, place in enumerate(places):
            alone = lm(torch.cat([ids[n : n + 1, place], ids[n : n + 1, :2]], 1)).logits[0]
            torch.testing.assert_close(padded.logits[n, place], alone[:-2], **CLOSE)
            torch.testing.assert_close(step[n], alone[-2:], **CLOSE)
    assert all(state.shape == (3, 16, 16) for state in padded.hidden_states)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cache_counts_the_columns_of_a_padded_batch_and_not_its_tokens(side):
    """transformers takes the columns from it that it has already given to the model."""
    lm, ids, mask = model(), tokens(3, 16), torch.ones(3, 16, dtype=torch.long)
    mask[1:, :9] = 0
    cache = lm(ids, attention_mask=mask if side == "left" else mask.flip(1)).past_key_values
    assert cache.get_seq_length() == 16
    lm(ids[:, :2], attention_mask=torch.cat([mask, mask.new_ones(3, 2)], 1), past_key_values=cache)
    assert cache.get_seq_length() == 18
    lm(ids, attention_mask=torch.zeros(3, 34), past_key_values=cache)
    assert cache.get_seq_length() == 34


@pytest.mark.parametrize("chunked", [False, True])
def test_padding_is_not_learned(chunked):
    lm, ids = model(chunked_loss=chunked), tokens(2, 12)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, 9:] = 0, 0
    losses = [
        lm(ids[n : n + 1, place], labels=ids[n : n + 1, place]).loss
        for n, place in enumerate((slice(4, 12), slice(0, 9)))
    ]
    padded = lm(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    torch.testing.assert_close(padded, (7 * losses[0] + 8 * losses[1]) / 15)


@pytest.mark.parametrize("labels", [torch.full((2, 5), -1), torch.full((2, 5), VOCABULARY), torch.zeros(2, 4).long()])
def test_labels_that_do_not_fit_are_refused(labels):
    with pytest.raises(ValueError, match="labels must"):
        model()(tokens(2, 5), labels=labels)


def test_outputs():
    lm, ids = model(HYBRID), tokens()
    outputs = lm(ids, output_hidden_states=True)
    assert outputs.logits.shape == (2, 19, VOCABULARY) and outputs.loss is None
    assert len(outputs.hidden_states) == 4
    torch.testing.assert_close(outputs.hidden_states[0], lm.model.embed_tokens(ids))
    torch.testing.assert_close(lm.lm_head(outputs.hidden_states[-1]), outputs.logits)
    torch.testing.assert_close(lm.model(ids).last_hidden_state, outputs.hidden_states[-1])
    torch.testing.assert_close(lm(ids, logits_to_keep=1).logits, outputs.logits[:, -1:])
    torch.testing.assert_close(lm(ids, logits_to_keep=torch.tensor([0, 7])).logits, outputs.logits[:, [0, 7]])
    torch.testing.assert_close(lm(inputs_embeds=lm.model.embed_tokens(ids)).logits, outputs.logits)
    torch.testing.assert_close(lm(ids, return_dict=False)[0], outputs.logits)


@fast_where(lambda given: is_fast(given["mixer"], FEW))
@pytest.mark.parametrize(
    ("mixer", "reentrant"), [*((mixer, False) for mixer in MIXERS), (HYBRID, False), (HYBRID, True)]
)
def test_gradient_checkpointing_changes_no_gradient(mixer, reentrant):
    lm, ids = model(mixer).train(), tokens()
    gradients = []
    for checkpointed in (False, True):
        if checkpointed:
            # older transformers 5 only know the second name
            enable = getattr(lm, "activation_checkpointing_enable", None) or lm.gradient_checkpointing_enable
            enable({"use_reentrant": reentrant})
            assert all(block.gradient_checkpointing for block in lm.model.layers)
        lm.zero_grad()
        lm(ids, labels=ids).loss.backward()
        gradients.append({name: p.grad.clone() for name, p in lm.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient)


def test_state_size_is_the_sum_over_layers():
    lm = model(HYBRID)
    lm(tokens(1, 19))
    assert lm.state_size(length=19) == lm.model.state_size(19) == 2 * 8 * 9 + 2 * 19 * 16 + 2 * 8 * 9
    cache = lm(tokens(1, 19)).past_key_values
    assert sum(t.numel() for layer in cache.layers for t in layer.memory.values()) == lm.state_size(length=19)


def test_block_without_mlp():
    lm = model(intermediate_size=0)
    assert not any("mlp" in name for name, _ in lm.named_parameters())
    lm(tokens(), labels=tokens()).loss.backward()


def test_bfloat16():
    lm, ids = model(HYBRID), tokens()
    wanted = lm(ids).logits
    logits = lm.bfloat16()(ids).logits
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - wanted).norm() / wanted.norm() < 0.05


def test_autocast(recwarn):
    lm, ids = model(HYBRID), tokens()
    wanted = lm(ids).logits
    with torch.autocast("cpu", torch.bfloat16):
        outputs = lm.train()(ids, labels=ids, logits_to_keep=0)
    outputs.loss.backward()
    assert (outputs.logits.float() - wanted).norm() / wanted.norm() < 0.05
    assert not [warning for warning in recwarn if "dtype" in str(warning.message)]


@pytest.mark.parametrize(
    "error, call, message",
    [
        (ValueError, lambda lm, ids: lm(), "pass either input_ids or inputs_embeds"),
        (
            ValueError,
            lambda lm, ids: lm(ids, inputs_embeds=lm.model.embed_tokens(ids)),
            "pass either input_ids or inputs_embeds",
        ),
        (ValueError, lambda lm, ids: lm(ids[0]), r"input_ids must be \[batch, time\], got shape \[19\]"),
        (
            ValueError,
            lambda lm, ids: lm(ids, attention_mask=torch.ones(2, 18)),
            r"attention_mask must be \[2, at least 19\]",
        ),
        (ValueError, lambda lm, ids: lm(ids, output_attentions=True), "output_attentions must be False"),
        (ValueError, lambda lm, ids: lm(ids, cu_seqlens=torch.tensor([0, 19])), "batch must be 1"),
        (
            ValueError,
            lambda lm, ids: lm(ids[:1], attention_mask=torch.zeros(1, 19), cu_seqlens=torch.tensor([0, 19])),
            "attention_mask must be None or all ones with cu_seqlens",
        ),
        (
            TypeError,
            lambda lm, ids: lm(ids, past_key_values=DynamicCache()),
            "FastWeightsCache of 2 layers.* got DynamicCache",
        ),
        (
            ValueError,
            lambda lm, ids: lm(ids[:1], past_key_values=lm(ids).past_key_values),
            "past_key_values must hold as many sequences as the input, 1, got 2",
        ),
    ],
)
def test_bad_input_is_refused(error, call, message):
    with pytest.raises(error, match=message):
        call(model(), tokens())


def test_misspelt_options_of_the_forward_are_refused():
    with pytest.raises(TypeError, match="lables"):
        model()(tokens(), lables=tokens())


def test_bad_layer_is_refused_when_the_model_is_built():
    with pytest.raises(ValueError, match="layer 1: bound must be in"):
        FastWeightsForCausalLM(config(["gdn", {"name": "pgdn", "bound": 3.0}]))
    assert isinstance(FastWeightsModel(config()), torch.nn.Module)


def test_projections_get_what_autocast_would_cast_for_each_of_them():
    """The norms write autocast's dtype; the residual stream keeps its own."""
    lm, seen = model(), {}
    block = lm.model.layers[1]
    for name in ("mixer.qkv.q_proj", "mixer.gain.b_proj", "mlp.gate_proj", "mlp.up_proj"):
        block.get_submodule(name).register_forward_pre_hook(lambda _, given, n=name: seen.update({n: given[0].dtype}))
    block.register_forward_hook(lambda module, given, y: seen.update(stream=y.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lm(tokens())
    assert seen.pop("stream") == torch.float32
    assert set(seen.values()) == {torch.bfloat16} and len(seen) == 4


@pytest.mark.parametrize("options", [{}, {"intermediate_size": 0}, {"norm": "layer"}])
def test_branches_added_later_give_the_same_loss_and_gradients(monkeypatch, options):
    """On a GPU a training adds a block's last branch to the stream within the next block's first norm."""
    lm, ids = model("gdn", **options).train(), tokens()
    found = []
    for later in (False, True):
        monkeypatch.setattr(modeling, "trains_on_gpu", lambda x, later=later: later)
        with note_branches(lm) as noted:
            loss = lm(ids, labels=ids).loss
        assert noted == [later] * 2
        found.append([loss.detach(), *torch.autograd.grad(loss, lm.parameters())])
    torch.testing.assert_close(found[1], found[0])


def test_blocks_return_the_stream_to_whoever_reads_it(monkeypatch):
    monkeypatch.setattr(modeling, "trains_on_gpu", lambda x: True)
    lm, ids = model("gdn").train(), tokens()
    with note_branches(lm) as noted:
        lm(ids, labels=ids, output_hidden_states=True)
        lm(ids, labels=ids, use_cache=True)
        handle = lm.model.layers[1].register_forward_hook(lambda *_: None)
        lm(ids, labels=ids)
        handle.remove()
        lm.gradient_checkpointing_enable()
        lm(ids, labels=ids)
    assert noted == [False] * 8


def test_a_batch_of_padding_alone_is_trained_as_elsewhere(monkeypatch):
    monkeypatch.setattr(modeling, "trains_on_gpu", lambda x: True)
    ids = tokens()
    hidden = model("gdn").train().model(ids, attention_mask=torch.zeros_like(ids)).last_hidden_state
    assert hidden.shape[:2] == ids.shape


@contextmanager
def note_branches(lm: FastWeightsForCausalLM) -> Iterator[list[bool]]:
    """Whether each call of a block inside has a branch. A mixer is called once by its block."""
    noted: list[bool] = []
    norm = modeling.normalize_for

    def note(reader: Any, of: Any, x: torch.Tensor, branch: torch.Tensor | None) -> Any:
        if any(reader is block.mixer for block in lm.model.layers):
            noted.append(branch is not None)
        return norm(reader, of, x, branch)

    with mock.patch.object(modeling, "normalize_for", note):
        yield noted
