"""One call of the kernels: its tensors, sizes, and the choices that are compiled in."""

from __future__ import annotations

from functools import cached_property, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch

from ...ops.framework.sequences import Sequences
from ..availability import aligned
from ..runtime.compiling import Launch
from ..runtime.packing import CHUNK, Table, most_segments, segment_length, table
from ..runtime.workspace import Buffer
from .tiles import Tile, programs_at_once, tiles


class Inputs(NamedTuple):
    """Contiguous tensors as the ops take them, or buffers in their place; what a rule lacks is None."""

    q: Any
    k: Any
    v: Any
    beta: Any = None
    g: Any = None
    write_key: Any = None
    S: Any = None
    precond_g: Any = None
    precond_beta: Any = None
    center: Any = None
    A: Any = None

    def aligned(self) -> Inputs:
        """As the kernels read them."""
        return Inputs(*map(aligned, self))


class Saved(NamedTuple):
    """What backward keeps: T [BT, HV, 64], u [BT, HV, V], G [BT, HV], states at the segments' starts [P, HV, K, V], the
    segments' transitions [P, HV, K(, K)], the preconditioner's A at the chunks' starts [M, HV, K] and its write keys
    [BT, HV, K]; None where there is none."""

    T: Any
    u: Any
    G: Any
    starts: Any
    transitions: Any
    gram: Any
    writes: Any


@lru_cache
def is_roomy(device: torch.device) -> bool:
    """See `tiles`; so is the interpreter."""
    if device.type != "cuda":
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200 * 1024


class Plan:
    """Sizes, tables and compile-time choices of a call, and the launches that come of them."""

    def __init__(self, x: Inputs, sequences: Sequences, device: torch.device) -> None:
        self.sequences, self.device, self.dtype = sequences, device, x.q.dtype
        self.launches: list[Launch] = []
        self.rows = x.q.shape[:2]
        self.H, self.K = x.q.shape[2:]
        self.HV, self.V = x.v.shape[2:]
        self.delta, self.precond = x.beta is not None, x.precond_g is not None
        self.writes = x.write_key is not None or self.precond
        self.decay = 0 if x.g is None else x.g.ndim - 2
        self.tile = tiles(self.K, self.V, x.q.dtype, self.delta, is_roomy(device))
        self.precision = "tf32x3" if x.q.dtype == torch.float32 else "tf32"
        self.segment = segment_length(
            sequences, self.HV * -(-self.V // self.tile["walk"].BV), programs_at_once(self.delta)
        )
        # What is written to narrow states has the largest error: T and U are not rounded on the way to it.
        self.u_dtype = torch.float32 if self.K < 64 else x.q.dtype

    @cached_property
    def where(self) -> Table:
        """Not to be asked for while a graph is traced."""
        return table(self.sequences, self.segment, self.device)

    @property
    def segments(self) -> int:
        """Segments that have a state of their own, 0 where the sequences are walked whole."""
        return 0 if self.segment is None else most_segments(self.sequences, self.segment)

    def ends(self, final: bool) -> tuple[Buffer | None, Buffer | None]:
        """The final S and A, where they are asked for."""
        shape = self.sequences.count, self.HV, self.K
        S = self.new(*shape, self.V, dtype=torch.float32) if final else None
        return S, self.new(*shape, dtype=torch.float32) if final and self.precond else None

    def saved(self) -> Saved:
        """Room for what backward keeps; operands of products in the inputs' dtype."""
        HV, K, P, float32 = self.HV, self.K, self.segments, torch.float32
        starts = transitions = None
        if self.segment is not None:
            starts = self.new(P, HV, K, self.V, dtype=float32)
            transitions = self.new(P, HV, K, K) if self.delta else self.new(P, HV, K, dtype=float32)
        return Saved(
            T=self.tokenwise(HV, CHUNK) if self.delta else None,
            u=self.tokenwise(HV, self.V, dtype=self.u_dtype) if self.delta else None,
            G=self.tokenwise(HV, dtype=float32) if self.decay == 1 else None,
            starts=starts,
            transitions=transitions,
            gram=self.new(self.chunks, HV, K, dtype=float32) if self.precond else None,
            writes=self.tokenwise(HV, K) if self.precond else None,
        )

    @property
    def chunks(self) -> int:
        """A bound on the number of chunks, exact where all sequences are equally long."""
        return most_segments(self.sequences, 1) if prod(self.rows) else 0

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        return Buffer(shape, dtype or self.dtype)

    def tokenwise(self, *shape: int, dtype: torch.dtype | None = None) -> Buffer:
        return self.new(*self.rows, *shape, dtype=dtype)

    def launch(self, kernel: Any, grid: tuple[int, ...], *places: Any, **choices: Any) -> None:
        """After the others of this plan, see `Schedule`."""
        self.launches.append(Launch(kernel, grid, places, choices))

    def options(self, name: str, *tile: str) -> dict[str, int]:
        return compiled_in(self.tile[name], *tile)


@lru_cache
def compiled_in(found: Tile, *names: str) -> dict[str, int]:
    """Those sizes of a tile, and how it is compiled, as a launch takes them."""
    chosen = {name: getattr(found, name) for name in (*names, "num_warps", "num_stages", "maxnreg")}
    return {name: x for name, x in chosen.items() if x is not None}


def heads(plan: Plan, x: Any) -> int:
    """How many value heads one head of x serves."""
    return 1 if x is None else plan.HV // x.shape[2]
