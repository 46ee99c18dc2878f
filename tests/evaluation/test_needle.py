"""Needles: where they stand, how long the text is, and that a model is scored by what it would say."""

from __future__ import annotations

import re
from types import SimpleNamespace
from uuid import UUID

import pytest
import torch

from fastweights.evaluation import NEEDLE_TASKS, needle_recall
from fastweights.evaluation.reading import prompt_tokens
from fastweights.evaluation.ruler_text import documentation, write_prompt

from .small import TEXT, model, tokenizer

WORDS = tokenizer()
UUID_FORM = r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
VALUE = {"s-niah-1": r"\d{7}", "s-niah-2": r"\d{7}", "s-niah-3": UUID_FORM}


# Sentences of one length: those of Python's documentation differ between its versions.
SENTENCES = "A memory answers each key that it reads with the value it holds. " * 400


def prompt(task="s-niah-2", *, length=500, depth=0.5, seed=0, index=0, around=TEXT):
    return write_prompt(
        task,
        length=length,
        depth=depth,
        seed=seed,
        index=index,
        words=around.split(),
        count_tokens=lambda text: len(prompt_tokens(WORDS, text)),
    )


def sentence(draft):
    """The needle: the end of the question, and the answer."""
    return f"{draft.question.partition('? ')[2]} {draft.answer}."


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_a_prompt_fills_its_length_and_holds_the_needle_once(task):
    for length in (300, 1000):
        text, needle = prompt(task, length=length)
        assert length - 20 < len(prompt_tokens(WORDS, f"{text} {needle.answer}")) <= length
        assert re.fullmatch(VALUE[task], needle.answer)
        assert text.count(needle.answer) == 1 and text.count(sentence(needle)) == 1
        assert text.endswith(sentence(needle).removesuffix(f" {needle.answer}."))
    if task == "s-niah-3":
        assert UUID(needle.answer).version == 4


@pytest.mark.parametrize("task", NEEDLE_TASKS)
def test_the_needle_stands_at_its_depth_behind_a_sentence(task):
    places = []
    for depth in (0.0, 0.25, 0.5, 0.75, 1.0):
        text, needle = prompt(task, length=2000, depth=depth, around=SENTENCES)
        context = text.removeprefix(needle.introduction).removesuffix(needle.question)
        before = context[: context.index(sentence(needle))].rstrip()
        assert before == "" or before[-1] in ".!?" or depth == 1
        places.append(len(before) / (len(context) - len(sentence(needle))))
    assert places[0] == 0 and places == pytest.approx([0, 0.25, 0.5, 0.75, 1], abs=0.05)


def test_prompts_are_a_function_of_their_arguments():
    assert prompt()[0] == prompt()[0]
    texts = {prompt(**change)[0] for change in ({}, {"index": 1}, {"seed": 1}, {"task": "s-niah-3"}, {"depth": 0})}
    assert len(texts) == 5
    assert len({prompt("s-niah-1", index=index)[1].answer for index in range(20)}) == 20


def test_short_text_is_repeated_and_noise_begins_at_its_start():
    text, _ = write_prompt(
        "s-niah-2",
        length=400,
        depth=0,
        seed=0,
        index=0,
        words=["so", "it", "is."],
        count_tokens=lambda t: len(t.split()),
    )
    assert text.count("so it is.") > 100
    assert prompt("s-niah-1", depth=1)[0].split("\n\n")[1].startswith("Rain falls on the roof. A road")


def test_documentation_is_long():
    assert len(documentation()) > 300_000


class Reader(torch.nn.Module):
    """A model that finds the needle's value in what it has read. Asked for the likelihood of the answer it prefers the tokens
    that `say` makes of it; left to itself it says the value in capitals, or nothing of it."""

    def __init__(self, say):
        super().__init__()
        self.say, self.lm_head, self.device = say, torch.nn.Identity(), torch.device("cpu")
        self.config = SimpleNamespace(num_hidden_layers=1)
        self.generation_config = SimpleNamespace(eos_token_id=None)
        self.seen = torch.zeros(1, 0, dtype=torch.long)

    def model(self, ids, attention_mask, past_key_values):
        if past_key_values.columns == 0:
            self.seen = ids
        past_key_values.columns += ids.shape[1]
        if past_key_values.columns > self.seen.shape[1]:
            self.seen = torch.cat([self.seen, ids], 1)
        value = re.search(r"The secret \w+ of [\w ]+ is (\S+)\.", WORDS.decode(self.seen[0])).group(1)
        answer = WORDS(f" {value}").input_ids
        logits = torch.zeros(1, ids.shape[1], 400)
        if len(answer) == ids.shape[1]:
            logits[0, torch.arange(len(answer)), torch.tensor(self.say(answer))] = 9.0
        return SimpleNamespace(last_hidden_state=logits)

    def generate(self, ids, past_key_values, max_new_tokens, **options):
        value = re.search(r"is (\S+)\.", WORDS.decode(ids[0]).split("The secret")[1]).group(1)
        said = WORDS(f" hm: {value.upper()}" if self.say([1, 2]) == [1, 1] else " I forgot").input_ids
        return torch.cat([ids, torch.tensor([said[:max_new_tokens]])], 1)


@pytest.mark.parametrize("task", NEEDLE_TASKS)
@pytest.mark.parametrize(
    "say, found, exact",
    [
        (lambda answer: answer, 1.0, 1.0),
        (lambda answer: [answer[0]] * len(answer), 1.0, 0.0),  # says it after all, in capitals
        (lambda answer: [0] * len(answer), 0.0, 0.0),
    ],
    ids=["exact", "found", "neither"],
)
def test_scores(task, say, found, exact):
    result = needle_recall(Reader(say), WORDS, task, length=700, depth=0.3, examples=3, text=TEXT, block=10_000)
    assert (result.found, result.exact, result.examples) == (found, exact, 3)
    assert (result.answer_loss < 0.1) == bool(exact)


@pytest.mark.parametrize("block", [16, 64])
def test_answers_are_the_full_forwards(block):
    lm = model(["gdn", "softmax"])
    result = needle_recall(lm, WORDS, "s-niah-1", length=220, examples=2, block=block)
    losses = []
    for index in range(2):
        text, needle = prompt("s-niah-1", length=220, index=index)
        whole, start = WORDS(f"{text} {needle.answer}").input_ids, len(WORDS(text).input_ids)
        ids = torch.tensor([whole])
        with torch.no_grad():
            losses += torch.nn.functional.cross_entropy(
                lm(ids, use_cache=False).logits[0, start - 1 : -1], ids[0, start:], reduction="none"
            ).tolist()
    assert result.answer_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "s-niah-4"}, "must be one of 's-niah-1', 's-niah-2', 's-niah-3', got 's-niah-4'"),
        (
            {"length": 20},
            "lengths must be at least .* tokens for 's-niah-2' at its smallest, got 20",
        ),
        ({"length": 0}, "length must be a positive whole number"),
        ({"depth": 1.5}, "depth must be a finite number, at least 0 and at most 1, got 1.5"),
        ({"text": " \n"}, "text must hold at least one word"),
        ({"examples": 0}, "examples must be"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_bad_input(options, message):
    arguments = {"task": "s-niah-2", "length": 400, "text": TEXT, **options}
    with pytest.raises(ValueError, match=message):
        needle_recall(model(), WORDS, arguments.pop("task"), **arguments)
