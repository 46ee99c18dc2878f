"""How the sequences lie in the rows of a batch: padded, or packed, as masks of two dimensions, cumulative lengths, positions or
document numbers say."""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checks import check_dense, check_real, shape_of, values_are_checked
from ..ops.framework.sequences import check_cu_seqlens
from .loss import IGNORED

__all__ = [
    "Rows",
    "check_mask",
    "check_prompts",
    "cumulative_lengths",
    "document_numbers",
    "leave_out_unpredicted",
    "own_columns",
    "predicted_labels",
]


def check_mask(attention_mask: object, batch: int, time: int) -> None:
    """A mask [B, T] or longer. Its numbers are not looked at."""
    wanted = f"attention_mask must be [{batch}, at least {time}], 1 for tokens and 0 for padding"
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"{wanted}, got {type(attention_mask).__name__}; convert it with torch.tensor")
    check_dense("attention_mask", attention_mask)
    if attention_mask.ndim != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < time:
        raise ValueError(f"{wanted}, got shape {shape_of(attention_mask)}")


def own_columns(x_BS: Tensor, time: int) -> Tensor:
    """The last T columns, those of the input; the ones before stand for what a cache has read."""
    return x_BS[:, x_BS.shape[1] - time :]


def document_numbers(attention_mask: Tensor, batch: int, time: int) -> Tensor | None:
    """The documents of a mask [B, S], whose last T columns are those of the input. A cache has read the columns before them.

    The host waits for a GPU once, whatever the mask holds.

    Returns:
        None where the input has no padding and every row is one document; bool [B, T], where it has tokens, without numbers of
        documents; int64 [B, S] with them, the number of each token's document and 0 for padding.

    Raises:
        ValueError: a mask of another shape, or of other numbers.
        TypeError: no tensor.
    """
    check_mask(attention_mask, batch, time)
    low, high, own_low = _read_extremes(attention_mask, time)
    if own_low == 1 == high or low == high > 0:
        return None
    return own_columns(attention_mask, time).bool() if high <= 1 else attention_mask.long()


def check_prompts(attention_mask: Tensor, batch: int, time: int) -> None:
    """A mask of prompts to be continued, of whose last T columns each row has a token."""
    numbers = document_numbers(attention_mask, batch, time)
    if (attention_mask > 1).any():  # one number too: generate() gives new tokens the number 1
        raise ValueError(
            "attention_mask must be 1 for tokens and 0 for padding in generate(), which continues every row, got numbers of "
            "documents; pass each document as a row of its own, with a mask of ones"
        )
    if numbers is None:
        return
    empty = (~numbers.any(1)).nonzero()[:, 0].tolist()
    if empty:
        raise ValueError(
            f"attention_mask must show at least one token of every prompt, got none in row {empty[0]}; leave empty prompts out, "
            "or begin them with a token for the start of a text"
        )


def _read_extremes(mask_BS: Tensor, time: int) -> tuple[float, float, float]:
    """The smallest and the largest number, and the smallest of the last T columns; 1 without any."""
    wanted = "attention_mask must be 0 for padding, and for tokens 1 or the whole number above 0 of their document"
    if mask_BS.is_complex() or mask_BS.is_quantized:
        raise ValueError(f"{wanted}, got {mask_BS.dtype}; pass bool, integers or floats")
    if mask_BS.device.type == "meta":
        raise ValueError(f"{wanted}, got a tensor on meta; pass numbers")
    if not mask_BS.numel():
        return 1, 1, 1
    ends = [*torch.aminmax(mask_BS), own_columns(mask_BS, time).amin()]
    if mask_BS.is_floating_point():
        ends.append((mask_BS != mask_BS.floor()).any())
    low, high, own_low, *fractions = torch.stack([x.double() for x in ends]).tolist()  # the only wait for a GPU
    if not 0 <= low <= high < math.inf or any(fractions):
        raise ValueError(
            f"{wanted}, got values from {low:g} to {high:g}; an additive mask, 0 for tokens and a large negative number for "
            "padding, becomes one with (attention_mask == 0).long()"
        )
    return low, high, own_low


def cumulative_lengths(
    cu_seqlens: Tensor | None, cu_seq_lens_q: Tensor | None, cu_seq_lens_k: Tensor | None
) -> Tensor | None:
    """The one set of cumulative lengths, which packing collators of transformers send as cu_seq_lens_q and cu_seq_lens_k.

    Raises:
        ValueError: one of that pair alone, or lengths that differ. On a GPU only their number is compared, unless
            FASTWEIGHTS_CHECK_VALUES asks for more.
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
        check_dense(name, x)
    for name, x in others:
        readable = values_are_checked(x) and values_are_checked(edges)
        if x is not edges and (x.shape != edges.shape or (readable and not torch.equal(x.long(), edges.long()))):
            raise ValueError(f"{name} must be the same numbers as {first}: every document is read from its first token")
    return edges


class Rows:
    """The sequences of a batch [B, T]. With padding, or with several documents in a row, they are laid end to end in a single
    row for the layers, so that no layer sees a padding token, nor a document another one.

    Args:
        attention_mask: [B, T] or longer, cached tokens first: 0 for padding, which may be on either side or in between, and for
            tokens 1, or the number of their document, any whole number above 0.
        position_ids: int [B, T] or [1, T]. Within a document they rise by one from token to token; where they do not rise, the
            next document begins.
        cu_seqlens: int [N+1], cumulative lengths of the documents of the only row. They then decide. Where numbers are checked
            (on a CPU, or with FASTWEIGHTS_CHECK_VALUES=1), position_ids and seq_idx must say the same.
        seq_idx: int [B, T] or [1, T], the number of each token's document in its row, below 0 for padding.

    Attributes:
        cu_seqlens: cumulative lengths of the sequences of the single row; None where every row is one sequence.
        first_position: [N], the position of the first token of each sequence; None without position_ids.
        masked: whether the attention_mask shows padding, or several documents.

    Raises:
        ValueError: an argument that does not fit.
        TypeError: one that is no tensor.
    """

    def __init__(
        self,
        batch: int,
        time: int,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        seq_idx: Tensor | None = None,
    ) -> None:
        self.batch, self.time = batch, time
        self.cu_seqlens = cu_seqlens
        self.first_position: Tensor | None = None
        self._tokens: Tensor | None = None
        number_BS = None if attention_mask is None else document_numbers(attention_mask, batch, time)
        self.masked = number_BS is not None
        position_BT = None if position_ids is None else _check_per_token("position_ids", position_ids, batch, time)
        index_BT = None if seq_idx is None else _check_per_token("seq_idx", seq_idx, batch, time)
        if cu_seqlens is not None:
            if number_BS is not None:
                raise ValueError(
                    "attention_mask must be None or all ones with cu_seqlens: packed rows have no padding, and cu_seqlens say "
                    "where their documents begin"
                )
            self._check_documents(cu_seqlens.long(), position_BT, index_BT)
            return
        if number_BS is not None:
            self._tokens, self.cu_seqlens = own_columns(number_BS, time) != 0, _edges_of_mask(number_BS, time)
        if index_BT is not None:
            self._leave_out(index_BT < 0)
        if position_BT is not None or index_BT is not None:
            self._split(position_BT, index_BT)

    def _laid_out(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Where tokens are, bool [B, T], and the cumulative lengths of the sequences, also where every row is one."""
        if self._tokens is None or self.cu_seqlens is None:
            tokens = torch.ones(self.batch, self.time, dtype=torch.bool, device=device)
            return tokens, torch.arange(self.batch + 1, device=device) * self.time
        return self._tokens.to(device), self.cu_seqlens.to(device)

    def _leave_out(self, padding_BT: Tensor) -> None:
        tokens, edges = self._laid_out(padding_BT.device)
        kept_T = ~padding_BT[tokens]
        self._tokens, self.cu_seqlens = tokens & ~padding_BT, F.pad(kept_T.cumsum(0), (1, 0))[edges]

    def _split(self, position_BT: Tensor | None, index_BT: Tensor | None) -> None:
        """Add the documents that begin within a row. Empty rows stay sequences of no tokens."""
        device = next(x.device for x in (position_BT, index_BT) if x is not None)
        tokens, edges = self._laid_out(device)
        begins = numbered = torch.zeros_like(tokens[tokens][1:])
        if index_BT is not None:
            begins = numbered = _find_changes("seq_idx", index_BT.to(device), tokens)
        if position_BT is not None:
            position_T = position_BT[tokens]
            begins = numbered | (position_T.diff() != 1)
        places = _clear_edges(begins, edges).nonzero()[:, 0]
        if position_BT is not None:
            _check_rise(position_T, places[~numbered[places - 1]])
        if len(places):
            edges = torch.cat([edges, places]).sort().values
            self._tokens, self.cu_seqlens = tokens, edges
        if position_BT is not None:
            self.first_position = F.pad(position_T, (0, 1))[edges[:-1]]

    def _check_documents(self, edges: Tensor, position_BT: Tensor | None, index_BT: Tensor | None) -> None:
        """Whether the other descriptions say what cu_seqlens do."""
        given = [x for x in (position_BT, index_BT) if x is not None]
        if not given or not all(map(values_are_checked, (edges, *given))):
            return
        if edges.min() < 0 or edges.max() > self.time:
            return  # the layers refuse it
        edges = edges.to(given[0].device)
        if index_BT is not None:
            changes = F.pad(index_BT[0].diff() != 0, (1, 1), value=True)
            if not torch.equal(changes, torch.zeros_like(changes).index_fill(0, edges, True)):
                raise ValueError(
                    "seq_idx must change where the next document of cu_seqlens begins, and only there; leave one of the two out"
                )
        if position_BT is not None:
            if _clear_edges(position_BT[0].diff() != 1, edges).any():
                raise ValueError(
                    "position_ids must rise by one from token to token within every document of cu_seqlens; leave one of the "
                    "two out"
                )
            self.first_position = F.pad(position_BT[0], (0, 1))[edges[:-1]]

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


def predicted_labels(
    labels_BT: Tensor,
    *,
    attention_mask: Tensor | None = None,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> Tensor:
    """Labels with -100 where no token predicts them: at padding, and at the first token of every document and after padding. The
    first column stays as it is, because a loss that shifts the labels leaves it out. The other arguments are those of `Rows`;
    their values are not read on the host."""
    batch, time = labels_BT.shape
    device = labels_BT.device
    first_BT = torch.zeros(batch, time, dtype=torch.bool, device=device)
    if attention_mask is not None:
        check_mask(attention_mask, batch, time)
        number_BT = own_columns(attention_mask, time).to(device)
        first_BT |= (number_BT == 0) | F.pad(number_BT.diff() != 0, (1, 0))
    if seq_idx is not None:
        number_BT = _check_per_token("seq_idx", seq_idx, batch, time).to(device)
        first_BT |= (number_BT < 0) | F.pad(number_BT.diff() != 0, (1, 0))
    if position_ids is not None:
        position_BT = _check_per_token("position_ids", position_ids, batch, time).to(device)
        first_BT |= F.pad(position_BT.diff() != 1, (1, 0))
    labels_BT = labels_BT.masked_fill(first_BT, IGNORED)
    if cu_seqlens is None:
        return labels_BT
    edges = cu_seqlens.long().to(device)  # a document without tokens may begin at T
    return F.pad(labels_BT, (0, 1)).index_fill(1, edges, IGNORED)[:, :-1]


def leave_out_unpredicted(batch: MutableMapping[str, Any]) -> None:
    """Put -100 into the labels of a batch where no token predicts them, so that every loss of Trainer leaves them out too."""
    labels = batch.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim != 2 or not labels.shape[1]:
        return
    lengths = cumulative_lengths(*(batch.get(name) for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k")))
    check_cu_seqlens(lengths, *labels.shape)
    documents = {name: batch.get(name) for name in ("attention_mask", "position_ids", "seq_idx")}
    labels = predicted_labels(labels, cu_seqlens=lengths, **documents)
    batch["labels"] = torch.cat([torch.full_like(labels[:, :1], IGNORED), labels[:, 1:]], 1)


def _edges_of_mask(number_BS: Tensor, time: int) -> Tensor:
    """Cumulative lengths, in the last T columns, of the sequences of a mask: of its rows, or with numbers (int64) of the
    documents in each row. Those that have tokens only in the columns before stay, as the cache holds them."""
    tokens = number_BS != 0
    edges = F.pad(tokens.sum(1).cumsum(0), (1, 0))
    if number_BS.dtype == torch.bool:
        return edges
    places = _clear_edges(_find_changes("attention_mask", number_BS, tokens), edges).nonzero()[:, 0]
    edges = torch.cat([edges, places]).sort().values
    own = torch.arange(number_BS.shape[1], device=number_BS.device) >= number_BS.shape[1] - time
    return F.pad(own.expand_as(tokens)[tokens].cumsum(0), (1, 0))[edges]


def _find_changes(name: str, number_BT: Tensor, tokens: Tensor) -> Tensor:
    """bool, for every token after the first of all rows: whether its document is another one than that of the token before.

    Raises:
        ValueError: the tokens of a document do not follow each other.
    """
    row_T, number_T = tokens.nonzero()[:, 0], number_BT[tokens]
    changes = number_T.diff() != 0
    starts = F.pad(changes | (row_T.diff() != 0), (1, 0), value=True)[: len(row_T)]
    runs = torch.stack([row_T[starts], number_T[starts]])
    if runs.unique(dim=1).shape[1] < runs.shape[1]:
        raise ValueError(
            f"{name} must give all tokens of a document the same number, which no other document of the row has, got a "
            "number that comes back after another one; number the documents of a row through"
        )
    return changes


def _clear_edges(begins: Tensor, edges: Tensor) -> Tensor:
    """bool [tokens + 1]: where the next document begins [tokens - 1], but not at the edges of a sequence."""
    return F.pad(begins, (1, 1)).index_fill(0, edges, False)


def _check_rise(position_T: Tensor, places: Tensor) -> None:
    """ValueError where a position runs ahead of the one before at one of these places."""
    ahead = position_T[places] > position_T[places - 1]
    if ahead.any():
        place = places[ahead][0]
        raise ValueError(
            "position_ids must rise by one from token to token, or start again where the next document begins, got "
            f"{int(position_T[place])} after {int(position_T[place - 1])}; leave padding out with attention_mask, or give "
            "the documents as cu_seqlens"
        )


def _check_per_token(name: str, x: Tensor, batch: int, time: int) -> Tensor:
    """int64 [B, T]"""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be an integer tensor [B, T], got {type(x).__name__}")
    check_real(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {x.dtype}; convert it with .long()")
    if x.ndim != 2 or x.shape[0] not in (1, batch) or x.shape[1] != time:
        raise ValueError(f"{name} must be [{batch}, {time}], one number per token, got shape {shape_of(x)}")
    return x.long().expand(batch, time)
