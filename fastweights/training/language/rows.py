"""The rows of text that a training reads: where they begin, whether there are enough, and what a checkpoint keeps of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from ...data.text import PackedRows, PreparedText
from ...data.text.mixing import MixedRows, Mixture
from ...data.text.packing import ShuffledRows
from ...data.text.streamed import StreamedRows
from ...files import write_json
from ...untrusted import read_json_object
from ..checkpoints import checkpoint_step, checkpoints_in
from .context import ContextGroups
from .processes import world_size
from .run import LanguageRun

__all__ = ["DataStart", "check_rows", "find_start", "load_rows", "save_rows", "training_rows"]

SAME = ("corpus_text", "tokenizer_content")  # of a training and the one that continues with its text
DATA = "data.json"  # in a checkpoint: how far the text was read


@dataclass(frozen=True)
class DataStart:
    """Where a training begins to read.

    Attributes:
        seed: of the order of the rows: that of the run, or of the training that it continues from.
        rows: how many rows in this order are left out.
        parts: in how many parts text that is streamed is read; 0 for other text.
        states: of streams, where the training that it continues from had come to; [] from the start of the text.
    """

    seed: int
    rows: int
    parts: int
    states: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def record(self, run: LanguageRun) -> dict[str, str]:
        """What the run folder keeps of it, where it is not as usual."""
        moved = {"data_start": f"row {self.rows} of seed {self.seed}"} if self.rows or self.seed != run.seed else {}
        return moved | ({"data_parts": str(self.parts)} if self.parts else {})


def find_start(run: LanguageRun, text: PreparedText) -> DataStart:
    """Where `run` begins to read `text`.

    Raises:
        ValueError: continue_from names no training on the same text, or one whose rows cannot be continued; or the parts of the
            text cannot be shared out among the processes.
    """
    corpus, groups = run.corpus, ContextGroups.of(run)
    if corpus.continue_from is not None:
        start = _continued(run, text, Path(corpus.continue_from))
    else:
        parts = (corpus.parts or groups.count) if corpus.streaming else 0
        rows = int(corpus.skip_tokens) // run.length
        start = DataStart(run.seed, rows - rows % max(parts, 1), parts)
    if start.parts % groups.count:
        raise ValueError(
            f"parts must be a multiple of the number of {groups.name}, {groups.count}, got {start.parts}; start another number "
            "of processes"
        )
    return start


def _continued(run: LanguageRun, text: PreparedText, folder: Path) -> DataStart:
    saved = checkpoints_in(folder / "checkpoints")
    if not (folder / "run.json").is_file() or not saved:
        raise ValueError(
            f"continue_from must be the folder of one training with its checkpoints, got {folder}; name another"
        )
    record = read_json_object(folder / "run.json")
    other = [name for name in SAME if record.get(name) != text.fingerprints[name]]
    if other:
        raise ValueError(
            f"continue_from must be a training on the same text with the same tokenizer, but {' and '.join(other)} of {folder} "
            "are others; use its [corpus] and [tokenizer]"
        )
    rows = checkpoint_step(saved[-1]) * record["rows_a_step"]
    found = {"seed": record["seed"], "length": record["length"], "rows": rows}  # earlier versions wrote no DATA
    if (saved[-1] / DATA).is_file():
        found = read_json_object(saved[-1] / DATA)
    if not run.corpus.streaming and found["length"] != run.length:
        raise ValueError(
            f"length must be that of the training in {folder}, whose rows are shuffled as a whole, to read the others: "
            f"{found['length']}, got {run.length}; change it, or train both with streaming = true"
        )
    parts = found.get("parts", 0)
    if run.corpus.parts not in (None, parts):
        raise ValueError(f"parts must be as in {folder}, {parts}, got {run.corpus.parts}; leave it out")
    return DataStart(found["seed"], found["rows"], parts, found.get("states", []))


def training_rows(run: LanguageRun, text: PreparedText, start: DataStart, *, count: int) -> MixedRows | StreamedRows:
    """The `count` rows that all processes together read from `start` on."""
    corpus = text.corpus or run.corpus
    if not corpus.streaming:
        mixture = Mixture(corpus.weights, start.seed)
        shuffled = [ShuffledRows(rows, seed=start.seed, count=start.rows + count) for rows in _packed(run, text)]
        return MixedRows(shuffled, mixture, first=start.rows, count=count)
    groups = ContextGroups.of(run)
    rows = StreamedRows(
        corpus, text.tokenizer, length=run.length, seed=start.seed, count=count, parts=start.parts, first=start.rows,
        process=groups.index, processes=groups.count, ahead=2 * max(size for _, size in run.plan(world_size()).parts),
    )  # fmt: skip
    if start.states:
        rows.load(start.rows, start.states)
    return rows


def _packed(run: LanguageRun, text: PreparedText) -> list[PackedRows]:
    return [PackedRows(shards, run.length) for shards in text.sources or (text.train,)]


def check_rows(run: LanguageRun, text: PreparedText, start: DataStart, *, count: int) -> None:
    """Refuse text that is too short for `run`. That of streamed text comes out as it is read.

    Raises:
        ValueError: there are fewer rows than a batch has, or than `epochs` allows to read of a source.
    """
    corpus = text.corpus or run.corpus
    if corpus.streaming:
        return
    lengths = [len(rows) for rows in _packed(run, text)]
    if run.batch_size > sum(lengths):
        raise ValueError(
            f"batch_size must be at most {sum(lengths)}, the rows of length {run.length} that the train text has, got "
            f"{run.batch_size}; pass more text, or a smaller batch"
        )
    needed = Mixture(corpus.weights, start.seed).rows_before(start.rows + count)
    for number, (rows, most) in enumerate(zip(needed, lengths, strict=True), 1):
        if corpus.epochs is not None and rows > corpus.epochs * most:
            which = f"source {number}" if len(lengths) > 1 else "the train text"
            raise ValueError(
                f"epochs = {corpus.epochs} lets a training read {corpus.epochs * most:,} rows of {which}, but it would read "
                f"{rows:,}; raise epochs, pass more text, or take fewer steps"
            )


def save_rows(
    rows: MixedRows | StreamedRows, start: DataStart, folder: Path, *, run: LanguageRun, read: int, main: bool
) -> None:
    """Write into a checkpoint that `read` rows after `start` were read. Every process calls it, the main one writes."""
    saved: dict[str, Any] = {"seed": start.seed, "length": run.length, "rows": start.rows + read}
    if isinstance(rows, StreamedRows):
        states = rows.state(start.rows + read) if ContextGroups.of(run).leads else []
        saved |= {"parts": start.parts, "states": gather_object(states)}
    if main:
        write_json(folder / DATA, saved)


def load_rows(rows: MixedRows | StreamedRows, checkpoint: Path) -> None:
    """Continue streams as the checkpoint says; other rows are found by their number."""
    if isinstance(rows, StreamedRows):
        saved: Mapping[str, Any] = read_json_object(checkpoint / DATA)
        rows.load(saved["rows"], saved["states"])
