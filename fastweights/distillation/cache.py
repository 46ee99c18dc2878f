"""The teacher's final hidden states of rows of text, kept on disk: a file per row, found by the content of the row."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from ..files import write_bytes

__all__ = ["RowCache"]

NAME = "hidden"


class RowCache:
    """Hidden states by rows. A row is known by its tokens and the edges of its documents: epochs, stages and runs that read the
    same rows find each other's, in any order. Several processes may write at once, as each file appears whole.

    Args:
        folder: of the cache; each teacher has a folder in it.
        teacher: what tells this teacher, in its dtype, from others.
    """

    def __init__(self, folder: str | Path, teacher: str) -> None:
        self._folder = Path(folder) / teacher

    def read(
        self,
        ids_BT: Tensor,
        positions_BT: Tensor,
        compute: Callable[[], Tensor],
        agree: Callable[[bool], bool] = bool,
    ) -> Tensor:
        """The hidden states [B, T, E] of rows. positions: of the tokens in their documents. compute: makes those of all rows,
        where one is missing or its file is damaged. Rows that are there stay as they are: their last bits depend on the other
        rows that they were computed with. agree: gets whether a row is missing in this process,
        and returns whether one is missing in any process that `compute` needs."""
        files = [self._file(row) for row in torch.stack([ids_BT, positions_BT], 1).cpu()]
        kept = [_load(file) for file in files]
        if agree(any(row is None for row in kept)):
            computed = compute().cpu()
            for number, file in enumerate(files):
                if kept[number] is None:
                    kept[number] = row = computed[number].contiguous()
                    file.parent.mkdir(parents=True, exist_ok=True)
                    write_bytes(file, save({NAME: row}))
        return torch.stack([row for row in kept if row is not None]).to(ids_BT.device)

    def _file(self, row: Tensor) -> Path:
        key = hashlib.sha256(row.numpy().tobytes()).hexdigest()[:32]
        return self._folder / key[:2] / f"{key}.safetensors"


def _load(file: Path) -> Tensor | None:
    try:
        return load_file(file)[NAME]
    except (OSError, SafetensorError, KeyError):
        return None
