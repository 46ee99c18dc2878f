"""Steps of vLLM in which each sequence reads as many tokens as decodes do, some of them of their prompts: vLLM replays its graph
of decodes for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from .engine import HYBRIDS, NGRAM, drafted_by, engine, generated, in_pieces, model, prompts, verifies_drafts, written

DRAFTED = NGRAM["num_speculative_tokens"]
MIXERS = ["gdn", "lattice", "rls", ["gdn", "softmax", "vla"], HYBRIDS["memory and windows"]]


@contextmanager
def observed_steps() -> Iterator[list[tuple[list[int], list[bool], int]]]:
    """Of each step: the tokens of its sequences, which read their prompts, and how many sequences vLLM calls prefills."""
    from fastweights.serving.vllm.memory import StepBuilder

    seen: list[tuple[list[int], list[bool], int]] = []
    compute = StepBuilder._compute_common_metadata

    def observe(self: Any, common_attn_metadata: Any, **told: Any) -> Any:
        step = compute(self, common_attn_metadata, **told)
        counts = common_attn_metadata.query_start_loc_cpu.diff()
        reads = common_attn_metadata.is_prefilling & (counts > 0)
        seen.append((counts[counts > 0].tolist(), reads.tolist(), step.num_prefills))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBuilder, "_compute_common_metadata", observe)
        yield seen


def check_uniform(seen: list[tuple[list[int], list[bool], int]], tokens: int) -> None:
    """Steps with so many tokens of each sequence have no prefills, and there were some that read prompts."""
    uniform = [(reads, prefills) for counts, reads, prefills in seen if set(counts) == {tokens}]
    assert any(any(reads) for reads, _ in uniform)
    assert not any(prefills for _, prefills in uniform)


def check_after_others(own: Any, llm: Any, asked: list[list[int]]) -> None:
    """Alone and together, in blocks that other sequences have left behind."""
    wanted = generated(own, asked)
    with drafted_by([ids + tokens for ids, tokens in zip(asked, wanted, strict=True)]):
        for _ in range(2):
            for ids, tokens in zip(asked, wanted, strict=True):
                assert [list(output.token_ids) for output in written(llm, [ids])] == [tokens]
            assert [list(output.token_ids) for output in written(llm, asked)] == wanted


@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_prompts_of_one_token(mixer, tmp_path):
    """Also a prompt whose first piece is one token, as no more are left of a step."""
    own = model(mixer)
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm, observed_steps() as seen:
        check_after_others(own, llm, prompts((1, 1, 1, 5)))
        with in_pieces(llm, 1):
            check_after_others(own, llm, prompts((3, 5)))
    check_uniform(seen, 1)


@verifies_drafts
@pytest.mark.parametrize("mixer", MIXERS, ids=str)
def test_prompts_as_long_as_drafts(mixer, tmp_path):
    own, tokens = model(mixer), 1 + DRAFTED
    own.save_pretrained(tmp_path)
    with engine(tmp_path, speculative_config=NGRAM) as llm, observed_steps() as seen:
        check_after_others(own, llm, prompts((tokens, tokens, tokens, 3 * tokens)))
        with in_pieces(llm, tokens):
            check_after_others(own, llm, prompts((2 * tokens, 3 * tokens)))
    check_uniform(seen, tokens)
