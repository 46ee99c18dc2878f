"""The text that a model is evaluated on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ..data.text.corpus import TextCorpus

__all__ = ["HeldOutText"]

_HAYSTACK_CHARACTERS = 5_000_000  # a longer text is hidden in from its start only


class HeldOutText:
    """Documents of files and folders (see `TextCorpus` for their formats), all of them; without paths, the documents of the
    Python installation that training on the default corpus keeps held out.

    Attributes:
        name: what a report calls it.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._paths = tuple(map(str, paths))
        self._corpus = TextCorpus(paths=self._paths)
        self.name = ", ".join(self._paths) or "held-out part of the Python installation's source and documentation"

    def documents(self, tokenizer: Any) -> Iterator[list[int]]:
        """Token ids, a document each, read as they are asked for.

        Raises:
            ValueError: a path that does not exist, or files without text.
        """
        for document in self._corpus.documents():
            if self._paths or document.held_out:
                yield tokenizer(document.text, verbose=False).input_ids

    def haystack(self) -> str | None:
        """Text to hide needles in; None without paths, for which the needle tasks have a text of their own.

        Raises:
            ValueError: as `documents`.
        """
        if not self._paths:
            return None
        texts, left = [], _HAYSTACK_CHARACTERS
        for document in self._corpus.documents():
            texts.append(document.text[:left])
            left -= len(texts[-1])
            if left <= 0:
                break
        return "\n\n".join(texts)
