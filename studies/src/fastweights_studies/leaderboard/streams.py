"""Random streams of keys and values for memories without training, and the exact least squares of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..claims.draws import Draws

__all__ = ["LAST_PART", "ROWS", "STREAMS", "Stream", "StreamKind", "exact_answers"]

ROWS = 16  # sequences of a seed
LAST_PART = 0.25  # of a sequence: where answers are compared, after the memory has been loaded
TINY_RIDGE = 1e-6  # keeps the equations of fewer keys than channels solvable


@dataclass(frozen=True)
class Stream:
    """Sequences to write and the questions after every token.

    Attributes:
        k, v: [B, T, d], keys of unit length and the values that are written along them. q: the query after token t.
        truth: the right answers [B, T, d].
        label: [B, T], numbers of the keys: a later token of the same label replaces an earlier one.
    """

    k: Tensor
    v: Tensor
    q: Tensor
    truth: Tensor
    label: Tensor


@dataclass(frozen=True, kw_only=True)
class StreamKind:
    """A kind of stream: how it is drawn, in words too, and what the exact regression for it is.

    Attributes:
        latest_only: whether exact least squares takes the latest token of every key alone.
        ridge: its penalty; for noise that of the best linear predictor.
    """

    name: str
    says: str
    tokens: int
    draw: Callable[[Draws, int, int], Stream]
    latest_only: bool = False
    ridge: float = TINY_RIDGE

    def make(self, seed: int, size: int) -> Stream:
        """The stream of `size` key and value channels for a seed."""
        return self.draw(Draws(seed), size, self.tokens)


def interference(draws: Draws, size: int, tokens: int) -> Stream:
    """Every token is a new pair; keys share one direction, which has half of their energy. Asked is one of the pairs so far."""
    own, common = draws.unit(ROWS, tokens, size), draws.unit(ROWS, 1, size)
    k = F.normalize(own + common, dim=-1)
    v = draws.normal(ROWS, tokens, size)
    label = torch.arange(tokens).expand(ROWS, -1)
    return _asking(k, v, label, _earlier(draws, tokens))


def overwrite(draws: Draws, size: int, tokens: int) -> Stream:
    """Each token gives one of 8 keys a new value. Asked is the latest value of a key that has been written."""
    keys = draws.unit(ROWS, 8, size)
    label = draws.integers(8, ROWS, tokens)
    k = keys.gather(1, label[..., None].expand(-1, -1, size))
    v = draws.normal(ROWS, tokens, size)
    asked = label.gather(1, _earlier(draws, tokens))
    at = torch.arange(tokens)
    written = (label[:, None, :] == asked[:, :, None]) & (at[None, None, :] <= at[None, :, None])
    latest = (written * (at + 1)).argmax(-1)  # the last token that wrote the key that is asked
    return _asking(k, v, label, latest)


def forgetting(draws: Draws, size: int, tokens: int) -> Stream:
    """4 pairs are written once, then 12 others in turn to the end. Asked are the 4 old ones."""
    old, new = 4, 12
    label = torch.arange(tokens)
    label[old:] = old + (label[old:] - old) % new
    label = label.expand(ROWS, -1)
    places = label[..., None].expand(-1, -1, size)
    k, v = (draws_of(ROWS, old + new, size).gather(1, places) for draws_of in (draws.unit, draws.normal))
    return _asking(k, v, label, draws.integers(old, ROWS, tokens))


def noise(draws: Draws, size: int, tokens: int) -> Stream:
    """Values are a random linear map of new keys plus noise of the same power. Asked is the map at fresh keys."""
    W = draws.normal(ROWS, size, size)
    k, q = draws.unit(ROWS, tokens, size), draws.unit(ROWS, tokens, size)
    v = k @ W + draws.normal(ROWS, tokens, size)
    return Stream(k, v, q, q @ W, torch.arange(tokens).expand(ROWS, -1))


STREAMS = {
    kind.name: kind
    for kind in (
        StreamKind(
            name="interference", says="32 pairs with overlapping keys; one of them is asked", tokens=32, draw=interference
        ),
        StreamKind(
            name="overwrite", says="8 keys whose values change, 64 writes; the latest value is asked", tokens=64,
            draw=overwrite, latest_only=True,
        ),
        StreamKind(
            name="forgetting", says="4 pairs, then 12 others again and again, 128 tokens; the 4 are asked", tokens=128,
            draw=forgetting,
        ),
        StreamKind(
            name="noise", says="a linear map with noise of the same power, 128 examples; new inputs are asked", tokens=128,
            draw=noise, ridge=1.0,
        ),
    )
}  # fmt: skip


def exact_answers(stream: Stream, kind: StreamKind) -> Tensor:
    """W_t^T q_t of the W_t that minimises sum_(s <= t) w_s |W^T k_s - v_s|^2 + ridge |W|^2, solved directly for every token of
    the last part, [B, n, d]. w is 1, or 0 for tokens whose key comes again up to t where the latest alone count."""
    tokens = stream.k.shape[1]
    at = torch.arange(tokens)
    answers = []
    for t in range(first_compared(tokens), tokens):
        weight = (at <= t).double().expand(len(stream.k), -1)
        if kind.latest_only:
            again = (stream.label[:, :, None] == stream.label[:, None, :]) & (at[None, :] > at[:, None]) & (at <= t)
            weight = weight * ~again.any(-1)
        weighted = stream.k * weight[..., None]
        gram = weighted.mT @ stream.k + kind.ridge * torch.eye(stream.k.shape[-1], dtype=torch.float64)
        W = torch.linalg.solve(gram, weighted.mT @ stream.v)
        answers.append((stream.q[:, t, None] @ W).squeeze(1))
    return torch.stack(answers, 1)


def first_compared(tokens: int) -> int:
    """The first token of the last part."""
    return tokens - round(LAST_PART * tokens)


def _earlier(draws: Draws, tokens: int) -> Tensor:
    """For every t one of the tokens up to t, [B, T]."""
    return (draws.uniform(ROWS, tokens) * torch.arange(1, tokens + 1)).long()


def _asking(k: Tensor, v: Tensor, label: Tensor, place: Tensor) -> Stream:
    """After token t the key of token place[t] is asked, whose value is the truth."""
    places = place[..., None].expand_as(k)
    return Stream(k, v, k.gather(1, places), v.gather(1, places), label)
