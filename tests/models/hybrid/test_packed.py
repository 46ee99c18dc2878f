"""Packed rows in kept attention: as separate documents, at the cost of attention within each, without a wait for a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from fastweights.layers import attention
from fastweights.models import linearize
from fastweights.models.hybrid import kept

from .small import hybrid, teacher, tokens

EDGES = torch.tensor([0, 4, 4, 11], dtype=torch.int32)


class NoReads(TorchDispatchMode):
    """Fails where an operation reads numbers, which makes the host wait for a GPU."""

    READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        masks = func is torch.ops.aten.index.Tensor and any(x is not None and x.dtype is torch.bool for x in args[1])
        assert not masks and func.overloadpacket.__name__ not in self.READS, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def kernel(monkeypatch):
    """The way of a GPU, with another kernel in place of torch's: what it was called with."""
    calls = []

    def attend(q, k, v, cu_seqlens, window, scale, longest):
        calls.append((q.dtype, k.dtype, v.dtype, window, longest))
        return q + (k + v).repeat_interleave(q.shape[2] // k.shape[2], 2)

    monkeypatch.setattr(attention, "takes_packed", lambda q, v: True)
    monkeypatch.setattr(attention, "_attend_packed", attend)
    monkeypatch.setattr("fastweights.checks.values_can_be_read", lambda x: False)
    return calls


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma3_text"])
@pytest.mark.parametrize(
    "memory", [{"to": "softmax", "window": 4}, {"to": "vla-softmax", "window": 2}], ids=lambda x: x["to"]
)
def test_a_step_in_bfloat16_reads_no_number(model_type, memory, kernel):
    """So that it can become part of a CUDA graph. Rotations are in float32 there, and kernels take one dtype."""
    lm, ids = hybrid(model_type, **memory).train(), tokens(1)
    with NoReads():
        with torch.autocast("cpu", torch.bfloat16):
            loss = lm(ids, labels=ids, cu_seqlens=EDGES, max_length_q=7).loss
        loss.backward()
    assert {dtype for call in kernel for dtype in call[:3]} == {torch.bfloat16}
    own = kernel[1]  # of the layer that is kept
    assert own[3] == (4 if model_type == "gemma3_text" else None) and own[4] == 7


@pytest.mark.parametrize("to", ["gdn", "gka", "palimpsa-d", "lattice", "rls"])
def test_memories_in_bfloat16(to):
    lm, ids = hybrid(to=to).train(), tokens(1)
    wanted = lm(ids, labels=ids, cu_seqlens=EDGES).loss
    with torch.autocast("cpu", torch.bfloat16):
        loss = lm(ids, labels=ids, cu_seqlens=EDGES).loss
    assert loss.item() == pytest.approx(wanted.item(), rel=0.02)
    loss.backward()


@pytest.mark.parametrize("model_type", ["llama", "gemma2"])
def test_no_mask_of_all_tokens_is_made(model_type, monkeypatch):
    made, attend = [], F.scaled_dot_product_attention

    def watch(*args, attn_mask=None, **options):
        made.append(0 if attn_mask is None else attn_mask.numel())
        return attend(*args, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watch)
    monkeypatch.setattr("transformers.masking_utils.sdpa_mask", None)
    monkeypatch.setattr("transformers.masking_utils.eager_mask", None)
    lm = hybrid(model_type)
    lm(tokens(1, 128), cu_seqlens=torch.arange(0, 129, 8))
    assert max(made, default=0) <= 64


def test_checkpointed_activations_of_packed_rows():
    ids, gradients = tokens(1), []
    for checkpointed in (False, True):
        lm = hybrid("gemma2", "kda").train()
        if checkpointed:
            lm.gradient_checkpointing_enable({"use_reentrant": False})
        lm(ids, labels=ids, cu_seqlens=EDGES).loss.backward()
        gradients.append({name: p.grad for name, p in lm.named_parameters() if p.grad is not None})
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def test_dropout_of_attention_is_left_to_transformers(monkeypatch):
    lm = linearize(teacher(attention_dropout=0.5), to="gdn", keep="all")
    whole = lm(tokens(1), cu_seqlens=EDGES).logits
    monkeypatch.setattr(kept, "attend_documents", None)
    first, second = (lm.train()(tokens(1), cu_seqlens=EDGES).logits for _ in range(2))
    assert not torch.equal(first, second)
    with pytest.raises(TypeError):
        lm.eval()(tokens(1), cu_seqlens=EDGES)
    assert whole.shape == first.shape


@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
@pytest.mark.parametrize("logits", [attention.Logits(), attention.Logits(0.3), attention.Logits(0.5, 2.0)], ids=str)
def test_attention_within_documents(logits, window, compiling, monkeypatch):
    """Against its formula. A compiled graph knows no lengths."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: compiling)
    q, k, v = (torch.randn(1, 24, heads, 8, dtype=torch.double) for heads in (4, 2, 2))
    edges = torch.tensor([0, 3, 3, 4, 15, 24])
    found = attention.attend_documents(q, k, v, edges, window, logits)
    place = torch.arange(24)
    document = torch.bucketize(place, edges, right=True)
    visible = (document[:, None] == document) & (place <= place[:, None])
    if window is not None:
        visible &= place > place[:, None] - window
    z = torch.einsum("bthk,bshk->bhts", q, k.repeat_interleave(2, 2)) * (logits.scale or 8**-0.5)
    if logits.softcap is not None:
        z = logits.softcap * (z / logits.softcap).tanh()
    p = z.masked_fill(~visible, float("-inf")).softmax(-1)
    wanted = torch.einsum("bhts,bshv->bthv", p, v.repeat_interleave(2, 2))
    close = {"rtol": 1e-6, "atol": 1e-6} if logits.softcap else {}  # softmax in float32
    torch.testing.assert_close(found, wanted, **close)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gemma3_text"])
def test_compiled_blocks_are_one_graph_of_each_kind(model_type, kernel, monkeypatch):
    """For any number of documents: one of blocks with a memory, and one of blocks with attention."""
    monkeypatch.setattr(attention, "_attend_packed", lambda q, k, v, *rest: q + (k + v).repeat_interleave(2, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    lm = hybrid(model_type, "softmax", window=4).train()
    for block in lm.model.layers:
        block.compile(backend="aot_eager")
    for documents in ([0, 4, 4, 11], [0, 2, 4, 6, 8, 11], [0, 5, 11]):
        edges = torch.tensor(documents, dtype=torch.int32)
        torch._dynamo.maybe_mark_dynamic(edges, 0)
        lm(tokens(1), cu_seqlens=edges).logits.sum().backward()
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 2 and not counters["graph_break"]
