"""Tokens on disk: memory-mapped shards, one stream of documents for each side of the split."""

from __future__ import annotations

import io
import os
from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ...checks import check_choice, check_path
from ...files import CHECKSUMS, Own, any_file, damage, write_bytes, write_checksums, write_json, writing
from ...untrusted import read_json_object

__all__ = ["SHARDS", "ShardWriter", "TokenShards", "shards_damage", "text_hash", "token_dtype", "write_manifest"]

SHARD_TOKENS = 2**27
MANIFEST = "manifest.json"
FORMAT = 2
# Files of a folder of shards.
SHARDS: Own = dict.fromkeys(
    ("train-*.bin", "held_out-*.bin", "train-starts.npy", "held_out-starts.npy", MANIFEST, CHECKSUMS), any_file
)


def token_dtype(vocab_size: int) -> str:
    """The smallest unsigned type that holds every token."""
    return "uint16" if vocab_size <= 2**16 else "uint32"


class ShardWriter:
    """Appends documents to the shards of one split. begun: what `finished` returned when the folder was written before; tokens
    that were written after that call are deleted, without `begun` all tokens."""

    def __init__(
        self,
        folder: Path,
        split: str,
        dtype: str,
        shard_tokens: int = SHARD_TOKENS,
        *,
        begun: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder, self._split, self._dtype, self._shard_tokens = folder, split, dtype, shard_tokens
        self._starts = array("q")  # one number per document, 8 bytes each
        self._shards: list[int] = []
        if begun is not None:
            self._shards = [int(size) for size in begun["shards"]]
            self._starts.extend(np.load(starts_file(folder, split))[: begun["documents"]].tolist())
        kept = {shard_file(folder, split, number): size for number, size in enumerate(self._shards)}
        for file in folder.glob(f"{split}-*.bin"):
            with writing(file.name, folder):
                if file not in kept:
                    file.unlink()
                    continue
                size = kept[file] * np.dtype(dtype).itemsize
                if file.stat().st_size < size:
                    raise ValueError(f"{file.name} has fewer tokens than were noted; start again")
                os.truncate(file, size)

    def append(self, ids: Sequence[int] | np.ndarray) -> None:
        """Append one document; an empty one is ignored. Documents are never cut: a shard ends with the document that brings it
        to at least `shard_tokens` tokens."""
        if not len(ids):
            return
        self._starts.append(sum(self._shards))
        if not self._shards or self._shards[-1] >= self._shard_tokens:
            self._shards.append(0)
        shard = shard_file(self._folder, self._split, len(self._shards) - 1)
        with writing(shard.name, self._folder), shard.open("ab") as file:
            file.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self._shards[-1] += len(ids)

    def finished(self) -> dict[str, Any]:
        """Write where the documents start, once all tokens are on the disk. Returns the split's entry in the manifest."""
        for number in range(len(self._shards)):
            with shard_file(self._folder, self._split, number).open("rb") as file:
                os.fsync(file.fileno())
        content = io.BytesIO()
        np.save(content, np.array(self._starts, dtype=np.int64))
        write_bytes(starts_file(self._folder, self._split), content.getvalue())
        return {"documents": len(self._starts), "shards": self._shards}


def write_manifest(folder: Path, *, dtype: str, splits: dict[str, Any], text: str) -> None:
    """Write the manifest and the checksums, the last files of a folder of shards. text: hash of the documents."""
    write_json(folder / MANIFEST, {"format": FORMAT, "dtype": dtype, "splits": splits, "text": text})
    write_checksums(folder)


def text_hash(folder: Path) -> str:
    """Hash of the documents whose tokens the folder holds."""
    return read_json_object(folder / MANIFEST)["text"]


def shards_damage(folder: Path, *, content: bool = True) -> str | None:
    """Why the shards of a folder cannot be used, in words; None if they can be. content: as for `damage`."""
    why = damage(folder, content=content)
    if why is None and read_json_object(folder / MANIFEST)["format"] != FORMAT:
        why = "another version of fastweights wrote it"
    return why


class TokenShards:
    """The tokens of one split as one long stream. They stay on disk until they are asked for.

    Attributes:
        starts: int64 [documents], the position of every document's first token.
    """

    def __init__(self, folder: Path, split: str) -> None:
        folder = check_path("folder", folder, "a folder of token shards")
        check_choice("split", split, ("train", "held_out"))
        if not (folder / MANIFEST).is_file():
            raise ValueError(
                f"folder must be one of token shards, as prepare_text makes it, but {folder} has no {MANIFEST}"
            )
        manifest = read_json_object(folder / MANIFEST)
        entry = manifest["splits"][split]
        self.folder, self.split = folder, split
        self._dtype, self._sizes = manifest["dtype"], entry["shards"]
        self._ends = np.cumsum(entry["shards"], dtype=np.int64)
        self.starts: np.ndarray = np.load(starts_file(folder, split), mmap_mode="r" if entry["documents"] else None)

    @classmethod
    def joined(cls, several: Sequence[TokenShards]) -> TokenShards:
        """The tokens of several folders as one stream. All must have one split and one tokenizer."""
        first, *others = several
        if not others:
            return first
        made = cls(first.folder, first.split)
        before = np.cumsum([0, *map(len, several)])
        made._sizes = [size for shards in several for size in shards._sizes]
        made._ends = np.cumsum(made._sizes, dtype=np.int64)
        made.starts = np.concatenate([shards.starts + begin for shards, begin in zip(several, before)])
        made._shards = [shard for shards in several for shard in shards._shards]
        return made

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def tokens(self, start: int, end: int) -> np.ndarray:
        """The tokens from position `start` to `end`, int64 [end - start]."""
        first = int(np.searchsorted(self._ends, start, side="right"))
        parts = []
        for number in range(first, len(self._ends)):
            begin = int(self._ends[number]) - self._sizes[number]
            if begin >= end:
                break
            parts.append(self._shards[number][max(0, start - begin) : end - begin])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, np.int64)

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, int64 [tokens]."""
        end = self.starts[number + 1] if number + 1 < len(self.starts) else len(self)
        return self.tokens(int(self.starts[number]), int(end))

    @cached_property
    def _shards(self) -> list[np.ndarray]:
        return [
            np.memmap(shard_file(self.folder, self.split, number), dtype=self._dtype, mode="r")
            for number in range(len(self._sizes))
        ]


def shard_file(folder: Path, split: str, number: int) -> Path:
    return folder / f"{split}-{number:05}.bin"


def starts_file(folder: Path, split: str) -> Path:
    return folder / f"{split}-starts.npy"
