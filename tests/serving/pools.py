"""A scheduler in small: sequences of one layer in a pool, read in pieces and token by token, with rows of padding."""

from __future__ import annotations

import torch
from torch import Tensor

from fastweights.layers import LayerCache, Mixer
from fastweights.serving.vllm.pool import Layout, PooledMixer

UNTOUCHED = 7  # every byte of a block that belongs to no sequence


class Pool:
    """A layer with a pool of `count` blocks whose rows lie further apart than a block is long."""

    def __init__(self, mixer: Mixer, count: int = 6, state_dtype: torch.dtype | None = None) -> None:
        first = next(mixer.parameters())
        self.size = Layout(mixer.state_spec(), state_dtype).size
        self.blocks = torch.full((count, self.size + 48), UNTOUCHED, dtype=torch.uint8, device=first.device)
        self.pooled = PooledMixer(mixer, self.blocks[:, : self.size], state_dtype)

    def is_untouched(self, *rows: int) -> bool:
        return bool((self.blocks[list(rows)] == UNTOUCHED).all() and (self.blocks[:, self.size :] == UNTOUCHED).all())


@torch.no_grad()
def read_in_steps(pool: Pool, x_NTD: Tensor, pieces: tuple[int, ...], rows: list[int]) -> Tensor:
    """The outputs [N, T, D] where the first tokens come in pieces of such lengths and the rest one by one."""
    count, time, width = x_NTD.shape
    places = torch.tensor(rows, dtype=torch.int32, device=x_NTD.device)
    read, start = [], 0
    for piece in pieces:
        edges = torch.arange(count + 1, dtype=torch.int32, device=x_NTD.device) * piece
        started = torch.full((count,), start > 0, device=x_NTD.device)
        tokens = x_NTD[:, start : start + piece].reshape(-1, width)
        read.append(pool.pooled.prefill(tokens, places, started, edges).view(count, piece, width))
        start += piece
    padded = torch.cat([places, places.new_zeros(2)])
    for token in range(start, time):
        x_ND = torch.cat([x_NTD[:, token], x_NTD.new_ones(2, width)])
        read.append(pool.pooled.decode(x_ND, padded)[:count, None])
    return torch.cat(read, 1)


@torch.no_grad()
def read_at_once(mixer: Mixer, x_NTD: Tensor) -> Tensor:
    return mixer(x_NTD, LayerCache())
