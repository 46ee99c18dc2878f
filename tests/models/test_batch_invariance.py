"""What a model says of a text does not depend on what is read beside it: other rows, padding, documents packed into its row."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.models import FastWeightsForCausalLM
from tests.ops.packed_documents import PACKS, assert_same_bits

from .mixers import every_mixer, some_mixers
from .small import PROMPTS, model, tokens

LENGTHS = (5, 70, 1, 9)
ORDERS = ((0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0))
WINDOW = {"name": "softmax", "window": 5}


def language_model(mixer: object) -> FastWeightsForCausalLM:
    return model([mixer], initializer_range=0.5)  # logits far enough apart for rounding


@some_mixers(WINDOW)
def test_greedy_tokens_are_those_of_each_prompt_alone(mixer: object) -> None:
    lm, ids = language_model(mixer), tokens(3, 12)
    together = lm.generate(ids, attention_mask=PROMPTS, max_new_tokens=12, do_sample=False)[:, 12:]
    alone = [
        lm.generate(row[mask][None], max_new_tokens=12, do_sample=False)[0, mask.sum() :]
        for row, mask in zip(ids, PROMPTS.bool(), strict=True)
    ]
    assert torch.equal(together, torch.stack(alone)) and len(together.unique()) > 1


@every_mixer(WINDOW)
def test_logits_are_the_same_however_documents_are_packed(mixer: object) -> None:
    lm, documents = model([mixer], initializer_range=0.1), tokens(1, sum(LENGTHS)).split(LENGTHS, 1)

    def packed(order: tuple[int, ...]) -> dict[int, Tensor]:
        row = torch.cat([documents[n] for n in order], 1)
        lengths = [LENGTHS[n] for n in order]
        edges = torch.tensor([0, *lengths]).cumsum(0)
        return dict(zip(order, lm(row, cu_seqlens=edges).logits.split(lengths, 1), strict=True))

    with torch.no_grad():
        alone = [lm(document).logits for document in documents]
        for order in ORDERS:
            for n, logits in packed(order).items():
                torch.testing.assert_close(logits, alone[n], rtol=1e-4, atol=1e-4)
        same = torch.cat([documents[1]] * 3)  # one text in every row of a batch
        torch.testing.assert_close(lm(same).logits, alone[1].expand(3, -1, -1), rtol=1e-4, atol=1e-4)


@some_mixers(WINDOW)
def test_a_block_gives_a_document_the_same_bits_in_every_row(mixer: object) -> None:
    """Of convolutions, norms, memory and MLP together, whichever documents are beside it, and wherever it starts.

    32 heads, because torch's CPU code computes groups of 16 or 32 numbers at a time, and the rest of a tensor of gates in another
    way. So it does with a matrix product of a single column or token. Softmax layers lay documents out in rectangles as long as
    the longest document, so other documents change the order of their sums.
    """
    (block,) = model([mixer], hidden_size=128, num_heads=32).model.layers
    packs = PACKS[:3] if mixer in ("softmax", "vla-softmax") else PACKS
    with torch.no_grad():
        assert_same_bits(lambda x, edges: [block(x, cu_seqlens=edges)], (33, 70, 1, 9, 39, 5), [(128,)], packs)
