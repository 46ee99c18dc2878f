"""RULER's tasks: a reader of the prompt alone finds the answers, texts fill their lengths, models are scored as RULER does."""

from __future__ import annotations

import re
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from fastweights.evaluation import RULER_TASKS, ruler_recall
from fastweights.evaluation.reading import prompt_tokens
from fastweights.evaluation.ruler_text import documentation, write_prompt

from .small import TEXT, model, tokenizer

WORDS = tokenizer()


def draw(task, *, length=1200, seed=0, index=0, around=TEXT, count_tokens=lambda text: len(text.split())):
    """A prompt of so many words, and its draft."""
    return write_prompt(task, length=length, seed=seed, index=index, words=around.split(), count_tokens=count_tokens)


def secrets(prompt):
    """Every (key, value) that the text names, in its order."""
    return re.findall(r"The secret (?:number|UUID) of ([\w -]+) is ([\w-]+)\.", prompt)


def by_key(prompt):
    keys = re.search(
        r"Name the secret \w+ of (.+?)(?: in the order of the text|, in the order in which|\. The)", prompt
    )
    asked = re.split(", | and ", keys.group(1))
    return [value for key in asked for name, value in secrets(prompt) if name == key]


def variables(prompt):
    value = re.search(r"have the value (\d{5}),", prompt).group(1)
    holding = []
    for name, source in re.findall(r"VAR (\w+) = (?:VAR )?(\w+)\.", prompt):
        if source in (value, *holding):
            holding.append(name)
    return holding


def common(prompt):
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", prompt))
    return sorted(word for word, count in counts.items() if count == max(counts.values()))


def frequent(prompt):
    counts = Counter(prompt.split("\n\n")[1].split())
    del counts["..."]
    return [word for word, _ in counts.most_common(3)]


SOLVE = {
    **dict.fromkeys(("mk-niah-1", "mk-niah-2", "mk-niah-3", "mv-niah", "mq-niah"), by_key),
    **{"vt": variables, "cwe": common, "fwe": frequent},
}


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_reader_of_the_prompt_finds_the_answers(task):
    assert list(SOLVE) == list(RULER_TASKS)
    for index in range(4):
        prompt, draft = draw(task, index=index)
        assert SOLVE[task](prompt) == list(draft.answers) == draft.answer.split(", ")
        assert prompt.endswith((" is", " are"))
        assert task == "cwe" or not any(answer in draft.question for answer in draft.answers)


@pytest.mark.parametrize("task", RULER_TASKS)
def test_a_prompt_fills_its_length(task):
    count = len if task == "fwe" else lambda text: len(prompt_tokens(WORDS, text))
    for length in (4000, 5000):
        prompt, draft = draw(task, length=length, count_tokens=count)
        assert length - 200 < count(f"{prompt} {draft.answer}") <= length


@pytest.mark.parametrize("task", RULER_TASKS)
def test_prompts_are_a_function_of_their_arguments(task):
    assert draw(task)[0] == draw(task)[0]
    assert len({draw(task, **change)[0] for change in ({}, {"index": 1}, {"seed": 1}, {"length": 1100})}) == 4
    assert len({draw(task, index=index)[1].answers for index in range(8)}) == 8


def test_how_many_needles_a_text_has():
    assert len(secrets(draw("mk-niah-1")[0])) == 4 and len(draw("mk-niah-1")[1].answers) == 1
    assert len(set(secrets(draw("mk-niah-1")[0]))) == 4
    for task in ("mk-niah-2", "mk-niah-3"):
        prompt, draft = draw(task)
        found = secrets(prompt)
        assert len(found) > 90 and len(dict(found)) == len(set(dict(found).values())) == len(found)
        text = prompt.split("\n\n")[1]
        assert re.sub(r"The secret (number|UUID) of [\w -]+ is [\w-]+\. ?", "", text) == "" and len(draft.answers) == 1
    names, values = zip(*secrets(draw("mv-niah")[0]), strict=True)
    assert len(set(names)) == 1 and len(set(values)) == 4 == len(draw("mv-niah")[1].answers)
    names, values = zip(*secrets(draw("mq-niah")[0]), strict=True)
    assert len(set(names)) == len(set(values)) == 4 == len(draw("mq-niah")[1].answers)


@pytest.mark.parametrize("task", ["mk-niah-1", "mk-niah-2", "mq-niah", "vt"])
def test_needles_stand_anywhere_in_the_text(task):
    places = []
    for index in range(60):
        prompt, draft = draw(task, length=400, index=index, around="So it is. " * 50)
        text = prompt.split("\n\n")[1]
        places.append(text.index(draft.answers[0]) / len(text))
    early, late = sum(place < 0.25 for place in places), sum(place > 0.75 for place in places)
    if task == "vt":  # the first of five in a row
        assert early > 30 and late < 5
    else:
        assert 4 < early < 30 and 4 < late < 30


def test_statements_stand_behind_sentences():
    prompt, _ = draw("vt")
    for place in re.finditer("VAR [A-Z]{5} = ", prompt):
        assert prompt[: place.start()].rstrip()[-1] in ".!?" or prompt[: place.start()].endswith("\n\n")


def test_a_list_holds_ten_words_thirty_times_and_the_others_three_times():
    prompt, draft = draw("cwe")
    entries = re.findall(r"(\d+)\. ([a-z]+)", prompt)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    counts = Counter(word for _, word in entries)
    assert Counter(counts.values()) == {30: 10, 3: len(counts) - 10} and len(counts) > 50
    assert set(counts) <= set(TEXT.split()) and list(draft.answers) == sorted(draft.answers)
    places = [place for place, (_, word) in enumerate(entries) if word == draft.answers[0]]
    assert max(places) - min(places) > len(entries) / 2  # mixed


def test_frequencies_of_coded_words_follow_the_zeta_distribution():
    prompt, draft = draw("fwe", length=2000)
    counts = Counter(prompt.split("\n\n")[1].split())
    size = next(n for n in range(1500, 2000) if int(n / 1.6449340668482264) == counts["..."])
    wanted = [int(n) for k in range(1, 60) if (n := size / (1.6449340668482264 * k * k)) >= 1]
    assert sorted(counts.values(), reverse=True) == wanted
    assert all(re.fullmatch("[a-z]{6}", word) for word in counts if word != "...")
    least = draft.text(draft.least).split()
    first_four = [least.count(word) for word in draft.answers]
    assert first_four[2] > max(least.count(word) for word in set(least) - {"...", *draft.answers})


def test_many_needles_fit_a_long_text():
    prompt, draft = draw("mk-niah-2", length=60_000)
    assert len(prompt.split()) > 59_000 and by_key(prompt) == list(draft.answers)


class Speaker(torch.nn.Module):
    """A model that never finds the answer likely, and says what `say` makes of the answers when left to itself."""

    def __init__(self, answers, say):
        super().__init__()
        self.answers, self.say = iter(answers), say
        self.lm_head, self.device = torch.nn.Identity(), torch.device("cpu")
        self.config = SimpleNamespace(num_hidden_layers=1)
        self.generation_config = SimpleNamespace(eos_token_id=None)

    def model(self, ids, attention_mask, past_key_values):
        past_key_values.columns += ids.shape[1]
        return SimpleNamespace(last_hidden_state=torch.zeros(1, ids.shape[1], 400))

    def generate(self, ids, past_key_values, max_new_tokens, **options):
        said = WORDS(self.say(next(self.answers))).input_ids
        return torch.cat([ids, torch.tensor([said[:max_new_tokens]])], 1)


@pytest.mark.parametrize(
    ("say", "found"),
    [
        (lambda answers: " and ".join(reversed(answers)), 1.0),
        (lambda answers: f"{answers[2]} {answers[0]}".swapcase(), 0.5),
        (lambda answers: "I forgot", 0.0),
    ],
    ids=["all", "half", "none"],
)
@pytest.mark.parametrize("task", ["mv-niah", "mq-niah"])
def test_the_score_is_the_part_of_the_answers_that_is_said(task, say, found):
    def count(text):
        return len(prompt_tokens(WORDS, text))

    answers = [draw(task, length=500, index=index, count_tokens=count)[1].answers for index in range(3)]
    result = ruler_recall(Speaker(answers, say), WORDS, task, length=500, examples=3, text=TEXT)
    assert (result.found, result.exact, result.examples, result.length) == (found, 0.0, 3, 500)
    assert result.answer_loss == pytest.approx(torch.tensor(400.0).log().item(), rel=1e-5)


@pytest.mark.parametrize("block", [64, 500])
def test_answer_losses_are_the_full_forwards(block):
    lm = model(["gdn", "softmax"])
    result = ruler_recall(lm, WORDS, "mv-niah", length=420, examples=2, text=TEXT, block=block)
    losses = []
    for index in range(2):
        prompt, draft = draw(
            "mv-niah", length=420, index=index, count_tokens=lambda text: len(prompt_tokens(WORDS, text))
        )
        whole, start = WORDS(f"{prompt} {draft.answer}").input_ids, len(WORDS(prompt).input_ids)
        with torch.no_grad():
            logits = lm(torch.tensor([whole]), use_cache=False).logits[0, start - 1 : -1]
        losses += torch.nn.functional.cross_entropy(logits, torch.tensor(whole[start:]), reduction="none").tolist()
    assert result.answer_loss == pytest.approx(sum(losses) / len(losses), rel=1e-4)


def test_without_a_text_it_is_the_documentation():
    lm = model()
    asked = {"length": 420, "examples": 1}
    assert ruler_recall(lm, WORDS, "mk-niah-1", **asked) == ruler_recall(
        lm, WORDS, "mk-niah-1", **asked, text=documentation()
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"task": "mk-niah-4"}, "the name of a RULER task must be one of 'mk-niah-1', .*, got 'mk-niah-4'"),
        ({"length": 100}, "lengths must be at least .* tokens for 'mv-niah' at its smallest, got 100"),
        ({"length": 0}, "length must be a positive whole number"),
        ({"text": " "}, "text must hold at least one word"),
        ({"task": "cwe", "text": "too few words"}, "text must hold at least 20 different words .* got 3"),
        ({"examples": 0}, "examples must be"),
        ({"seed": -1}, "seed must be"),
        ({"block": 0}, "block must be"),
    ],
)
def test_bad_input(options, message):
    arguments = {"task": "mv-niah", "length": 420, "text": TEXT, **options}
    with pytest.raises(ValueError, match=message):
        ruler_recall(model(), WORDS, arguments.pop("task"), **arguments)
