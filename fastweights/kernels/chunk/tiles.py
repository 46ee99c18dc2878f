"""Measured tile sizes of the kernels, by the widths of a head and the dtype. One place, no search at run time."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """Key channels and value columns of a program, and how it is compiled. maxnreg: registers per thread at most, where a few
    less than the compiler would take let a multiprocessor run one more program (168 for three of 4 warps)."""

    BK: int
    BV: int
    num_warps: int = 4
    num_stages: int = 2
    maxnreg: int | None = None


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds a width; products want at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def programs_at_once(delta: bool) -> int:
    """Programs of the state pass that keep an H100 or H200 (132 multiprocessors) busy."""
    return 528 if delta else 396


@lru_cache
def tiles(
    K: int, V: int, dtype: torch.dtype, delta: bool, large: bool = True, finer: bool = False
) -> dict[str, Tile]:  # fmt: skip
    """large: whether a program may take 200 KB of shared memory (H100 and later server parts). Elsewhere the state passes load
    nothing ahead, which on sm_80 also keeps them free of spills, and other tiles are small for the same reason. finer: whether
    write keys come as two tensors and u in float32, which take room in the state passes."""
    K, V = padded(K), padded(V)
    if dtype != torch.float32:
        # Of float16 inputs the preconditioner computes in tf32, whose operands are twice as large.
        energy = 64 if large and dtype != torch.float16 else 32
        ahead = 3 if large and K <= 128 else 2 if large else 1
        fewer = 168 if delta and max(K, V) <= 128 else None
        found = {
            "wy_transform": Tile(128 if large else 64, 64, 4, 1),
            "wy_transform_again": Tile(128, 128, 4, 1),
            "chunk_state": Tile(K, 32, 4, ahead),
            "segment_states": Tile(K, 64 if large and delta and K <= 128 else 32, 4, min(ahead, 2) if delta else ahead),
            "chunk_state_backward": Tile(K, 32, 4, ahead if K <= 128 else 1),
            "combine_segments": Tile(64, 32, 4, 1),
            "chunk_output": Tile(128, 128, 4, 1) if large else Tile(64, 64, 4, 1),
            "value_grads": Tile(128, 128, 4, 1, fewer) if large else Tile(64, 32, 4, 1),
            "chunk_gradients": Tile(64, 64 if K > 64 else 32, 4, 2) if large else Tile(32, 32, 4, 2),
            "wy_transform_channel": Tile(32, 64, 4, 1) if large else Tile(16, 32, 8, 1),
            "chunk_gradients_channel": Tile(32, 32, 4, 2) if large else Tile(16, 32, 4, 2),
            "chunk_gradients_channel_halves": Tile(32, 32, 8, 1) if large else Tile(16, 32, 8, 1),
            "precondition": Tile(energy, 16, 4, 1),
            "precondition_grads": Tile(energy, 16, 4, 1),
            "key_energy_backward": Tile(energy if K > 64 else 32, 16, 4, 1),
        }
    else:
        found = {
            **{name: Tile(K, 16, 4, 1) for name in ("chunk_state", "segment_states", "chunk_state_backward")},
            **{
                name: Tile(32, 32, 4, 1)
                for name in (
                    "wy_transform",
                    "wy_transform_again",
                    "chunk_output",
                    "value_grads",
                    "wy_transform_channel",
                )
            },
            **{
                name: Tile(32, 32, 8, 1)
                for name in ("chunk_gradients", "chunk_gradients_channel", "chunk_gradients_channel_halves")
            },
            "combine_segments": Tile(32, 16, 4, 1),
            **{name: Tile(64, 16, 4, 1) for name in ("precondition", "precondition_grads", "key_energy_backward")},
        }
    found["precondition_whole"] = Tile(K, 16, 8, 1)
    if finer and large:
        found["wy_transform"] = Tile(64, 64, 4, 1)
        for name in ("chunk_state", "segment_states", "chunk_state_backward"):
            found[name] = Tile(K, 32, 4, min(2, found[name].num_stages))
        # T in float32 leaves room for one program per multiprocessor: at 64 channels one of all columns.
        found["chunk_state_backward"] = Tile(K, 64 if K <= 64 else 32, 4, 2)
        found["chunk_gradients"] = Tile(64, 32, 4, 2)
        found["chunk_output"] = Tile(128, 64, 4, 1)
        found["value_grads"] = Tile(128, 128, 4, 1)
    return {name: t._replace(BK=min(t.BK, K), BV=min(t.BV, V)) for name, t in found.items()}
