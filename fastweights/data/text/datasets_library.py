"""Rows of the `datasets` library: datasets of the hub and local files, whole or streamed, in parts for several processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from .files import TextFile, cut_long, field_text, plain_pieces, rows

__all__ = ["load_rows", "row_text", "rows_of_files", "split_rows", "stream_texts"]


def load_rows(source: Any, *, streaming: bool = False, shards: int = 1) -> Any:
    """The dataset of a `TextSource`. With `streaming` it is an IterableDataset, for which only the list of files is fetched
    now. shards: number of shards that a folder of `save_to_disk` is then divided into.

    Raises:
        ValueError: it cannot be loaded.
    """
    name, datasets = str(source.dataset), _import_datasets(f"dataset {source.dataset!r}")
    asked = {"data_files": list(source.data_files), "revision": source.revision, "streaming": streaming}
    try:
        if Path(name, "dataset_dict.json").is_file() or Path(name, "state.json").is_file():
            found = datasets.load_from_disk(name)
            found = found[source.dataset_split] if isinstance(found, dict) else found
            return found.to_iterable_dataset(num_shards=shards) if streaming else found
        options = {key: value for key, value in asked.items() if value}
        return datasets.load_dataset(name, source.dataset_config, split=source.dataset_split, **options)
    except Exception as error:  # the library raises errors of many kinds for a wrong name and for a missing network
        raise ValueError(
            f"dataset {name!r} (config {source.dataset_config!r}, split {source.dataset_split!r}) cannot be loaded: "
            f"{error}; check the name and the network, or set paths to local files"
        ) from None


def rows_of_files(files: list[TextFile], text_field: str) -> Any:
    """Local files as an IterableDataset with one shard per file. Rows have their text in `text_field`; a row of a plain file is
    one of its pieces."""
    datasets = _import_datasets("streaming")
    return datasets.IterableDataset.from_generator(_read_files, gen_kwargs={"files": files, "text_field": text_field})


def _read_files(files: list[TextFile], text_field: str) -> Iterator[dict[str, str]]:
    for file in files:
        for text in rows(file, text_field) if file.has_rows else plain_pieces(file):
            yield {text_field: text}


def split_rows(dataset: Any, part: int, parts: int) -> Any:
    """One of `parts` parts of an IterableDataset: whole shards where the number of shards is a multiple of `parts`, otherwise
    every `parts`-th row."""
    if parts == 1:
        return dataset
    from datasets.distributed import split_dataset_by_node

    return split_dataset_by_node(dataset, part, parts)


def stream_texts(dataset: Iterable[Any], text_field: str) -> Iterator[str]:
    """The documents of the rows, none of them empty."""
    for row in dataset:
        yield from cut_long(row_text(row, text_field))


def row_text(row: Any, text_field: str) -> str:
    """The text of a row of a dataset; the message of a ValueError names the dataset as its place."""
    try:
        return field_text(row, text_field)
    except ValueError as error:
        raise ValueError(f"dataset: {error}") from None


def _import_datasets(what: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(
            f"{what} needs the `datasets` library; pip install 'fastweights[train]', or set paths to local files"
        ) from None
    return datasets
