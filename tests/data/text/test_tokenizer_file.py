"""How much longer a tokenizer may make a text: pipelines of real tokenizers are taken, and endless ones are not."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from fastweights.data.text import tokenizer_file
from fastweights.data.text.tokenizer_file import LARGEST_GROWTH, check_tokenizer_file


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any], name: str = "normalizers") -> dict[str, Any]:
    return {"type": "Sequence", name: list(steps)}


def table(*texts: str) -> dict[str, Any]:
    """As SentencePiece's: the size of an index, the index, the texts."""
    content = (8).to_bytes(4, "little") + bytes(8) + "".join(f"{text}\0" for text in texts).encode()
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


SPACES = replace({"Regex": " {2,}"}, " ")
METASPACE = {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
# The longest that NFKC makes of a character: 18 of Arabic.
ARABIC = "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645"
REAL = {
    "GPT-2": {"pre_tokenizer": BYTES, "decoder": BYTES},
    "Llama 2": {
        "normalizer": sequence({"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")),
        "decoder": sequence(replace({"String": "\u2581"}, " "), {"type": "ByteFallback"}, name="decoders"),
    },
    "BERT": {"normalizer": {"type": "BertNormalizer"}, "pre_tokenizer": {"type": "BertPreTokenizer"}},
    "XLM-R": {"normalizer": sequence(table("a", ARABIC), SPACES), "pre_tokenizer": METASPACE},
    "ALBERT": {
        "normalizer": sequence(
            replace({"String": "``"}, '"'),
            replace({"String": "''"}, '"'),
            {"type": "NFKD"},
            {"type": "StripAccents"},
            {"type": "Lowercase"},
            table(ARABIC),
        ),
        "pre_tokenizer": METASPACE,
    },
    "nothing": {"normalizer": None, "pre_tokenizer": None, "decoder": None, "post_processor": None, "model": None},
    "of other kinds": {"normalizer": 3, "model": {"vocab": 3}, "added_tokens": {}, "post_processor": {"single": 3}},
}
STEPS = {
    "one that writes much": [replace({"String": "a"}, "a" * 300)],
    "nine that double": [replace({"String": "a"}, "aa")] * 9,
    "nine between characters": [replace({"Regex": "$"}, "a")] * 9,
    "an empty pattern": [replace({"String": ""}, "a")] * 9,
    "nine beginnings": [{"type": "Prepend", "prepend": "a"}] * 9,
    "a table": [table("a" * 300)],
    "two tables": [table("a" * 20), table("b" * 20)],
    "five times the bytes": [{"type": "ByteLevel"}] * 5,
    "six of BERT": [{"type": "BertNormalizer"}] * 6,
}


@pytest.mark.parametrize("name", REAL)
def test_real_tokenizers_are_taken(name: str) -> None:
    check_tokenizer_file(REAL[name])


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("place", ["normalizer", "pre_tokenizer", "decoder"])
def test_growth_is_refused(name: str, place: str) -> None:
    for steps in (sequence(*STEPS[name]), sequence(sequence(*STEPS[name], name="inner"), name="outer")):
        with pytest.raises(ValueError, match=f"{place}.* must make at most {LARGEST_GROWTH} characters of one"):
            check_tokenizer_file({place: steps})


def test_the_growth_of_a_normaliser_and_of_a_pre_tokenizer_are_multiplied() -> None:
    half = {"normalizer": sequence(*[replace({"String": "a"}, "a" * 20)]), "pre_tokenizer": BYTES}
    check_tokenizer_file(half)
    with pytest.raises(ValueError, match="may make 320"):
        check_tokenizer_file({**half, "pre_tokenizer": sequence(BYTES, BYTES)})


def test_the_estimate_is_no_less_than_what_the_library_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the library's own classes, as it writes them to a file."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "aaa"), normalizers.Prepend("aa")])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(), pre_tokenizers.Metaspace()])
    text = "a\U0001f680" * 50
    grown = "".join(piece for piece, _ in made.pre_tokenizer.pre_tokenize_str(made.normalizer.normalize_str(text)))
    check_tokenizer_file(json.loads(made.to_str()))
    assert len(grown) > 3 * len(text)
    monkeypatch.setattr(tokenizer_file, "LARGEST_GROWTH", len(grown) // len(text))
    with pytest.raises(ValueError, match="characters of one"):
        check_tokenizer_file(json.loads(made.to_str()))
