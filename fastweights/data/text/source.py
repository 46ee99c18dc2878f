"""A source of text: where it is, and which of its documents are read."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...checks import check_number, check_positive, check_text, check_texts, check_whole_number, describe_value

__all__ = ["TextSource", "write_record"]

# Settings that every run folder records, and those that none does, as its batches do not depend on them: where they start and
# in how many parts is recorded as it turned out.
FIRST = (
    *("paths", "held_out", "excluded", "held_out_fraction", "dataset", "dataset_config", "dataset_split", "text_field"),
    "max_megabytes",
)
NOT_RECORDED = ("sources", "parts", "epochs", "skip_tokens", "continue_from")


@dataclass(frozen=True, kw_only=True)
class TextSource:
    """Files, folders or a dataset, and which of its documents are read: an entry of `sources` of a `TextCorpus`.

    Attributes:
        paths: files and folders: plain text (any suffix for a file that is named itself, the usual ones in a folder), .jsonl,
            .parquet, each with .gz too (Parquet compresses its own data).
        held_out: files and folders of held-out text, all else in `paths` or `dataset` then being trained on.
        excluded: folders inside those of `paths` and `held_out` that are left out.
        held_out_fraction: part of the files or rows that is held out where `held_out` names none.
        dataset, dataset_config, dataset_split: in place of paths a dataset of the Hugging Face hub, which needs the network
            unless it was fetched before, or a folder that `save_to_disk` of the `datasets` library has written.
        data_files: those files of the dataset that are read, with the wildcards of the `datasets` library; () for all.
        revision: branch, tag or commit of the dataset; None for its main branch.
        text_field: where a row has its text.
        min_tokens, max_tokens: documents of fewer or more tokens are left out, also of held-out text.
        max_megabytes: read no more than about this many million characters (beside those of `held_out`); None for all.
        weight: of an entry of `sources`, its share of the rows of training, in proportion to the weights of the others.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    paths: tuple[str, ...] = ()
    held_out: tuple[str, ...] = ()
    excluded: tuple[str, ...] = ()
    held_out_fraction: float = 0.05
    dataset: str | None = None
    dataset_config: str | None = None
    dataset_split: str = "train"
    data_files: tuple[str, ...] = ()
    revision: str | None = None
    text_field: str = "text"
    min_tokens: int = 0
    max_tokens: int | None = None
    max_megabytes: float | None = None
    weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("paths", "held_out", "excluded", "data_files"):
            value = getattr(self, name)
            value = (value,) if isinstance(value, str) else value
            object.__setattr__(self, name, check_texts(name, value, what="paths", empty=False))
        check_number("held_out_fraction", self.held_out_fraction, above=0, below=1)
        for name in ("dataset", "dataset_config", "dataset_split", "revision", "text_field"):
            value = getattr(self, name)
            if value is not None or name in ("dataset_split", "text_field"):
                check_text(name, value)
        if self.dataset is not None and self.paths:
            raise ValueError(
                f"dataset must be None where paths are given, got {describe_value(self.dataset)}; choose one of them"
            )
        if self.dataset is None and (self.data_files or self.revision is not None):
            raise ValueError(
                "data_files and revision must be left out without the dataset that they are of; name local files in paths"
            )
        check_whole_number("min_tokens", self.min_tokens)
        if self.max_tokens is not None:
            check_whole_number("max_tokens", self.max_tokens, low=max(1, self.min_tokens))
        if self.max_megabytes is not None:
            check_positive("max_megabytes", self.max_megabytes)
        check_positive("weight", self.weight)


def write_record(settings: Any, kind: type) -> dict[str, Any]:
    """The fields of `kind` that a run folder keeps."""
    values = {field.name: (getattr(settings, field.name), field.default) for field in fields(kind)}
    kept = {name: value for name, (value, default) in values.items() if name in FIRST or value != default}
    return {name: value for name, value in kept.items() if name not in NOT_RECORDED}
