"""Measured tile sizes of the kernels, by the widths of a head and the dtype. One place, no search at run time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Key channels and value columns of a program, and how it is compiled. maxnreg: registers a thread at most, where a few less
    than the compiler would take let a multiprocessor run one program more (168 for three of 4 warps)."""

    BK: int
    BV: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds a width; products want at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def programs_at_once(delta: bool) -> int:
    """Programs of a walk that keep an H100 or H200 (132 multiprocessors) busy."""
    return 528 if delta else 396


@lru_cache
def tiles(K: int, V: int, dtype: torch.dtype, delta: bool, roomy: bool = True) -> dict[str, Tile]:
    """roomy: whether a program may take 200 KB of shared memory (H100 and later server parts). Elsewhere the walks load nothing
    ahead, which on sm_80 also keeps them free of spills, and other tiles are small for the same reason."""
    K, V = padded(K), padded(V)
    if dtype != torch.float32:
        # Of float16 inputs the preconditioner computes in tf32, whose operands are twice as large.
        gram = 64 if roomy and dtype != torch.float16 else 32
        ahead = 3 if roomy and K <= 128 else 2 if roomy else 1
        fewer = 168 if delta and max(K, V) <= 128 else None
        found = {
            "solve": Tile(128 if roomy else 64, 64, 4, 1),
            "solve_again": Tile(128, 128, 4, 1),
            "walk": Tile(K, 32, 4, ahead),
            "walk_segments": Tile(K, 64 if roomy and delta and K <= 128 else 32, 4, min(ahead, 2) if delta else ahead),
            "walk_back": Tile(K, 32, 4, ahead if K <= 128 else 1),
            "join": Tile(64, 32, 4, 1),
            "output": Tile(128, 128, 4, 1) if roomy else Tile(64, 64, 4, 1),
            "value_gradient": Tile(128, 128, 4, 1, fewer) if roomy else Tile(64, 32, 4, 1),
            "gradients": Tile(64, 64 if K > 64 else 32, 4, 3) if roomy else Tile(32, 32, 4, 2),
            "prepare": Tile(32, 64, 4, 1) if roomy else Tile(16, 32, 8, 1),
            "channel_gradients": Tile(32, 32, 4, 2) if roomy else Tile(16, 32, 4, 2),
            "channel_halves": Tile(32, 32, 8, 1) if roomy else Tile(16, 32, 8, 1),
            "write_keys": Tile(gram, 16, 4, 1),
            "gram_asked": Tile(gram, 16, 4, 1),
            "gram_back": Tile(gram if K > 64 else 32, 16, 4, 1),
        }
    else:
        found = {
            **{name: Tile(K, 16, 4, 1) for name in ("walk", "walk_segments", "walk_back")},
            **{name: Tile(32, 32, 4, 1) for name in ("solve", "solve_again", "output", "value_gradient", "prepare")},
            **{name: Tile(32, 32, 8, 1) for name in ("gradients", "channel_gradients", "channel_halves")},
            "join": Tile(32, 16, 4, 1),
            **{name: Tile(64, 16, 4, 1) for name in ("write_keys", "gram_asked", "gram_back")},
        }
    return {name: t._replace(BK=min(t.BK, K), BV=min(t.BV, V)) for name, t in found.items()}
