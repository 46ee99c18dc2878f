"""Questions as cloze texts behind the passage that answers them, of Arora et al. 2024 ("Just read twice", arXiv 2407.05483)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["contains", "prompt"]

_MARKS = re.compile(r"\[(PAR|DOC|TLE)\]")  # of the passages of TriviaQA


def prompt(doc: Mapping[str, Any]) -> str:
    """The passage and the beginning of a sentence that the answer ends. Some passages end with that beginning already."""
    passage, question = _MARKS.sub("", doc["context"].strip()), doc["question"].strip()
    while question and passage.lower().endswith(question.lower()):
        passage = passage[: -len(question)]
    return f"{passage.strip().strip('.')}. {question}"


def contains(doc: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Whether one of the answers stands in the continuation, whatever its case."""
    said = results[0].lower()
    return {"contains": float(any(answer.lower() in said for answer in doc["answers"]))}
