"""Steps of vLLM in which sequences read tokens that all stay and are read as decodes."""

from __future__ import annotations

from typing import Any

import pytest

from .engine import (
    HYBRIDS,
    NGRAM,
    Seen,
    drafted_by,
    engine,
    failing_pool,
    generated,
    in_pieces,
    model,
    observed_steps,
    prompts,
    verifies_drafts,
    written,
)

DRAFTED = NGRAM["num_speculative_tokens"]
MIXERS = ["gdn", "lattice", "rls", ["gdn", "softmax", "vla"], HYBRIDS["memory and windows"]]


def check_uniform(seen: list[Seen], tokens: int) -> None:
    """Steps with so many tokens of each sequence have no prefills, and there were some that read prompts."""
    uniform = [step for step in seen if set(step.counts) == {tokens}]
    assert any(any(step.reads_prompt) for step in uniform)
    assert not any(step.prefills for step in uniform)


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


@verifies_drafts
@pytest.mark.parametrize("mixer", ["gdn", ["gdn", "softmax", "vla"]], ids=["one memory", "hybrid"])
def test_prompts_of_one_token_behind_others(mixer, tmp_path):
    """Which begin while others are written with drafts. vLLM would give them placeholders as drafts since 0.28."""
    own, asked = model(mixer), prompts((9, 7, 5, 3, 1, 1, 1, 1))
    own.save_pretrained(tmp_path)
    wanted = generated(own, asked)
    with engine(tmp_path, speculative_config=NGRAM) as llm, observed_steps() as seen:
        for _ in range(2):
            with drafted_by([ids + tokens for ids, tokens in zip(asked, wanted, strict=True)]):
                assert [list(output.token_ids) for output in written(llm, asked)] == wanted
    mixed = [step for step in seen if not all(step.reads_prompt[: len(step.counts)])]
    assert any((1, True) in zip(step.counts, step.reads_prompt, strict=False) for step in mixed)


@verifies_drafts
@pytest.mark.parametrize(
    ("mixer", "graphs"),
    [("gdn", False), ("gdn", True), (["gdn", "softmax", "vla"], False)],
    ids=["one memory", "even drafts", "hybrid"],
)
def test_answers_that_are_read_again_in_pieces(mixer, graphs, tmp_path, monkeypatch):
    """A sequence that gives way reads its answer again, the last piece of it as short as a decode with drafts. graphs: drafts as
    where there are CUDA graphs."""
    from fastweights.serving.vllm import scheduling

    if graphs:
        monkeypatch.setattr(scheduling, "find_largest_graph", lambda config: 512)
    own, asked, tokens = model(mixer), prompts((3, 4, 5)), 40
    own.save_pretrained(tmp_path)
    wanted = generated(own, asked, tokens)
    drafts = drafted_by([ids + read for ids, read in zip(asked, wanted, strict=True)])
    with engine(tmp_path, speculative_config=NGRAM) as llm, observed_steps() as seen, drafts:
        for pieces in (9, 10, 11):
            with in_pieces(llm, pieces), failing_pool(llm, 13):
                assert [list(output.token_ids) for output in written(llm, asked, tokens)] == wanted
    assert any(step.reads_again for step in seen)
