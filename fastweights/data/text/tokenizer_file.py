"""What a tokenizer.json does to a text, looked at before any library reads it: a small file can make a text endless."""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...untrusted import one_line

__all__ = ["check_tokenizer_file"]

LARGEST_GROWTH = 256  # characters that one character may become; XLM-R's tokenizer, which can do most, reaches 132
MOST_STEPS = 1000
LONGEST_TOKEN = 10_000  # characters
MOST_ADDED = 1000  # tokens that are put around each text
# Characters, at most, that these steps make of one: the bytes of a character become characters, spaces are put around it.
GROWTH = {"ByteLevel": 4, "BertNormalizer": 3, "Metaspace": 2}
# The parts of the file that change a text on its way to tokens, and on its way back.
WAYS = {"normalizer and pre_tokenizer": ("normalizer", "pre_tokenizer"), "decoder": ("decoder",)}


def check_tokenizer_file(content: Mapping[str, Any]) -> None:
    """Refuse the content of a tokenizer.json that would make more of a text than memory holds.

    Raises:
        ValueError: steps that may make a text longer by more than `LARGEST_GROWTH` times, too many steps, tokens that are too
            long, or too many of them around each text.
    """
    for name, parts in WAYS.items():
        steps = [step for part in parts for step in _steps(content.get(part))]
        _check_count(f"steps of its {name}", len(steps), MOST_STEPS)
        growth = math.prod(map(_growth, steps))
        if growth > LARGEST_GROWTH:
            raise ValueError(
                f"its {name} must make at most {LARGEST_GROWTH} characters of one, and may make {growth:.3g}"
            )
    for token in _tokens(content):
        if len(token) > LONGEST_TOKEN:
            raise ValueError(
                f"its tokens must have at most {LONGEST_TOKEN:,} characters, got {len(token):,}: {one_line(token, 40)}"
            )
    _check_count("tokens around each text", sum(map(_added, _steps(content.get("post_processor")))), MOST_ADDED)


def _check_count(what: str, count: int, largest: int) -> None:
    if count > largest:
        raise ValueError(f"it must have at most {largest:,} {what}, got {count:,}")


def _steps(part: object) -> Iterator[Mapping[str, Any]]:
    """The steps of a part, those of its sequences one by one. `read_json_object` has made sure that few are inside others."""
    if not isinstance(part, dict):
        return
    inner = [step for value in part.values() if isinstance(value, list) for step in value if _is_step(step)]
    if part.get("type") == "Sequence":
        for step in inner:
            yield from _steps(step)
    else:
        yield part


def _is_step(value: object) -> bool:
    return isinstance(value, dict) and "type" in value


def _growth(step: Mapping[str, Any]) -> float:
    """How many characters a step makes of one, at most. What Unicode itself bounds, as of lower case, counts as one."""
    kind = step.get("type")
    if kind == "Replace":
        return _replaced(step.get("pattern"), _length(step.get("content")))
    if kind == "Prepend":
        return 1 + _length(step.get("prepend"))
    if kind == "Precompiled":
        return _mapped(step.get("precompiled_charsmap"))
    return GROWTH.get(str(kind), 1)


def _replaced(pattern: object, content: int) -> float:
    text = pattern.get("String") if isinstance(pattern, dict) else None
    if isinstance(text, str) and text:
        return max(1.0, content / len(text))
    return 1 + content  # a regular expression may match between any two characters


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _length(text: object) -> int:
    return len(text) if isinstance(text, str) else 0


def _mapped(table: object) -> int:
    """The longest text, in bytes, of a table of SentencePiece: the size of its index, the index, texts that end in 0."""
    try:
        content = base64.b64decode(table) if isinstance(table, str) else b""
    except (ValueError, binascii.Error):
        return 1  # the library refuses it
    texts = content[4 + int.from_bytes(content[:4], "little") :]
    return max(1, *map(len, texts.split(b"\0")))


def _tokens(content: Mapping[str, Any]) -> Iterator[str]:
    """Vocabulary and added tokens. A vocabulary is a table of ids by token, or a list of tokens and scores."""
    model, added = content.get("model"), content.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    listed = vocabulary if isinstance(vocabulary, (dict, list)) else ()
    for entry in listed:
        token = entry[0] if isinstance(entry, list) and entry else entry
        if isinstance(token, str):
            yield token
    for entry in _list(added):
        if isinstance(entry, dict) and isinstance(entry.get("content"), str):
            yield entry["content"]


def _added(step: Mapping[str, Any]) -> int:
    """How many tokens a template puts around a text, or around two."""
    special = step.get("special_tokens")
    ids = {
        name: len(_list(entry.get("ids")))
        for name, entry in (special.items() if isinstance(special, dict) else ())
        if isinstance(entry, dict)
    }
    pieces = [piece for name in ("single", "pair") for piece in _list(step.get(name)) if isinstance(piece, dict)]
    named = [piece["SpecialToken"] for piece in pieces if isinstance(piece.get("SpecialToken"), dict)]
    return sum(ids.get(str(piece.get("id")), 1) for piece in named)
