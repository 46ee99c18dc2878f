"""A scheduler in small: sequences of one layer in a pool, read in pieces and token by token, with rows of padding."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from fastweights.layers import LayerCache, Mixer
from fastweights.serving.vllm.drafts import plan_drafts
from fastweights.serving.vllm.pool import Layout, PooledMixer

UNTOUCHED = 7  # every byte of a block that belongs to no sequence


class Pool:
    """A layer with a pool of `count` blocks whose rows lie further apart than a block is long."""

    def __init__(self, mixer: Mixer, count: int = 6, state_dtype: torch.dtype | None = None) -> None:
        first = next(mixer.parameters())
        self.size = Layout(mixer.state_spec(), state_dtype).size
        self.blocks = torch.full((count, self.size + 64), UNTOUCHED, dtype=torch.uint8, device=first.device)
        self.pooled = PooledMixer(mixer, self.blocks[:, : self.size], state_dtype)

    def is_untouched(self, *rows: int) -> bool:
        return bool((self.blocks[list(rows)] == UNTOUCHED).all() and (self.blocks[:, self.size :] == UNTOUCHED).all())


Steps = Sequence[tuple[int, ...]]


@torch.no_grad()
def read_in_steps(pool: Pool, x_NTD: Tensor, steps: Steps, rows: list[int]) -> Tensor:
    """The outputs [N, T, D]. In each of `steps` the sequences read so many tokens, as vLLM has them read: one more token of those
    that have states, beside rows of padding, then packed the sequences that read several or begin. The rest comes one by one."""
    count, time, _ = x_NTD.shape
    read: list[list[Tensor]] = [[] for _ in range(count)]
    done = [0] * count

    def step(tokens: tuple[int, ...]) -> None:
        decoded = [n for n in range(count) if tokens[n] == 1 and done[n]]
        longer = [n for n in range(count) if tokens[n] and n not in decoded]
        places = torch.tensor(rows, dtype=torch.int32, device=x_NTD.device)
        if decoded:
            x_ND = torch.stack([x_NTD[n, done[n]] for n in decoded] + [torch.ones_like(x_NTD[0, 0])] * 2)
            y_ND = pool.pooled.decode(x_ND, torch.cat([places[decoded], places.new_zeros(2)]))
        if longer:
            started = torch.tensor([done[n] > 0 for n in longer], device=x_NTD.device)
            edges = torch.tensor([0, *accumulate(tokens[n] for n in longer)], dtype=torch.int32, device=x_NTD.device)
            x_TD = torch.cat([x_NTD[n, done[n] : done[n] + tokens[n]] for n in longer])
            y_TD = pool.pooled.prefill(x_TD, places[longer], started, edges).split([tokens[n] for n in longer])
        for n, length in enumerate(tokens):
            if n in decoded:
                read[n].append(y_ND[decoded.index(n)][None])
            elif length:
                read[n].append(y_TD[longer.index(n)])
            done[n] += length

    for tokens in steps:
        step(tokens)
    while min(done) < time:
        step(tuple(int(length < time) for length in done))
    return torch.stack([torch.cat(parts) for parts in read])


@torch.no_grad()
def read_at_once(mixer: Mixer, x_NTD: Tensor) -> Tensor:
    return mixer(x_NTD, LayerCache())


@torch.no_grad()
def read_with_drafts(pool: Pool, x_NTD: Tensor, rows_NS: Tensor, seed: int = 0, regular: bool = False) -> Tensor:
    """The outputs [N, T, D] where each sequence reads a first piece, and then in each call one token and some drafts, the last
    of which are wrong and read once more. Calls have rows and tokens of padding. regular: as many drafts in each call as there
    are rows for, and as many tokens of padding."""
    count, time, width = x_NTD.shape
    draw, drafts = torch.Generator().manual_seed(seed), rows_NS.shape[1]
    device, done, accepted = x_NTD.device, [2] * count, [1] * count

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=draw))

    def numbers(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    started, edges = torch.zeros(count, dtype=torch.bool, device=device), numbers(*range(0, 2 * count + 1, 2))
    first = pool.pooled.prefill(x_NTD[:, :2].flatten(0, 1), rows_NS[:, 0], started, edges)
    read = [[y_TD] for y_TD in first.split(2)]
    while min(done) < time:
        going = [n for n in range(count) if done[n] < time]
        lengths = [drafts if regular else random(1, min(drafts, time - done[n])) for n in going]
        right = [random(1, min(length, time - done[n])) for n, length in zip(going, lengths)]
        x_TD = torch.cat(
            [torch.cat([x_NTD[n, done[n] : done[n] + r], x_NTD.new_ones(length - r, width)])
             for n, length, r in zip(going, lengths, right)] + [x_NTD.new_ones(drafts if regular else 2, width)]
        )  # fmt: skip
        total = sum(lengths)
        step = plan_drafts(
            len(x_TD), torch.cat([rows_NS[going], torch.zeros_like(rows_NS[:1])]), numbers(*(accepted[n] for n in going), 1),
            numbers(0, *accumulate(lengths), total), regular,
        )  # fmt: skip
        y_TD = pool.pooled.verify(x_TD, step)
        assert regular or not y_TD[total:].any()
        for n, y, r in zip(going, y_TD[:total].split(lengths), right):
            read[n].append(y[:r])
            done[n], accepted[n] = done[n] + r, r
    return torch.stack([torch.cat(parts) for parts in read])
