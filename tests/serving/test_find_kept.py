"""Which sequences of a step keep all the tokens that they read, from what vLLM tells a builder, and with which other builders it
orders a step as ours needs it; without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastweights.serving.vllm.kept_tokens import KeptTokens, find_kept

STATE = 50  # tokens that a sequence has read before


def find(counts, prompts, drafts, tokens, begin=()):
    """counts: tokens of each sequence. prompts: which read their prompts. begin: the places of those that begin."""
    count_N = torch.tensor(counts)
    before_N = torch.tensor([0 if place in begin else STATE for place in range(len(counts))])
    told = SimpleNamespace(
        query_start_loc_cpu=torch.cat([torch.zeros(1, dtype=torch.int64), count_N.cumsum(0)]),
        is_prefilling=None if prompts is None else torch.tensor(prompts),
        seq_lens=before_N + count_N,
    )
    kept = find_kept(told, None if drafts is None else torch.tensor(drafts), tokens)
    return kept and (kept.uniform, kept.tokens_N.tolist(), kept.begun_N.tolist())


@pytest.mark.parametrize(
    ("counts", "prompts", "drafts", "tokens"),
    [
        ([1, 1], [False, False], None, 1),
        ([1, 1], None, None, 1),
        ([1, 9], [False, True], None, 1),
        ([4, 1, 0], [False, False, False], [3, 0, -1], 4),
        ([4, 9], [False, True], [3, -1], 4),
        ([1, 2], [False, True], None, 4),
        ([1, 9], [False, False], None, 4),
    ],
)
def test_steps_as_vllm_tells_them(counts, prompts, drafts, tokens):
    """Decodes, drafts, and prompts beside them, which are prefills; more tokens than a decode has are one too."""
    assert find(counts, prompts, drafts, tokens) is None


def test_prompts_that_look_like_decodes():
    assert find([1, 1, 0], [False, True, False], None, 1, begin=(1,)) == (True, [0, 0, 0], [False, True, False])
    assert find([4, 4], [False, True], [3, -1], 4) == (True, [0, 4], [False, False])
    assert find([4, 4], [True, True], None, 4, begin=(0,)) == (True, [4, 4], [True, False])


def test_a_prompt_of_one_token_with_drafts():
    assert find([4, 4], [False, True], [3, 3], 4, begin=(1,)) == (True, [0, 0], [False, True])


def test_answers_that_are_read_again():
    assert find([1, 3, 9], [False, False, True], [0, -1, -1], 4) == (False, [0, 3, 0], [False, False, False])
    assert find([1, 3], [False, False], None, 4) == (False, [0, 3], [False, False])


class Builder:
    reorder_batch_threshold: int | None = None

    def __init__(self, layers: dict[str, Any], drafts: int) -> None:
        self.compilation_config, self.num_spec_tokens = SimpleNamespace(static_forward_context=layers), drafts


class Ours(KeptTokens, Builder):
    reorder_batch_threshold = 1


class Sorting(Builder):
    """As FlashInfer's."""

    reorder_batch_threshold = 1


class Patient(Builder):
    """As that of an MLA backend."""

    reorder_batch_threshold = 4


def layer(builder: type) -> Any:
    backend = SimpleNamespace(get_builder_cls=lambda: builder, get_name=lambda: builder.__name__.upper())
    return SimpleNamespace(get_attn_backend=lambda: backend)


def test_backends_that_sort_drafts_behind_prompts_are_refused():
    layers = {"memory": layer(Ours), "softmax": layer(Builder), "experts": object()}
    for drafts in (0, 3):
        Ours(layers, drafts)
    layers["other"] = layer(Patient)
    Ours(layers, 3)
    with pytest.raises(ValueError, match="attention_backend must not be PATIENT"):
        Ours(layers, 4)
    layers["draft"] = layer(Sorting)
    Ours(layers, 0)
    with pytest.raises(
        ValueError, match="attention_backend must not be SORTING with speculative_config, got it for draft"
    ):
        Ours(layers, 3)
