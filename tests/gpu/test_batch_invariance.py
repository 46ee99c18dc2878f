"""On a CUDA device: the bits of a packed sequence do not depend on its neighbours, nor the tokens of a prompt on its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.layers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.testing import OpInputs
from tests.kernels.cases import KERNEL_CASES
from tests.ops.packed_documents import AROUND_MEMORIES, PACKS, around_memories, assert_same_bits, with_gradients

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
]
FIRST_WEIGHTS = {"vla-deltanet": 0.003}  # small, because its memory grows without end with keys longer than 1
LENGTHS = (100, 1500, 1, 64, 399)
ORDERS = ((0, 1, 2, 3, 4), (3, 1, 4, 0, 2), (4, 2, 3, 1, 0))
PADDED, NEW = (3, 90, 0), 24  # tokens of padding in front of the prompts, and new tokens
# How many times as large errors may be in a batch. Rounding makes errors of one size; a mistake about the padding changes logits
# by as much as they are.
LARGER = 4


@pytest.mark.parametrize("name", KERNEL_CASES)
def test_neighbours_in_a_packed_row_change_no_bit(name: str) -> None:
    """Of outputs, final states and gradients of all tokens."""
    case = KERNEL_CASES[name]
    drawn = case.draw(batch=1, time=sum(LENGTHS), heads=2, key=64, value=64, dtype=torch.bfloat16).map(Tensor.cuda)
    documents = {key: x.split(LENGTHS, 1) for key, x in drawn.tokens.items()}

    def results(order: tuple[int, ...]) -> list[list[Tensor]]:
        """By document."""
        lengths = [LENGTHS[n] for n in order]
        edges = torch.tensor([0, *lengths], device="cuda").cumsum(0)
        tokens = {key: torch.cat([x[n] for n in order], 1).requires_grad_() for key, x in documents.items()}
        o, states = case(OpInputs(tokens, drawn.parameters, drawn.options), backend="triton", cu_seqlens=edges)
        gradients = torch.autograd.grad(o.float().square().sum(), list(tokens.values()))
        per_token = [x.split(lengths, 1) for x in (o, *gradients)]
        place = [order.index(n) for n in range(len(order))]
        return [[x[p] for x in (*per_token, *states)] for p in place]

    first = results(ORDERS[0])
    for order in ORDERS[1:]:
        for n, (got, wanted) in enumerate(zip(results(order), first, strict=True)):
            assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), n


@pytest.mark.parametrize("name", AROUND_MEMORIES)
def test_neighbours_and_places_change_no_bit_around_memories(name: str) -> None:
    """Of outputs and gradients, also beside other documents. The tiles of the convolution follow the length of rows shorter than
    these."""
    lengths = (4000, 3400, 1, 2065, 5001, 777)
    call = around_memories(name, 1024, 64, "cuda", "triton")
    for one in (call, with_gradients(call)):
        assert_same_bits(one, lengths, [(1024,)] * 2, PACKS, dtype=torch.bfloat16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_block_gives_a_document_the_same_bits_in_any_order(mixer: str, dtype: torch.dtype) -> None:
    """Of convolutions, norms, memory and MLP together. Beside other documents a row has another length, and products of matrices
    of another size may add up in another order."""
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=64, hidden_size=512, num_hidden_layers=1, num_heads=4, mixer=mixer,
        initializer_range=FIRST_WEIGHTS.get(mixer, 0.02),
    )  # fmt: skip
    (block,) = FastWeightsForCausalLM(config).to("cuda", dtype).model.layers
    with torch.no_grad():
        assert_same_bits(
            lambda x, edges: [block(x, cu_seqlens=edges)], LENGTHS, [(512,)], ORDERS, dtype=dtype, device="cuda"
        )


class Continued(NamedTuple):
    """The logits of the first new token [N, vocab_size], and the new tokens [N, NEW]."""

    logits: Tensor
    tokens: Tensor


def continued(lm: FastWeightsForCausalLM, ids: Tensor, mask: Tensor | None = None) -> Continued:
    with torch.no_grad():
        logits = lm(ids, attention_mask=mask, use_cache=False).logits[:, -1].float()
    return Continued(logits, lm.generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False)[:, -NEW:])


def in_a_batch_and_alone(mixer: str, dtype: torch.dtype, device: str) -> tuple[Continued, Continued, Tensor]:
    """Of prompts in a batch, and of each alone; and the logits of each alone with the same weights in float32."""
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=64,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=2,
        mixer=mixer,
        initializer_range=FIRST_WEIGHTS.get(mixer, 0.1),
    )
    lm = FastWeightsForCausalLM(config).to(device, dtype).eval()
    ids = torch.randint(64, (len(PADDED), 100), device=device)
    mask = torch.ones_like(ids)
    for row, padding in zip(mask, PADDED, strict=True):
        row[:padding] = 0
    together = continued(lm, ids, mask)
    prompts = [row[padding:][None] for row, padding in zip(ids, PADDED, strict=True)]
    alone = Continued(*map(torch.cat, zip(*(continued(lm, prompt) for prompt in prompts), strict=True)))
    lm.float()
    return together, alone, torch.cat([continued(lm, prompt).logits for prompt in prompts])


def largest_error(logits: Tensor, exact: Tensor) -> float:
    """Of the errors of all rows, over the length of the row."""
    return float(((logits - exact).norm(dim=-1) / exact.norm(dim=-1)).max())


@pytest.mark.parametrize("mixer", MIXERS)
def test_greedy_tokens_are_those_of_each_prompt_alone(mixer: str) -> None:
    together, alone, _ = in_a_batch_and_alone(mixer, torch.float32, "cuda")
    assert together.tokens.equal(alone.tokens)


@pytest.mark.parametrize("mixer", MIXERS)
def test_in_bfloat16_a_batch_changes_logits_by_rounding_alone(
    mixer: str, record_property: Callable[[str, object], None]
) -> None:
    """Products of other sizes round otherwise, so bits differ. But a batch must not be much further from the logits in float32
    than each prompt alone is. First tokens are those of float32 where these are ahead by more than rounding moves logits."""
    together, alone, exact = in_a_batch_and_alone(mixer, torch.bfloat16, "cuda")
    errors = [largest_error(found.logits, exact) for found in (together, alone)]
    same = together.tokens == alone.tokens
    record_property("same tokens", float(same.float().mean()))
    print(f"{mixer}: {same.float().mean():.2f} of the tokens, errors {errors}, first tokens {same[:, 0].tolist()}")
    assert errors[0] <= LARGER * errors[1]
    moved = torch.stack([together.logits - exact, alone.logits - exact]).abs().amax((0, 2))
    first, second = exact.topk(2).values.unbind(-1)
    decided = first - second > 4 * moved  # 2 would do for the same logits; those of generate() may be rounded otherwise
    for found in (together, alone):
        assert found.tokens[decided, 0].equal(exact.argmax(-1)[decided])
