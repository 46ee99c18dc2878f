"""How the sequences lie in the rows of a batch: padded, or packed by cumulative lengths or by positions that start again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import values_can_be_read

__all__ = ["Rows", "check_mask", "cumulative_lengths", "starts"]


def cumulative_lengths(
    cu_seqlens: Tensor | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> Tensor | None:
    """The one set of cumulative lengths, which packing collators of transformers send as cu_seq_lens_q and cu_seq_lens_k.

    Raises:
        ValueError: one of that pair alone, or lengths that differ. On a GPU only their number is compared.
        TypeError: no tensor.
    """
    given = {"cu_seqlens": cu_seqlens, "cu_seq_lens_q": cu_seq_lens_q, "cu_seq_lens_k": cu_seq_lens_k}
    if cu_seq_lens_q is None and cu_seq_lens_k is None:
        return cu_seqlens
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if given[name] is None:
            raise ValueError(
                f"{name} must be given with its counterpart: a token's queries and keys are of one document"
            )
    found = {name: x for name, x in given.items() if x is not None}
    (first, edges), *others = found.items()
    for name, x in found.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be an integer tensor [N+1], got {type(x).__name__}")
    for name, x in others:
        readable = values_can_be_read(x) and values_can_be_read(edges)
        if x is not edges and (x.shape != edges.shape or (readable and not torch.equal(x.long(), edges.long()))):
            raise ValueError(f"{name} must be the same numbers as {first}: every document is read from its first token")
    return edges


def starts(position_ids: Tensor, batch: int, time: int) -> Tensor:
    """bool [B, T]: where a position does not follow the one before it in its row. The first column counts as following."""
    return F.pad(_checked(position_ids, batch, time).diff() != 1, (1, 0))


class Rows:
    """The sequences of a batch [B, T]. With padding, or with several documents in a row, they are laid end to end in a single
    row for the layers, so that no layer sees a padding token, nor a document another one.

    Args:
        attention_mask: [B, T] or longer, cached tokens first; nonzero for tokens. Padding may be on either side, or in between.
        position_ids: int [B, T] or [1, T]. Within a document they rise by one from token to token; where they do not rise, the
            next document begins.
        cu_seqlens: int [N+1], cumulative lengths of the documents of the only row. They then decide, and position_ids must
            rise within each document (checked on the CPU).

    Attributes:
        cu_seqlens: cumulative lengths of the sequences of the single row; None where every row is one sequence.
        first_position: [N], the position of the first token of each sequence; None without position_ids.

    Raises:
        ValueError: an argument that does not fit.
        TypeError: position_ids is no tensor.
    """

    def __init__(
        self,
        batch: int,
        time: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> None:
        self.batch, self.time = batch, time
        self.cu_seqlens = cu_seqlens
        self.first_position: Tensor | None = None
        self._tokens = _without_ones(attention_mask, batch, time)
        if self._tokens is not None and cu_seqlens is not None:
            raise ValueError("attention_mask must be None or all ones with cu_seqlens: packed rows have no padding")
        if self._tokens is not None:
            self.cu_seqlens = F.pad(self._tokens.sum(1).cumsum(0), (1, 0))
        if position_ids is None:
            return
        position_BT = _checked(position_ids, batch, time)
        if cu_seqlens is None:
            self._split(position_BT)
        elif values_can_be_read(position_BT) and values_can_be_read(cu_seqlens):
            self._check_documents(position_BT.flatten(), cu_seqlens)

    def _split(self, position_BT: Tensor) -> None:
        """Add the documents that begin within a row. Empty rows stay sequences of no tokens."""
        tokens, edges = self._tokens, self.cu_seqlens
        if tokens is None:
            tokens = torch.ones_like(position_BT, dtype=torch.bool)
            edges = torch.arange(self.batch + 1, device=position_BT.device) * self.time
        assert edges is not None
        edges = edges.to(position_BT.device)
        position_T = position_BT[tokens.to(position_BT.device)]
        begins = F.pad(position_T.diff() != 1, (1, 1)).index_fill(0, edges, False)
        places = begins.nonzero()[:, 0]
        ahead = position_T[places] > position_T[places - 1]
        if ahead.any():
            place = places[ahead][0]
            raise ValueError(
                "position_ids must rise by one from token to token, or start again where the next document begins, got "
                f"{int(position_T[place])} after {int(position_T[place - 1])}; leave padding out with attention_mask, or give "
                "the documents as cu_seqlens"
            )
        if len(places):
            self._tokens, self.cu_seqlens = tokens, torch.cat([edges, places]).sort().values
            edges = self.cu_seqlens
        self.first_position = F.pad(position_T, (0, 1))[edges[:-1]]

    def _check_documents(self, position_T: Tensor, cu_seqlens: Tensor) -> None:
        edges = cu_seqlens.long()
        if edges.min() < 0 or edges.max() > len(position_T):
            return  # the layers refuse it
        if F.pad(position_T.diff() != 1, (1, 1)).index_fill(0, edges, False).any():
            raise ValueError(
                "position_ids must rise by one from token to token within every document of cu_seqlens; leave one of the two out"
            )
        self.first_position = F.pad(position_T, (0, 1))[edges[:-1]]

    @property
    def count(self) -> int:
        """N, the number of sequences."""
        return self.batch if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @property
    def lengths(self) -> Tensor | None:
        """[N] tokens of each sequence; None where all have T."""
        return None if self.cu_seqlens is None else self.cu_seqlens.diff()

    def pack(self, x_BTD: Tensor) -> Tensor:
        """[B, T, D] -> [1, tokens, D] for the layers, or x as it is where every row is one sequence."""
        return x_BTD if self._tokens is None else x_BTD[self._tokens.to(x_BTD.device)][None]

    def unpack(self, x_1TD: Tensor) -> Tensor:
        """The inverse of pack, zero at padding."""
        if self._tokens is None:
            return x_1TD
        x_BTD = x_1TD.new_zeros(self.batch, self.time, x_1TD.shape[2])
        return x_BTD.masked_scatter(self._tokens.to(x_BTD.device)[..., None], x_1TD)


def _without_ones(attention_mask: Tensor | None, batch: int, time: int) -> Tensor | None:
    """bool [B, T] of the last T columns; None without padding."""
    if attention_mask is None:
        return None
    check_mask(attention_mask, batch, time)
    mask = attention_mask[:, attention_mask.shape[1] - time :]
    return None if mask.all() else mask.bool()


def check_mask(attention_mask: object, batch: int, time: int) -> None:
    """A mask [B, T] or longer."""
    wanted = f"attention_mask must be [{batch}, at least {time}], 1 for tokens and 0 for padding"
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"{wanted}, got {type(attention_mask).__name__}; convert it with torch.tensor")
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
        raise ValueError(f"{wanted}, got shape {list(attention_mask.shape)}")


def _checked(position_ids: Tensor, batch: int, time: int) -> Tensor:
    """int64 [B, T]"""
    if not isinstance(position_ids, Tensor):
        raise TypeError(f"position_ids must be an integer tensor [B, T], got {type(position_ids).__name__}")
    if position_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"position_ids must be int32 or int64, got {position_ids.dtype}; convert it with .long()")
    if position_ids.ndim != 2 or position_ids.shape[0] not in (1, batch) or position_ids.shape[1] != time:
        raise ValueError(
            f"position_ids must be [{batch}, {time}], one number per token, got shape {list(position_ids.shape)}"
        )
    return position_ids.long().expand(batch, time)
