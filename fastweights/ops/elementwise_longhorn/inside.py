"""Reading chunks whose memory decays element by element, with a backward that forms the states of a chunk again: forward one
state per chunk exists at a time, backward those of all tokens of some chunks.

Per token, with the decay a = least + others e^T, the state S and its gradient dS:
    S_t = a_t * S_{t-1} + k u^T          o = S_t^T q
    dS_t += q do^T          dq = S_t do          dk = dS_t u          du = dS_t^T k          da = dS_t * S_{t-1}
    dleast = da^T 1         dothers = da e       de = da^T others     dS_{t-1} = a_t * dS_t
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Numbers of the states that are held at a time, forward and backward. On a CPU the former should fit a core's own cache; where
# there are many cores they want more work at a time.
STATES = {"cpu": 2**17, "other": 2**25}
HISTORY = {"cpu": 2**22, "other": 2**29}


class Tokens(NamedTuple):
    """C tokens of n chunks: q, k, others [C, n, K]; u, least, e [C, n, V]."""

    q: Tensor
    k: Tensor
    u: Tensor
    least: Tensor
    others: Tensor
    e: Tensor

    def take(self, index: Any) -> Tokens:
        return Tokens(*(x[index] for x in self))

    def decay(self, out: Tensor) -> Tensor:
        """a [n, K, V] of one token, written to out."""
        return torch.addcmul(self.least[:, None], self.others[..., None], self.e[:, None], out=out)

    def step(self, S: Tensor, out: Tensor) -> Tensor:
        """The state after one token, written to out, which must not be S."""
        return self.decay(out).mul_(S).addcmul_(self.k[..., None], self.u[:, None])


class ReadInside(torch.autograd.Function):
    """apply(read, q, k, u, least, others, e, start) -> o [C, n, V] (of no token unless `read`) and the state at the end of every
    chunk, [n, K, V] as at the start."""

    @staticmethod
    def forward(ctx: Any, read: bool, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        tokens, start = Tokens(*inputs[:-1]), inputs[-1]
        ctx.read = read
        ctx.save_for_backward(*inputs)
        o, end = tokens.u.new_empty(tokens.u.shape if read else 0), torch.empty_like(start)
        for rows in blocks(start, STATES):
            S, after = start[rows].clone(), torch.empty_like(end[rows])
            for t in range(len(tokens.u)):
                token = tokens.take((t, rows))
                S, after = token.step(S, after), S
                if read:
                    o[t, rows] = (token.q[:, None] @ S)[:, 0]
            end[rows] = S
        return o, end

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, do: Tensor, dend: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, start = ctx.saved_tensors
        tokens, into = Tokens(*inputs), Tokens(*(torch.zeros_like(x) for x in inputs))
        dstart = torch.empty_like(start)
        for rows in blocks(start, HISTORY, len(tokens.u)):
            part = (slice(None), rows)
            dstart[rows] = differentiate(
                tokens.take(part), start[rows], do[part] if ctx.read else None, dend[rows].clone(), into.take(part)
            )
        return None, *into, dstart


def blocks(start: Tensor, largest: dict[str, int], copies: int = 1) -> Iterator[slice]:
    """Rows that are taken together, where each takes so many copies of a state."""
    numbers = copies * start.shape[1] * start.shape[2]
    rows = max(1, largest["cpu" if start.device.type == "cpu" else "other"] // max(1, numbers))
    return (slice(first, first + rows) for first in range(0, len(start), rows))


def differentiate(tokens: Tokens, start: Tensor, do: Tensor | None, dS: Tensor, into: Tokens) -> Tensor:
    """Writes the gradients of the tokens' inputs to `into`, overwrites dS and returns it as that of the start."""
    count = len(tokens.u)
    states = start.new_empty(count + 1, *start.shape)
    states[0] = start
    for t in range(count):
        tokens.take(t).step(states[t], states[t + 1])
    one_and_others = torch.stack([torch.ones_like(tokens.others), tokens.others], -2)
    space = torch.empty_like(dS)
    for t in range(count - 1, -1, -1):
        token = tokens.take(t)
        if do is not None:
            into.q[t] = (states[t + 1] @ do[t, ..., None])[..., 0]
            dS.addcmul_(token.q[..., None], do[t, :, None])
        into.k[t] = (dS @ token.u[..., None])[..., 0]
        into.u[t] = (token.k[:, None] @ dS)[:, 0]
        da = torch.mul(dS, states[t], out=space)
        into.others[t] = (da @ token.e[..., None])[..., 0]
        into.least[t], into.e[t] = (one_and_others[t] @ da).unbind(1)
        dS.mul_(token.decay(space))
    return dS
