"""The held-out divergence of students from one teacher, on the same rows of text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checks import check_size, check_some
from ..data.text.packing import PackedRows, Row, ShuffledRows
from ..evaluation.causal_models import final_hidden, output_head
from ..evaluation.reading import check_model, evaluating
from ..kinds import checked
from ..models.prompts import free_memory
from .losses import summed_kl

__all__ = ["HeldOutKL", "Rows", "first_rows"]

Rows = Sequence[Row] | PackedRows | ShuffledRows  # tokens, and where documents start
SHARE = 0.5  # of the free memory, that the teacher's hidden states may fill


class _Batch(NamedTuple):
    """Rows of documents. counted: where the next token is one of the same document."""

    ids_BT: Tensor
    positions_BT: Tensor
    counted_BT: Tensor


def first_rows(rows: Rows, count: int | None = None) -> list[Row]:
    """The first `count` rows; all when None."""
    return [rows[row] for row in range(len(rows) if count is None else min(count, len(rows)))]


@checked
class HeldOutKL:
    """KL(teacher || student) on rows of text, in nats per predicted token.

    The teacher reads the rows once, if its final hidden states fit into half of the memory that is free then; otherwise once per
    student. No document of a row sees another.

    Args:
        teacher: a causal language model.
        rows: of one length: `PackedRows`, or a list of rows as it gives them.
        batch_size: rows to read at a time.

    Attributes:
        tokens: predictions that are compared.

    Raises:
        ValueError: no rows, or rows in which no token is followed by another of its document.
    """

    def __init__(self, teacher: PreTrainedModel, rows: Rows, *, batch_size: int = 1) -> None:
        check_model(teacher)
        check_size("batch_size", batch_size)
        read = first_rows(rows)
        check_some("rows", read, "row")
        lengths = {len(ids) for ids, _ in read}
        if len(lengths) > 1:
            raise ValueError(f"rows must be of one length, got {min(lengths)} to {max(lengths)} tokens; cut them alike")
        self.teacher = teacher
        self._batches = [_stack(read[start : start + batch_size]) for start in range(0, len(read), batch_size)]
        self.tokens = sum(int(batch.counted_BT.sum()) for batch in self._batches)
        if not self.tokens:
            raise ValueError("rows must hold documents of two tokens or more, got none; take longer rows")
        self._read: list[Tensor] | None = None
        with evaluating(teacher):
            if self._fits():
                self._read = list(self._teacher_hidden())

    def __call__(self, student: Any) -> float:
        """Of one student on the teacher's device, in any mode; it is left in that mode.

        Raises:
            ValueError: the student's vocabulary or device is another one, or the divergence is not finite.
        """
        check_model(student)
        head, taught = output_head(student), output_head(self.teacher)
        total = 0.0
        with evaluating(self.teacher), evaluating(student):
            read = self._teacher_hidden() if self._read is None else iter(self._read)
            for batch, teacher_TE in zip(self._batches, read, strict=True):
                total += summed_kl(
                    _counted_hidden(student, batch),
                    head.weight_VD,
                    teacher_TE,
                    taught.weight_VD,
                    student_bias_V=head.bias_V,
                    teacher_bias_V=taught.bias_V,
                    student_softcap=head.softcap,
                    teacher_softcap=taught.softcap,
                ).item()
        if not np.isfinite(total):
            raise ValueError(
                f"student must have a finite divergence from its teacher, got {total}; train its memories first, or take more of "
                "its layers as attention"
            )
        return total / self.tokens

    def _fits(self) -> bool:
        free = free_memory(self.teacher.device)
        free = psutil.virtual_memory().available if free is None else free
        return self.tokens * self.teacher.config.hidden_size * self.teacher.dtype.itemsize <= SHARE * free

    def _teacher_hidden(self) -> Iterator[Tensor]:
        return (_counted_hidden(self.teacher, batch) for batch in self._batches)


def _stack(rows: Sequence[Row]) -> _Batch:
    ids_BT = torch.from_numpy(np.stack([ids for ids, _ in rows]))
    starts_BT = torch.zeros_like(ids_BT)
    for row, (_, starts) in enumerate(rows):
        starts_BT[row, torch.from_numpy(starts)] = 1
    place_T = torch.arange(ids_BT.shape[1])
    begun_BT = (place_T * starts_BT).cummax(1).values  # where the document of each token started
    counted_BT = torch.zeros_like(ids_BT, dtype=torch.bool)
    counted_BT[:, :-1] = starts_BT[:, 1:] == 0
    return _Batch(ids_BT, place_T - begun_BT, counted_BT)


def _counted_hidden(model: Any, batch: _Batch) -> Tensor:
    """Final hidden states [N, D] of the tokens that count."""
    ids, positions, counted = (x.to(model.device) for x in batch)
    return final_hidden(model, ids, position_ids=positions, use_cache=False)[counted]
