"""The states of all sequences in a pool of equal blocks of bytes, whatever tensors a layer's cache holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...kernels.runtime.overlap import can_overlap, overlapping_launches
from ...layers import LayerCache, Mixer, SoftmaxAttention, build_mixer
from ...layers.mixer import token_of
from ...layers.shared_input import arrange_rows
from ...models.parts import part_of_config
from ...ops.framework.checks import FEW_TOKENS
from ...ops.framework.pool_rows import read_rows, write_rows
from .drafts import DraftedStep, plan_drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["STATE_DTYPES", "Layout", "PooledMixer", "StateBlock"]

ALIGNMENT = 16  # bytes, the widest load of a GPU
ROW_ALIGNMENT = 64  # bytes: Triton's kernels load 16 bytes at once where rows are multiples of 16 float32 apart
REHEARSED = 70  # tokens, more than a chunk has
LONG = 2048  # tokens of a prompt that kernels of a GPU read in segments


class Place(NamedTuple):
    part: str  # "memory" or "context"
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int


class Layout:
    """Where the tensors of one sequence's cache lie in a block, the memory first.

    Args:
        spec: the cache of one sequence, see `Mixer.state_spec`.
        state_dtype: in which the floating-point tensors of the memory are kept; as in the spec when None.

    Attributes:
        size: bytes of a block.
        memory_size: bytes of the memory in it.
    """

    def __init__(self, spec: LayerCache, state_dtype: torch.dtype | None = None) -> None:
        self.places: list[Place] = []
        self.size = self.memory_size = 0
        for part in ("memory", "context"):
            for name, x in getattr(spec, part).items():
                dtype = x.dtype
                if part == "memory" and state_dtype is not None and x.is_floating_point():
                    dtype = state_dtype
                self.places.append(Place(part, name, tuple(x.shape[1:]), dtype, self.size))
                self.size += -(-x.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
            self.size += -self.size % ROW_ALIGNMENT
            if part == "memory":
                self.memory_size = self.size

    def pools(self, blocks: Tensor) -> LayerCache:
        """Views [P, ...] of the tensors in blocks [P, size] of bytes, whose rows may lie further apart."""
        pools = LayerCache()
        for part, name, shape, dtype, offset in self.places:
            taken = torch.Size(shape).numel() * dtype.itemsize
            getattr(pools, part)[name] = blocks[:, offset : offset + taken].view(dtype).view(len(blocks), *shape)
        return pools


class PooledMixer:
    """A mixer whose sequences have their states in rows of a pool of blocks. Row 0 belongs to no sequence: vLLM gives it to the
    padding of a step, and it stays as it is.

    Args:
        mixer: the layer.
        blocks: [P, size] bytes, see `Layout`.
        state_dtype: in which the memory is kept, that of the layer's own states when None. The layer computes in its own: other
            numbers are converted on the way from the pool and back.
        spec: the layer's `Mixer.state_spec`; asked of the layer when None.
        reading: called with the places in the step, a tensor or slice, of the tokens that the layer reads next, where these are
            not the first ones. One place may stand for all.
    """

    def __init__(
        self,
        mixer: Mixer,
        blocks: Tensor,
        state_dtype: torch.dtype | None = None,
        spec: LayerCache | None = None,
        reading: Callable[[Any], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.mixer, self.reading = mixer, reading
        self.blocks = blocks.view(torch.int64)  # for copies of whole blocks
        spec = mixer.state_spec() if spec is None else spec
        self.dtypes = {name: x.dtype for name, x in spec.memory.items()}
        self.pools = Layout(spec, state_dtype).pools(blocks)
        self.owned = LayerCache(dict(self.pools.memory), dict(self.pools.context))  # without row 0
        self.owned.apply(lambda pool: pool[1:])
        kept = all(pool.dtype == self.dtypes[name] for name, pool in self.pools.memory.items())
        self.decodes_in_pool = mixer.decodes_in_pool and kept

    @cached_property
    def first(self) -> LayerCache:
        """What one sequence begins with, which a layer may have learned."""
        with self.reading(slice(1)):
            return self.mixer.initial_state(1)

    def weights_changed(self) -> None:
        self.__dict__.pop("first", None)

    def decode(self, x_ND: Tensor, rows: Tensor) -> Tensor:
        """One token more [N, D] of sequences that have states. Where the layer can, it works in the pool itself."""
        return self.decode_apart(x_ND[:, None], rows)[:, 0]

    def decode_apart(self, x_N1D: Tensor, rows: Tensor) -> Tensor:
        """The same as `decode` for tokens [N, 1, D], with which products of the layer may come (`normalize_for`)."""
        if self.decodes_in_pool:
            owned = LayerCache(dict(self.owned.memory), dict(self.owned.context), rows=rows - 1)  # padding becomes -1
            return self.mixer(x_N1D, owned)
        with self.take(rows) as cache:
            return self.mixer(x_N1D, cache)

    def verify(self, x_TD: Tensor, step: DraftedStep) -> Tensor:
        """Tokens [T, D], some of them drafted, of several sequences. The state after a token of a sequence goes to a row of its
        own, so that tokens are taken back by reading another row in the next call. The output for padding is 0, or that of a
        sequence without a state where the tokens lie regularly."""
        if step.regular:
            return self.verify_apart(x_TD[:, None], step)[:, 0]
        y_TD = x_TD.new_zeros(step.tokens + 1, x_TD.shape[1])
        with self.reading(step.own_NS.flatten()):
            y_TD[step.places_NS] = self._verify(x_TD[step.own_NS], step)
        return y_TD[: step.tokens]

    def verify_apart(self, x_T1D: Tensor, step: DraftedStep) -> Tensor:
        """The same as `verify` of a regular step for tokens [T, 1, D], with which products of the layer may come."""
        return self._verify(arrange_rows(x_T1D, *step.own_NS.shape), step).reshape(x_T1D.shape)

    def _verify(self, x_NSD: Tensor, step: DraftedStep) -> Tensor:
        """By one call of the layer where it can write the state after each token."""
        if not self.decodes_in_pool or step.own_NS.shape[1] > FEW_TOKENS:
            return self._read_one_by_one(x_NSD, step)
        return self.mixer(x_NSD, LayerCache(dict(self.owned.memory), dict(self.owned.context), rows=step.rows_NR))

    def _read_one_by_one(self, x_NSD: Tensor, step: DraftedStep) -> Tensor:
        read, rows_NR = [], step.rows_NR + 1
        for t, x_ND in enumerate(x_NSD.unbind(1)):
            rows = rows_NR[:, 1 + t]
            self.blocks[rows] = self.blocks[rows_NR[:, t].where(rows > 0, 0)]
            with self.reading(step.own_NS[:, t]):
                read.append(self.decode(x_ND, rows))
        return torch.stack(read, 1)

    def prefill(self, x_TD: Tensor, rows: Tensor, started: Tensor, edges: Tensor) -> Tensor:
        """Tokens [T, D] of sequences that lie one after another. started [N]: which of them have states; edges: [N+1]."""
        with self.take(rows, started) as cache:
            return self.mixer(x_TD[None], cache, edges)[0]

    @torch.no_grad()
    def rehearse(self, drafted: int = 0) -> None:
        """Each kind of call on padding, so that its kernels are compiled before the first request. drafted: tokens at most that
        a call of `verify` has beside one."""
        token_1D = token_of(self.mixer)[0]
        rows = torch.zeros(2, dtype=torch.int32, device=token_1D.device)
        with overlapping_launches(can_overlap(token_1D.device)):
            self.decode(token_1D.repeat(2, 1), rows)
        for tokens in (LONG, REHEARSED) if token_1D.is_cuda else (REHEARSED,):
            x_TD = token_1D.repeat(tokens, 1)
            edges = torch.tensor([0, 1, tokens], dtype=torch.int32, device=x_TD.device)
            with self.reading(slice(1)):
                self.prefill(x_TD, rows, rows > 0, edges)
        if drafted:
            rows_NS = rows[:, None].repeat(1, 1 + drafted)
            self.verify(x_TD, plan_drafts(len(x_TD), rows_NS, torch.ones_like(rows), edges))
        self.weights_changed()  # a sleeping engine gives back what is allocated while it makes the pool

    @contextmanager
    def take(self, rows: Tensor, started: Tensor | None = None) -> Iterator[LayerCache]:
        """The states in these rows [N] of the pool, in the layer's own dtypes; what the body makes of them is written back.
        started [N]: which sequences have states, all when None. Others have those that a sequence begins with."""
        own = rows - 1  # padding becomes -1, which no row belongs to
        known = own if started is None else own.where(started, -1)
        first = LayerCache() if started is None else self.first
        cache = LayerCache(
            {
                name: read_rows(pool, known, self.dtypes[name], first=first.memory.get(name))
                for name, pool in self.owned.memory.items()
            },
            {name: read_rows(pool, known, first=first.context.get(name)) for name, pool in self.owned.context.items()},
        )
        yield cache
        self._put(cache, own)

    def begin(self, rows: Tensor) -> None:
        """The sequences with these rows [N] of the pool have the layer's first state. Row 0 stays as it is."""
        first = LayerCache(dict(self.first.memory), dict(self.first.context))
        first.apply(lambda state: state.expand(len(rows), *state.shape[1:]))
        self._put(first, rows - 1)

    def _put(self, states: LayerCache, own: Tensor) -> None:
        """Into these rows of the pool without row 0, negative for none."""
        for pools, new in ((self.owned.memory, states.memory), (self.owned.context, states.context)):
            for name, pool in pools.items():
                write_rows(pool, new[name], own)


# By vLLM's option mamba_ssm_cache_dtype.
STATE_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


class StateBlock(NamedTuple):
    """The states that one sequence has in a layer of a process. All layers reserve alike, as vLLM wants equal blocks.

    Attributes:
        context: bytes of the last inputs of the convolutions.
        memory: bytes of the fast weights.
        dtype: of the fast weights in the pool.
    """

    context: int
    memory: int
    dtype: torch.dtype

    @classmethod
    def largest(cls, vllm_config: VllmConfig) -> StateBlock:
        """What every memory layer of the model fits into."""
        config = part_of_config(vllm_config.model_config.hf_config, vllm_config.parallel_config.tensor_parallel_size)
        dtype = STATE_DTYPES[vllm_config.cache_config.mamba_ssm_cache_dtype]
        context, memory = ROW_ALIGNMENT, 0  # vLLM before 0.27 takes one byte for a tensor without elements
        for name, options in dict((repr(mixer), mixer) for mixer in config.mixers()).values():
            with torch.device("meta"):
                mixer = build_mixer(
                    name, hidden_size=config.hidden_size, num_heads=config.num_heads, layer_idx=0, **options
                )
            if mixer.takes_first_values:
                raise ValueError(
                    f"a model in vLLM must have layers that pass each other nothing but hidden states, got {name} with the "
                    "values of the first layer (value_residual); generate with `fastweights generate`"
                )
            if not isinstance(mixer, SoftmaxAttention):
                layout = Layout(mixer.state_spec(vllm_config.model_config.dtype), dtype)
                memory = max(memory, layout.memory_size)
                context = max(context, layout.size - layout.memory_size)
        return cls(context, memory, dtype)

    @property
    def size(self) -> int:
        return self.context + self.memory

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        return (self.context,), (self.memory // self.dtype.itemsize,)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return torch.uint8, self.dtype
