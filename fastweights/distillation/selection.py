"""Which layers of a student are best kept as attention: those whose attention brings it nearest to its teacher."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from transformers import PreTrainedModel

from ..checks import check_size, check_some, check_whole_number, describe_value, error_prefix
from ..data.text.packing import Row
from ..evaluation.perplexity import text_windows
from ..evaluation.reading import check_model
from ..kinds import checked
from ..models import HybridModel
from ..outputs import check_file, has_keys
from ..results.distillation import LayerRanking, load_ranking, save_ranking
from ..training.run_files import from_mapping
from .held_out import HeldOutKL, Rows, first_rows
from .progress import MeasuringProgress

__all__ = [
    "RANKING",
    "SelectionSettings",
    "auto_layers",
    "is_ranking",
    "rank_layers",
    "read_selection",
    "rows_of_documents",
]

RANKING = "layers.json"  # its name in a folder
AUTO = "auto:"
SAMPLE = 16  # numbers per weight


@checked
@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectionSettings:
    """The budget of a ranking: [selection] of a run file. One evaluation per layer with a memory, and one more, read this
    much text each.

    Attributes:
        rows: rows of held-out text at most; None for as many as `tokens` are.
        tokens: tokens in them at most.
        batch_size: rows read at a time.
        training_steps: steps that the student is trained for first.
    """

    rows: int | None = None
    tokens: int = 65_536
    batch_size: int = 1
    training_steps: int = 0

    def __post_init__(self) -> None:
        for name in ("tokens", "batch_size", *(["rows"] if self.rows is not None else [])):
            check_size(name, getattr(self, name))
        check_whole_number("training_steps", self.training_steps)

    def count(self, length: int) -> int:
        """How many rows of `length` tokens are read at most.

        Raises:
            ValueError: not one.
        """
        if self.tokens < length:
            raise ValueError(f"tokens must be at least {length:,}, the length of a row, got {self.tokens:,}")
        most = self.tokens // length
        return most if self.rows is None else min(self.rows, most)

    def record(self) -> dict[str, int]:
        """As a table of a run file."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


def read_selection(table: Any) -> SelectionSettings:
    """The budget in the table [selection] of a run file.

    Raises:
        ValueError: a key or value that does not fit.
        TypeError: a value of a wrong kind.
    """
    if not isinstance(table, Mapping):
        raise TypeError(
            f"selection must be a table, such as [selection] with tokens = 65536, got {describe_value(table)}"
        )
    with error_prefix("selection"):
        return from_mapping(SelectionSettings, table, "the table")


@checked
def auto_layers(keep: str, layers: int) -> int | None:
    """N of "auto:N", the number of layers, of `layers`, to keep as attention; None for a text that does not begin with "auto:".

    Raises:
        ValueError: N is no whole number, or more than `layers`.
    """
    check_size("layers", layers)
    if not keep.startswith(AUTO):
        return None
    count = keep.removeprefix(AUTO)
    if not count.isdecimal() or int(count) > layers:
        raise ValueError(f'keep must be "auto:N" with N from 0 to the {layers} layers, got {describe_value(keep)}')
    return int(count)


@checked
def rows_of_documents(
    documents: Iterable[Sequence[int]], *, length: int, settings: SelectionSettings, separator: int | None = None
) -> list[Row]:
    """Rows of `length` tokens for `rank_layers`, as many as `settings` read, from documents of token ids: the beginnings of long
    ones, then their further rows, then cuts of all that is shorter than a row, joined with `separator` between the parts.

    Raises:
        ValueError: the documents or `settings.tokens` are fewer tokens than a row.
    """
    count = settings.count(check_size("length", length))
    windows, _ = text_windows(_parts(documents, length, count), length, count=count, separator=separator)
    return [(window, np.zeros(1, np.int64)) for window in windows.numpy()]


def _parts(documents: Iterable[Sequence[int]], length: int, count: int) -> Iterator[Sequence[int]]:
    """The documents, and then up to `count` parts of `length` tokens or less that follow the first row of long ones."""
    rest: list[Sequence[int]] = []
    for document in documents:
        yield document
        starts = range(length, len(document), length)[: count - len(rest)]
        rest += [document[start : start + length] for start in starts]
    yield from rest


@checked
def rank_layers(
    student: HybridModel,
    teacher: PreTrainedModel,
    rows: Rows,
    *,
    settings: SelectionSettings | None = None,
    output: Path | None = None,
    train: Callable[[HybridModel, int], HybridModel] | None = None,
    console: Console | None = None,
) -> LayerRanking:
    """Ranks the layers of a student that have memories, by the held-out KL(teacher || student) with the teacher's attention in
    that layer alone. The layer in which attention lowers it most is the first.

    The student is evaluated once as it is and once per layer; only that layer's attention is exchanged, and nothing of it is
    copied where teacher and student have one dtype. `ranking.best(N)` are the layers that "auto:N" keeps.

    Args:
        student: `linearize(teacher, to=..., keep="none")`, trained or not, or trained by `train`. It is left as it is.
        teacher: the model that it was made of.
        rows: held-out text, rows of one length: `PackedRows`, `ShuffledRows` or a list of such rows. The first ones are read, as
            many as `settings` allow.
        settings: the budget; that of `SelectionSettings()` when None.
        output: folder for layers.json, which is written after every layer. A ranking that is there is continued: no layer is
            measured twice. None writes nothing.
        train: called with the student and `settings.training_steps`, where these are more than 0, also where a ranking is
            continued; returns the trained student, which may be the same object.
        console: shows the progress; None for none.

    Raises:
        ValueError: a student without memories, models that do not fit together, a budget below one row, a divergence that is not
            finite, or an output folder with another file of this name or with the ranking of other models or text.
    """
    settings = settings or SelectionSettings()
    _check_pair(student, teacher)
    if settings.training_steps and train is None:
        raise ValueError(f"train must be a function where training_steps is {settings.training_steps}, got None")
    check_some("rows", first_rows(rows, 1), "row")
    chosen = first_rows(rows, settings.count(len(rows[0][0])))
    path = None if output is None else output / RANKING
    if path is not None:
        check_file("output", path, is_ranking, "ranking")
    if settings.training_steps and train is not None:
        student = train(student, settings.training_steps)
    fingerprint = _fingerprint(student, teacher, chosen)
    ranking = None if path is None or not path.exists() else load_ranking(path)
    if ranking is not None and ranking.fingerprint != fingerprint:
        raise ValueError(
            f"output must be a folder without the ranking of other models or text, but {path} is one; name another folder, or "
            "delete that file"
        )
    if ranking is not None and not ranking.missing:
        return ranking
    measure = HeldOutKL(teacher, chosen, batch_size=settings.batch_size)
    done = 0 if ranking is None else 1 + len(ranking.layers)
    with MeasuringProgress(console, "ranking of layers", done=done, total=1 + len(student.memory_layers())) as progress:
        if ranking is None:
            ranking = LayerRanking(
                base_kl=measure(student),
                rows=len(chosen),
                tokens=measure.tokens,
                settings=dataclasses.asdict(settings),
                fingerprint=fingerprint,
                layers=[],
                missing=list(student.memory_layers()),
            )
            progress.end(f"without attention KL {ranking.base_kl:.4f}")
        for layer in ranking.missing:
            with attention_restored(student, teacher, layer):
                kl = measure(student)
            ranking = ranking.measured(layer, kl)
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                save_ranking(path, ranking)
            progress.end(f"with attention in layer {layer} KL {kl:.4f}")
    return ranking


@contextmanager
def attention_restored(student: Any, teacher: Any, layer: int) -> Iterator[None]:
    """In the body, a layer of the student has its teacher's attention in place of its memory."""
    block = student.model.layers[layer]
    memory, attention = block.self_attn, teacher.model.layers[layer].self_attn
    like = next(student.parameters())
    if any((x.device, x.dtype) != (like.device, like.dtype) for x in attention.parameters()):
        attention = copy.deepcopy(attention).to(like.device, like.dtype)
    block.self_attn = student.keep(copy.copy(attention))  # has the parameters of the original
    try:
        yield
    finally:
        block.self_attn = memory


def is_ranking(path: Path) -> bool:
    """Whether a file is one that `rank_layers` wrote."""
    return has_keys(path, "format", "base_kl", "layers", "missing")


def _check_pair(student: HybridModel, teacher: PreTrainedModel) -> None:
    check_model(teacher)
    if not student.memory_layers():
        raise ValueError("student must have layers with a memory, got none; linearize the teacher without keep")
    for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
        if getattr(student.config, name) != getattr(teacher.config, name):
            raise ValueError(
                f"teacher must be the model that the student was made of, with its {name} {getattr(student.config, name)}, got "
                f"{getattr(teacher.config, name)}; load that model"
            )


def _fingerprint(student: Any, teacher: Any, rows: Sequence[Row]) -> str:
    """A checksum of the text and of the first numbers of every weight: training changes them all."""
    digest = hashlib.sha256()
    for ids, starts in rows:
        digest.update(ids.tobytes() + starts.tobytes())
    for model in (student, teacher):
        for name, weight in model.named_parameters():
            first = weight.detach().flatten()[:SAMPLE].to("cpu", torch.float64)
            digest.update(f"{name} {list(weight.shape)}".encode() + first.numpy().tobytes())
    return digest.hexdigest()[:16]
