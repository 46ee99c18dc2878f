"""Correctness alone, over lengths, shapes, dtypes, decays and packed rows: every combination runs twice for the same bits, and
its values and gradients are compared with our chunkwise form in float64 and with the same-precision twin.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import accumulate
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .accuracy import Failure, results
from .cases import CASES, Sizes
from .verdict import Drawn, verdict

PACKED = (0, 1, 63, 64, 65, 200, 0, 7)  # empty first, an empty one inside, chunk edges hit and missed


class Combination(NamedTuple):
    """Decay: usual (half-lives from a few to hundreds of tokens), none (g = 0), forgetting (a tenth of g is -inf), strong
    (100 times the usual)."""

    sizes: Sizes
    dtype: str = "bfloat16"
    decay: str = "usual"
    packed: bool = False

    def __str__(self) -> str:
        return f"({self.sizes}) {self.dtype} {self.decay} decay{' packed' if self.packed else ''}"


Checked = tuple[str, Combination, dict[str, Any]]  # an op, and the verdict


def combinations() -> list[Combination]:
    """Every length, head size, dtype and decay at least once, not their product."""

    def one(T: int, K: int, V: int, B: int = 1, H: int = 8, HV: int = 0, **more: Any) -> Combination:
        return Combination(Sizes(B, T, H, K, V, HV), **more)

    return [
        *(one(T, 128, 128) for T in (63, 64, 65, 1000, 8192)),
        *(one(200, K, V, B=2) for K, V in ((16, 16), (64, 64), (96, 192), (100, 100), (256, 256))),
        one(1000, 64, 64, H=2, HV=6),
        *(one(300, 128, 128, decay=decay) for decay in ("none", "forgetting", "strong")),
        one(1000, 100, 100, decay="strong"),
        one(1000, 96, 192, decay="forgetting"),
        one(8192, 64, 64, decay="none"),
        one(sum(PACKED), 128, 128, packed=True),
        one(sum(PACKED), 64, 64, H=2, HV=6, packed=True),
        one(1, 64, 64, B=2),
        *(one(T, 128, 128, dtype="float32") for T in (65, 1000)),
        one(8192, 64, 64, dtype="float32"),
        one(sum(PACKED), 64, 64, dtype="float32", packed=True),
        one(300, 64, 64, dtype="float32", decay="forgetting"),
        one(200, 96, 192, dtype="float32", decay="strong"),
        one(1000, 128, 128, dtype="float16"),
        one(sum(PACKED), 64, 64, dtype="float16", packed=True),
    ]


def inputs_of(op: str, what: Combination, device: str, seed: int) -> dict[str, Tensor]:
    inputs = CASES[op].draw(what.sizes, getattr(torch, what.dtype), device, seed)
    with torch.no_grad():
        for name in inputs.keys() & {"g", "precond_g"}:
            g = inputs[name]
            if what.decay == "none":
                g.zero_()
            elif what.decay == "strong":
                g.mul_(100)
            elif what.decay == "forgetting":
                g[torch.rand(g.shape, generator=torch.Generator().manual_seed(seed)).to(device) < 0.1] = -torch.inf
    return inputs


def poison(device: str) -> None:
    """Free memory that holds no number, so that what a kernel forgets to write is seen."""
    if device == "cpu":
        return
    blocks = [torch.full((2**17,), torch.nan, device=device) for _ in range(64)]  # below 1 MB: the pool of small blocks
    blocks += [torch.full((2**20,), torch.nan, device=device) for _ in range(32)]
    blocks.append(torch.full((2**26,), torch.nan, device=device))
    del blocks


def check(op: str, what: Combination, device: str, backend: str, seed: int) -> dict[str, Any]:
    """The verdict, and whether two runs give the same bits."""
    case, dtype = CASES[op], getattr(torch, what.dtype)
    packed: dict[str, Any] = (
        {"cu_seqlens": torch.tensor([0, *accumulate(PACKED)], device=device)} if what.packed else {}
    )

    def draw(seed: int) -> Drawn:
        count = len(PACKED) if what.packed else what.sizes.B
        drawn = Drawn.around(op, inputs_of(op, what, device, seed), what.sizes, count, seed)
        poison(device)
        return drawn

    row = verdict(op, draw, seed, dtype, backend, **packed)
    first, second = (results(case, *draw(seed), backend=backend, **packed) for _ in range(2))
    differing = [name for name in first if not torch.equal(first[name], second[name])]
    row["failures"] += [Failure("repeat", f"two runs differ in {name}", name) for name in differing]
    return row


def check_group(op: str, group: Sequence[Combination], device: str, backend: str, seed: int) -> list[Checked]:
    """One after the other in this process; an exception is a failure as well."""
    torch.set_num_threads(1)
    rows: list[Checked] = []
    for what in group:
        try:
            row = check(op, what, device, backend, seed)
        except Exception as error:  # the other combinations are worth knowing
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f" ({Path(last.filename).name}:{last.lineno})"
            row = {"failures": [Failure.of_error(error, 200, place)]}
        rows.append((op, what, row))
        if device != "cpu":
            try:
                torch.cuda.empty_cache()  # the processes share one device
            except RuntimeError as error:  # an illegal access, after which this process can do no more
                row["failures"].append(Failure.of_error(error, place=" (the device failed)"))
    return rows


def check_all(
    ops: Sequence[str], device: str, backend: str, seed: int, jobs: int, chosen: Sequence[Combination]
) -> Iterator[Checked]:
    """Rows as they come. Combinations that need the same kernels go to the same process, as compiling is what takes the time."""
    groups: dict[tuple[Any, ...], list[Combination]] = {}
    for what in chosen:
        groups.setdefault((what.sizes.K, what.sizes.V, what.dtype), []).append(what)
    work = [(op, group) for op in ops for group in groups.values()]
    if jobs == 1:
        for op, group in work:
            yield from check_group(op, group, device, backend, seed)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in as_completed([pool.submit(check_group, *one, device, backend, seed) for one in work]):
            yield from done.result()
