"""The contract of a mixer, for layers of your own: `check_mixer(layer)` finds where a layer breaks it."""

from __future__ import annotations

import copy
from itertools import pairwise

import torch
from torch import Tensor

from ..checks import LARGEST_WIDTH, check_positive, check_size, check_whole_number, describe_value
from ..layers import LayerCache, Mixer

__all__ = ["check_mixer"]

LONGEST = 2**16  # tokens; the check reads the sequence many times, token by token too
# Largest error of a reading, as a part of the largest number in the reading that it must equal.
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def check_mixer(
    layer: Mixer, *, hidden_size: int | None = None, length: int = 21, tolerance: float | None = None, seed: int = 0
) -> None:
    """Check that a layer keeps what `fastweights.layers.Mixer` promises.

    The output has the shape and dtype of the input and is causal; gradients reach every parameter; reading with a cache,
    token by token, in pieces or packed, gives the whole reading; packed sequences and rows of a batch do not see each other;
    tensors of the cache have the sequences first and are never written into; state_size() is what the cache's memory holds;
    the layer keeps the dtype bfloat16. The layer's parameters and gradients stay as they are.

    A layer in float64 is checked most sharply: check_mixer(layer.double()).

    Args:
        layer: the layer, on any device and in any floating-point dtype.
        hidden_size: width of its input; layer.hidden_size when None.
        length: tokens of the sequences that it reads, at least 8.
        tolerance: largest error of a reading as a part of its largest number; by default 1e-9 in float64, 1e-4 in float32.
        seed: of the random inputs.

    Raises:
        AssertionError: a promise that the layer breaks: which, where and by how much.
    """
    _Check(layer, hidden_size, length, tolerance, seed).run()


class _Check:
    def __init__(self, layer: Mixer, hidden_size: int | None, length: int, tolerance: float | None, seed: int) -> None:
        if not isinstance(layer, Mixer):
            raise TypeError(f"layer must be a fastweights.layers.Mixer, got {describe_value(layer)}")
        check_whole_number("length", length, low=8, high=LONGEST)
        check_whole_number("seed", seed)
        if tolerance is not None:
            tolerance = check_positive("tolerance", tolerance)
        width = getattr(layer, "hidden_size", None) if hidden_size is None else hidden_size
        if width is None:
            raise ValueError(f"hidden_size must be given: {type(layer).__name__} has no attribute of this name")
        check_size("hidden_size", width, high=LARGEST_WIDTH)
        self.layer = copy.deepcopy(layer)
        some = next(self.layer.parameters(), torch.zeros(()))
        self.tolerance = TOLERANCES[some.dtype] if tolerance is None else tolerance
        generator = torch.Generator().manual_seed(seed)
        self.x = torch.randn(2, length, width, dtype=torch.float64, generator=generator).to(some)
        self.length = length

    def run(self) -> None:
        self.check_output_and_gradients()
        with torch.no_grad():
            self.whole = self.layer(self.x)
            self.check_causal()
            self.check_batch()
            self.check_cache_tensors()
            self.check_cached()
            self.check_cache_stays()
            self.check_packed()
            self.check_packed_with_cache()
            self.check_bfloat16()

    def assert_same(self, what: str, got: Tensor, wanted: Tensor) -> None:
        """Raise where two readings [B, T, D] differ, and name the first token."""
        assert got.shape == wanted.shape, f"{what} has shape {list(got.shape)}, must be {list(wanted.shape)}"
        assert got.isfinite().all(), f"{what} is not finite"
        error = (got - wanted).abs().amax(-1).double() / wanted.abs().max().clamp_min(1e-30).double()
        if error.max() > self.tolerance:
            row, token = (error > self.tolerance).nonzero()[0].tolist()
            raise AssertionError(
                f"{what} differs: by {error.max():.2g} of the largest number (allowed {self.tolerance:g}), first at token "
                f"{token} of row {row}"
            )

    def check_output_and_gradients(self) -> None:
        x = self.x.clone().requires_grad_()
        self.layer.zero_grad()
        y = self.layer(x)
        assert isinstance(y, Tensor) and y.shape == x.shape, (
            f"the output must be a tensor of the input's shape {list(x.shape)}, got "
            f"{list(y.shape) if isinstance(y, Tensor) else type(y).__name__}"
        )
        assert y.dtype == x.dtype, f"the output must keep the dtype {x.dtype}, got {y.dtype}"
        assert y.isfinite().all(), "the output is not finite"
        (y * torch.linspace(1, 2, y.numel(), dtype=y.dtype, device=y.device).view_as(y)).sum().backward()
        reached = {"the input": x.grad} | {
            f"parameter {name}": parameter.grad
            for name, parameter in self.layer.named_parameters()
            if parameter.requires_grad
        }
        for name, gradient in reached.items():
            assert gradient is not None and (gradient != 0).any(), f"no gradient reaches {name}"
            assert gradient.isfinite().all(), f"the gradient of {name} is not finite"

    def check_causal(self) -> None:
        later, change = self.x.clone(), self.length // 2
        later[:, change:] += 1
        self.assert_same(
            f"the output before a change of token {change} is not causal: it", self.layer(later)[:, :change],
            self.whole[:, :change],
        )  # fmt: skip

    def check_batch(self) -> None:
        for row in range(2):
            self.assert_same(
                "reading a row of a batch alone", self.layer(self.x[row : row + 1]), self.whole[row : row + 1]
            )

    def check_cache_tensors(self) -> None:
        cache, half = LayerCache(), self.length // 2
        self.layer(self.x[:, :half], cache)
        assert cache.memory or cache.context, "the cache is empty after a call: the layer must update it"
        for name, tensor in {**cache.memory, **cache.context}.items():
            assert tensor.ndim and len(tensor) == 2, (
                f"cache tensor {name!r} must have the 2 sequences as its first dimension, got {list(tensor.shape)}"
            )
        for tokens in (half, self.length):
            own = LayerCache()
            self.layer(self.x[:, :tokens], own)
            held, stated = sum(tensor[0].numel() for tensor in own.memory.values()), self.layer.state_size(tokens)
            assert held == stated, (
                f"state_size({tokens}) is {stated}, the cache's memory holds {held} numbers per sequence"
            )

    def check_cached(self) -> None:
        lengths = {"token by token": [1] * self.length, "in pieces": [3, 1, self.length - 4]}
        for how, pieces in lengths.items():
            cache = LayerCache()
            read = torch.cat([self.layer(piece, cache) for piece in self.x.split(pieces, 1)], 1)
            self.assert_same(f"reading with a cache {how}", read, self.whole)

    def check_cache_stays(self) -> None:
        cache, half = LayerCache(), self.length // 2
        self.layer(self.x[:, :half], cache)
        before = {**cache.memory, **cache.context}
        copies = {name: tensor.clone() for name, tensor in before.items()}
        swapped = LayerCache(dict(cache.memory), dict(cache.context))
        self.layer(self.x[:, half:], cache)
        for name, tensor in before.items():
            assert torch.equal(tensor, copies[name]), (
                f"cache tensor {name!r} was written into; replace it by a new tensor"
            )
        swapped.apply(lambda tensor: tensor.flip(0))
        read = self.layer(self.x[:, half:].flip(0), swapped)
        self.assert_same(
            "reading on from a cache with its sequences in another order", read, self.whole[:, half:].flip(0)
        )

    def check_packed(self) -> None:
        row = self.x.flatten(0, 1)[None]
        edges = [0, 5, 5, 6, self.length + 2, 2 * self.length]  # an empty sequence and one of a single token
        packed = self.layer(row, cu_seqlens=torch.tensor(edges, device=row.device))
        alone = [self.layer(row[:, a:b]) for a, b in pairwise(edges) if a < b]
        self.assert_same("reading packed sequences", packed, torch.cat(alone, 1))

    def check_packed_with_cache(self) -> None:
        """A ragged beginning, one token for each sequence, a ragged rest."""
        cache, first, second = LayerCache(), self.length // 2, 3
        x, device = self.x, self.x.device
        ends = self.length, self.length - 2
        begin = self.layer(
            torch.cat([x[:1, :first], x[1:, :second]], 1), cache, torch.tensor([0, first, first + second], device=device)
        )  # fmt: skip
        token = self.layer(torch.stack([x[0, first : first + 1], x[1, second : second + 1]]), cache)
        rest = ends[0] - first - 1
        end = self.layer(
            torch.cat([x[:1, first + 1 : ends[0]], x[1:, second + 1 : ends[1]]], 1), cache,
            torch.tensor([0, rest, rest + ends[1] - second - 1], device=device),
        )  # fmt: skip
        what = "reading packed sequences on from a cache"
        self.assert_same(what, torch.cat([begin[:, :first], token[:1], end[:, :rest]], 1), self.whole[:1, : ends[0]])
        self.assert_same(what, torch.cat([begin[:, first:], token[1:], end[:, rest:]], 1), self.whole[1:, : ends[1]])

    def check_bfloat16(self) -> None:
        low = copy.deepcopy(self.layer).bfloat16()
        cache = LayerCache()
        for y in (low(self.x.bfloat16()), low(self.x[:, :1].bfloat16(), cache), low(self.x[:, 1:].bfloat16(), cache)):
            assert y.dtype == torch.bfloat16, f"a layer in bfloat16 must answer in bfloat16, got {y.dtype}"
            assert y.isfinite().all(), "the output in bfloat16 is not finite"
