"""Tasks that lm-evaluation-harness lacks: prompts filled up to a length, cloze texts, and their scores."""

from __future__ import annotations

import json
from itertools import count

import pytest
import torch

from .small import model, save, tokenizer

pytest.importorskip("datasets", reason="datasets is missing: pip install 'fastweights[train]'")

from fastweights.evaluation.tasks import cloze, key_values, many_shot  # noqa: E402
from fastweights.evaluation.tasks.filling import fill, score_answer  # noqa: E402

WORDS = tokenizer()


@pytest.mark.parametrize("room", [5, 6, 40, 41, 1000])
def test_as_many_items_as_fit(room):
    """Items of growing size, so that no guess from those before is right."""

    def prompt(items):
        return " ".join(["task", *("item" * (1 + n // 7) for n in items), "question"])

    def tokens(text):
        return len(text) // 4

    items = fill(prompt, count(), tokens, room)
    assert items == list(range(len(items))) and tokens(prompt(items)) <= room < tokens(prompt([*items, len(items)]))


def test_a_prompt_without_room_is_refused():
    with pytest.raises(ValueError, match="a context length must have room for 4 tokens"):
        fill(lambda items: "four words and more", count(), lambda text: len(text.split()), 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved tokenizer, and classified texts that name their label."""
    place = tmp_path_factory.mktemp("many")
    save(place)
    for split, size in (("train", 60), ("test", 3)):
        rows = [{"text": f"topic {n % 4} text {n} of {split}", "label": n % 4} for n in range(size)]
        (place / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return place


def shots(folder, length):
    rows = many_shot.documents(
        source={"path": "json", "data_files": {split: str(folder / f"{split}.jsonl") for split in ("train", "test")}},
        label="label",
        tokenizer=str(folder),
        max_seq_lengths=(length,),
    )
    return list(rows["test"])


def test_examples_come_in_rounds_of_all_labels_with_numbers_of_the_question(folder):
    first, *others = shots(folder, 1500)
    shown = [part.split("\nlabel: ") for part in first["input"].split("\n\n")[1:]]
    texts, asked = shown[:-1], shown[-1][0].removesuffix("\nlabel:")
    assert len(texts) == first["shots"] > 20
    topics = [text.split()[1] for text, _ in texts]
    for start in range(0, len(topics) - 4, 4):
        assert sorted(topics[start : start + 4]) == list("0123")
    numbers = {topic: number for topic, (_, number) in zip(topics, texts, strict=True)}
    assert numbers[asked.split()[1]] == first["output"] and sorted(numbers.values()) == list("0123")
    assert len({text for text, _ in texts[:60]}) == min(60, len(texts))  # none twice before all have come
    assert len({document["input"] for document in (first, *others)}) == 3


def test_three_hundred_examples_are_read_whole_and_answered_as_by_hand(folder):
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'fastweights[eval]'")
    from .harness_calls import ask

    document = shots(folder, 9000)[0]
    assert document["shots"] >= 300
    lm = model("linear")
    ids = torch.tensor([WORDS(document["input"], verbose=False).input_ids])
    by_hand = lm.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=0, pad_token_id=0)[0, ids.shape[1] :]
    request = (document["input"], {"until": [], "max_gen_toks": 6})
    (said,), _ = ask(lm, "generate_until", [request])
    (cut,), cuts = ask(lm, "generate_until", [request], max_length=2000)
    assert said == WORDS.decode(by_hand, skip_special_tokens=True) != cut
    assert cuts == {"task": (1, ids.shape[1] + 6 - 2000)}


def test_a_value_stands_in_the_object_that_fills_the_prompt(folder):
    rows = key_values.documents(tokenizer=str(folder), max_seq_lengths=(1500, 2500), questions=4)["test"]
    places = []
    for row in rows:
        text, _, questions = row["input"].partition("\n\nExtract")
        pairs = json.loads(text)
        key = questions.split("Key: ")[-1].partition("\n")[0]
        assert pairs[key] == row["output"] and row["input"].endswith("Corresponding value:")
        assert row["max_length"] - 300 < len(WORDS(row["input"], verbose=False).input_ids) + 100 <= row["max_length"]
        examples = [part.split("\nCorresponding value: ") for part in questions.split("Key: ")[1:-1]]
        assert len(examples) == 2 and all(pairs[key] == value.strip() for key, value in examples)
        places.append(list(pairs).index(key))
    assert len(set(places)) > 2


@pytest.mark.parametrize(
    ("said", "is_label", "found"),
    [(" 17", True, 1), ("label: 17\nand", True, 1), ("172", True, 0), ("so 17", True, 0), ("it is A17b.", False, 1)],
)
def test_scores(said, is_label, found):
    document = {"output": "a17B" if not is_label else "17", "is_label": is_label, "max_length": 4096}
    assert score_answer(document, [said]) == {"4096": found}


def test_a_cloze_text_follows_its_passage_once():
    document = {"context": " [DOC] It rains.[PAR] The sea is", "question": "The sea is ", "answers": ["Far", "near"]}
    assert cloze.prompt(document) == "It rains. The sea is"
    assert (
        cloze.contains(document, ["so very FAR"]) == {"contains": 1}
        and cloze.contains(document, ["so"])["contains"] == 0
    )
