"""The text that a model is evaluated on."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any

from ..data.text.corpus import TextCorpus
from ..results.language import training_record
from ..untrusted import one_line, read_json_object

__all__ = ["HeldOutText"]

_HAYSTACK_CHARACTERS = 5_000_000  # a longer text is hidden in from its start only
_UNKNOWN = (
    "held-out part of the Python installation's source and documentation; nothing says what the model was trained on, it may "
    "be this"
)


class HeldOutText:
    """Documents of files and folders (see `TextCorpus` for their formats), all of them. Without paths, those that the training
    of the model in the folder `model` kept held out. Where the folder records no training, the documents of the Python
    installation that training on the default corpus keeps held out, which this model may have been trained on.

    Attributes:
        name: what a report calls it.
        notice: a line that says which files, folders or dataset the run.json of the training names, to be shown before they are
            read: a stranger's may name anything. "" where no run.json is read.

    Raises:
        ValueError: the run.json of the training is damaged.
    """

    def __init__(self, paths: Sequence[str | Path], model: Path | None = None) -> None:
        self._paths = tuple(map(str, paths))
        run = None if model is None or self._paths else training_record(model)
        self.notice = ""
        if run is not None:
            self._corpus, self.name = _find_training_text(run)
            self.notice = f"Reading the text that {run} names: {_sources(self._corpus)}"
        else:
            self._corpus = TextCorpus(paths=self._paths)
            self.name = ", ".join(self._paths) or _UNKNOWN

    def find(self) -> None:
        """Look for the files, without reading their texts.

        Raises:
            ValueError: one does not exist or is no file.
        """
        with self._errors_named():
            self._corpus.find()

    def documents(self, tokenizer: Any) -> Iterator[list[int]]:
        """Token ids, a document each, read as they are asked for.

        Raises:
            ValueError: a path that does not exist, or files without text; at once, before any document is asked for.
        """
        texts = ((single.lengths, text) for single in self._corpus.singles for text in self._texts(single))
        with self._errors_named():
            first = list(islice(texts, 1))
        encoded = ((lengths, tokenizer(text, verbose=False).input_ids) for lengths, text in chain(first, texts))
        return (ids for lengths, ids in encoded if lengths.admits(len(ids)))

    def haystack(self) -> str | None:
        """Text to hide needles in; None without paths: the needle tasks have a text of their own.

        Raises:
            ValueError: a path that does not exist, or files without text.
        """
        if not self._paths:
            return None
        texts, left = [], _HAYSTACK_CHARACTERS
        for text in self._corpus.texts():
            texts.append(text[:left])
            left -= len(texts[-1])
            if left <= 0:
                break
        return "\n\n".join(texts)

    @contextmanager
    def _errors_named(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            raise error if self._paths else ValueError(f"{self.name}: {error}; or pass --text") from None

    def _texts(self, corpus: TextCorpus) -> Iterator[str]:
        return corpus.texts() if self._paths else (document.text for document in corpus.held_out_documents())


def _sources(corpus: TextCorpus) -> str:
    """What a corpus reads, in words."""
    if corpus.sources:
        return ", ".join(map(_sources, corpus.singles))
    if corpus.dataset is not None:
        return one_line(f"the dataset {corpus.dataset!r} of the Hugging Face hub")
    paths = dict.fromkeys([*corpus.held_out, *corpus.paths])
    return ", ".join(map(one_line, paths)) or "the source of the Python installation"


def _find_training_text(run: Path) -> tuple[TextCorpus, str]:
    """The corpus of a training, and what to call its held-out text."""
    try:
        settings = read_json_object(run)
        corpus, continued = TextCorpus(**settings["corpus"]), "path" in settings["model"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"{run} must say what text the model was trained on, but it is damaged: {one_line(error)}; pass --text"
        ) from None
    # What a training wrote between its texts was not there when it read them.
    folders = [folder for folder in (run.parent, run.parent.parent) if (folder / run.name).is_file()]
    corpus = dataclasses.replace(corpus, excluded=(*corpus.excluded, *map(str, folders)))
    doubt = "; the model that this training continued may have been trained on it" if continued else ""
    return corpus, f"held-out text of the training in {run.parent}{doubt}"
