"""The text of a training, made once for all processes that share a cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from ...data.text import PreparedText, TextCorpus, prepare_text
from .agreement import check_same_text, who_sees
from .model import model_tokenizer
from .processes import (
    from_main_process,
    gather_to_main,
    is_main_process,
    name_ranks,
    node,
    on_every_process,
    process_index,
    world_size,
)
from .progress import TextProgress, line_printer
from .run import LanguageRun

__all__ = ["prepare_texts"]

SEEN_SECONDS = 5.0  # where a network file system shows it later, a host looks at the text for itself


def prepare_texts(run: LanguageRun, singles: Sequence[LanguageRun], console: Console) -> list[PreparedText]:
    """The text of every model and stage. The main process makes it, and so does the first process of every host that does not
    share its cache. The others then open it. Whoever makes it compares all its checksums.

    Raises:
        ValueError: a corpus or tokenizer that cannot be used, or hosts whose text differs. Every process raises it.
    """
    makes = _makes_text(Path(run.cache))

    def prepare() -> list[PreparedText]:
        line = line_printer(console)
        name = "" if is_main_process() else f"{name_ranks(process_index())}: "
        with TextProgress(console if is_main_process() else Console(quiet=True)) as progress:
            return _open_texts(run, singles, lambda text: line(name + text), progress, read_all=makes)

    made = on_every_process(prepare) if makes else on_every_process(list)
    texts = on_every_process(list if makes else prepare) or made
    check_same_text(texts)
    return texts


def _makes_text(cache: Path) -> bool:
    """Whether this process is rank 0, or the first of a host that does not share the cache of rank 0."""
    if world_size() == 1:
        return True
    seen = who_sees(cache / "tokens", SEEN_SECONDS)
    nodes = from_main_process(gather_to_main(node()))
    rank = process_index()
    alike = [other for other, sees in enumerate(seen) if sees == seen[rank] and (sees or nodes[other] == nodes[rank])]
    return rank == alike[0]


def _open_texts(
    run: LanguageRun,
    singles: Sequence[LanguageRun],
    report: Callable[[str], None],
    progress: TextProgress,
    *,
    read_all: bool,
) -> list[PreparedText]:
    """All texts. They have the tokenizer of the first."""
    made: list[tuple[TextCorpus, PreparedText]] = []
    for single in singles:
        text = single.corpus.from_start()
        if all(corpus != text for corpus, _ in made):
            tokenizer = model_tokenizer(singles[0])
            if made:
                tokenizer = dataclasses.replace(tokenizer, path=made[0][1].tokenizer.name_or_path)
            left_out = (*single.corpus.excluded, run.output, run.cache)
            corpus = dataclasses.replace(text, excluded=left_out)
            made.append(
                (text, prepare_text(corpus, tokenizer, run.cache, report, read_all=read_all, progress=progress))
            )
    return [next(text for corpus, text in made if corpus == single.corpus.from_start()) for single in singles]
