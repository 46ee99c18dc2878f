"""A chunkwise form of a recurrence beside its loop over tokens: whether both are equal, and which is faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from torch import Tensor

from .measurement import Number
from .words import Quantity

__all__ = ["CHUNK_NUMBERS", "compare_chunks"]

CHUNK_NUMBERS = {
    "difference": Quantity("{subject}, relative difference"),
    "time_ratio": Quantity("{subject}, time of the loop over that of chunks"),
}


def compare_chunks(op: Callable[[str], Tensor]) -> Iterator[Number]:
    """The numbers of `CHUNK_NUMBERS` of an op that is given a backend."""
    loop, chunks = op("reference"), op("torch")
    yield Number("difference", ((loop - chunks).norm() / loop.norm()).item())
    yield Number(
        "time_ratio", _shortest_seconds(lambda: op("reference"), 1) / _shortest_seconds(lambda: op("torch"), 3)
    )


def _shortest_seconds(call: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return min(found)
