"""Reading long texts with a model under context parallelism (`fastweights.distributed`): all processes of a group read a text
together, each a part of it and none through a cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..distributed import gather_tokens, own_tokens
from .causal_models import token_logits
from .reading import check_losses

__all__ = ["Reading", "Reply", "Tokens", "answer_divided", "is_divided", "read_divided"]

Tokens = Sequence[Sequence[int]]
Reply = tuple[list[float], bool, list[int]]


class Reading(NamedTuple):
    """What a model predicts at places of a text.

    losses_BT: float64, -ln p of the token that follows; 0 at other places.
    likeliest_BT: int64, the most likely token to follow; 0 at other places.
    """

    losses_BT: Tensor
    likeliest_BT: Tensor


def is_divided(model: Any) -> bool:
    """Whether the model reads texts under context parallelism."""
    return getattr(getattr(model, "model", None), "cp_group", None) is not None


def read_divided(model: Any, ids_BT: Tensor, next_BT: Tensor, block: int, asked_BT: Tensor | None = None) -> Reading:
    """What the model predicts at the places asked_BT (bool; all when None) of texts, on every process. Every process of the
    group passes the same tensors.

    next_BT: int64, the tokens that follow. block: tokens whose logits a process computes at a time.
    """
    cp, (batch, time) = model.model.cp_group, ids_BT.shape
    asked_BT = torch.ones_like(ids_BT, dtype=torch.bool) if asked_BT is None else asked_BT
    hidden_PD = model.model(ids_BT, use_cache=False).last_hidden_state[0]
    next_P, asked_P = own_tokens(next_BT, cp)[0], own_tokens(asked_BT.long(), cp, filling=0)[0]
    found_P2 = hidden_PD.new_zeros(len(hidden_PD), 2, dtype=torch.float64)
    for places in asked_P.nonzero()[:, 0].split(block):
        logits = token_logits(model, hidden_PD[None, places])[0]
        losses = F.cross_entropy(logits, next_P[places], reduction="none")
        found_P2[places] = torch.stack([losses.double(), logits.argmax(-1).double()], 1)
    losses_BT, likeliest_BT = gather_tokens(found_P2[None], cp, batch=batch, time=time).unbind(-1)
    return Reading(losses_BT, likeliest_BT.long())


def answer_divided(
    model: Any, prompts: Tokens, answers: Tokens, *, most: int, ends: Sequence[int], block: int
) -> list[Reply]:
    """For each prompt -ln p of the tokens of its right answer; whether each of them is the most likely one after those before
    it; and where not, the model's greedy continuation, of `most` tokens or up to one of `ends`.

    Every token of a continuation that the right answer does not begin with costs another reading of the texts: under context
    parallelism no memory is kept between calls.

    Raises:
        ValueError: the model's losses are not finite.
    """
    found = _read_ends(model, [(*p, *a[:-1]) for p, a in zip(prompts, answers)], answers, block)
    said = [_up_to_first_difference(likeliest, list(answer)) for (_, likeliest), answer in zip(found, answers)]
    exact = [likeliest == list(answer) for (_, likeliest), answer in zip(found, answers)]
    while rows := [row for row, new in enumerate(said) if not exact[row] and len(new) < most and new[-1] not in ends]:
        texts, unknown = [(*prompts[row], *said[row]) for row in rows], [(0,)] * len(rows)
        for row, (_, likeliest) in zip(rows, _read_ends(model, texts, unknown, block)):
            said[row] += likeliest
    return [(losses, right, new) for (losses, _), right, new in zip(found, exact, said)]


def _read_ends(model: Any, texts: Tokens, follow: Tokens, block: int) -> list[tuple[list[float], list[int]]]:
    """For each text -ln p of the tokens `follow`, each behind one of the last tokens of the text, and the most likely ones."""

    def padded(rows: Iterable[Sequence[int]]) -> Tensor:  # what is behind a text changes nothing before it
        return pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(model.device)

    before = [len(text) - len(new) for text, new in zip(texts, follow)]
    ids_BT, next_BT = padded(texts), padded([(0,) * start + (*new,) for start, new in zip(before, follow)])
    asked_BT = padded([(0,) * start + (1,) * len(new) for start, new in zip(before, follow)]).bool()
    losses_BT, likeliest_BT = read_divided(model, ids_BT, next_BT, block, asked_BT)
    check_losses(losses_BT)
    return [(losses_BT[row, asked].tolist(), likeliest_BT[row, asked].tolist()) for row, asked in enumerate(asked_BT)]


def _up_to_first_difference(likeliest: list[int], answer: list[int]) -> list[int]:
    """The beginning of the greedy continuation that is known from the most likely tokens behind those of the answer."""
    same = sum(takewhile(bool, map(eq, likeliest, answer)))
    return likeliest[: same + 1]
