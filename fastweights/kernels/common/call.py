"""The class of a family's calls, their sizes, and the launches that several families record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ..runtime.launch_plan import Recorder, Rule, alignment
from ..runtime.workspace import TensorSpec
from .joining import combine_segments, reduce_gate_grads, sum_heads, sum_tiles
from .packing import CHUNK

Specs = Sequence[TensorSpec | None]
SUM_BLOCK = 1024  # numbers that one program sums
MULTIPROCESSORS = 132  # of an H100 or H200


def padded(size: int, least: int = 16) -> int:
    """The power of two that holds a width; products want at least 16."""
    return max(least, 1 << (size - 1).bit_length())


def max_pieces(count: int, time: int, tokens: int, packed: bool, least: int = 0) -> int:
    """How many numbers pieces of so many tokens take, whatever the lengths; exact where nothing is packed. least: pieces of an
    empty row. count: sequences; time: tokens per row."""
    return count + time // tokens if packed else count * torch.sym_max(least, -(-time // tokens))


@lru_cache
def has_large_shared_memory(device: torch.device) -> bool:
    """Whether a program may take 200 KB of shared memory, as on the H100 and later server parts."""
    if device.type != "cuda":  # the interpreter
        return True
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= 200 * 1024


class Call:
    """B rows of T tokens in N sequences (each row one where nothing is packed), H key heads, HV value heads, K and V channels; M
    chunks, or as many numbers as those of packed sequences may take.

    x: the inputs, a named tuple of tensors or placeholders. A family derives a class with the methods shapes(final),
    forward(final) and backward(saved, output_grads, state_grads), of which `make_rule` makes a `Rule`, and may override
    `find_heads` and `set_up`."""

    def __init__(self, x: Any, device: torch.device, options: Any, recorder: Recorder | None = None) -> None:
        self.x, self.device, self.options = x, device, options
        keys, heads = self.find_heads()
        self.recorder = recorder or Recorder()
        self.dtype = keys.dtype
        self.rows = self.B, self.T = keys.shape[:2]
        # Kernels are compiled for heads and their widths: as numbers, where torch.compile(dynamic=True) has symbols.
        self.H, self.K = map(int, keys.shape[2:])
        self.HV, self.V = map(int, heads)
        self.packed = x.cu_seqlens is not None
        self.N = x.cu_seqlens.shape[0] - 1 if self.packed else self.B
        self.M = max_pieces(self.N, self.T, CHUNK, self.packed)
        self.precision = "tf32x3" if self.dtype == torch.float32 else "tf32"
        # By the names that kernels have for them; `set_up` adds those of a family.
        self.constants = {"K": self.K, "PK": padded(self.K), "V": self.V, "PRECISION": self.precision}
        self.set_up()

    def find_heads(self) -> tuple[Any, Sequence[int]]:
        """A tensor that has the key heads, and the numbers HV and V."""
        return self.x.q, self.x.v.shape[2:]

    def set_up(self) -> None:
        """Choose what the launches of the call have in common."""

    @property
    def has_large_shared_memory(self) -> bool:
        return has_large_shared_memory(self.device)

    def forward(self, final: bool) -> tuple[Specs, Any]:
        """Record the launches of a forward; its outputs and what a backward needs."""
        raise NotImplementedError

    def infer(self, final: bool) -> Specs:
        """The outputs of a forward that keeps nothing for a backward; a family may record other launches for it."""
        return self.forward(final)[0]

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """A launch that takes from `self.constants` what the kernel names and the caller does not give."""
        missing = [name for name in kernel.arg_names[len(arguments) :] if name not in constants]
        found = {name: self.constants[name] for name in missing if name in self.constants}
        self.recorder.launch(kernel, grid, *arguments, **found, **constants)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> TensorSpec:
        """A tensor in the dtype of the keys, unless another is given."""
        return TensorSpec(shape, dtype or self.dtype)

    def floats(self, *shape: int) -> TensorSpec:
        """A tensor in float32."""
        return TensorSpec(shape, torch.float32)

    def token_tensor(self, *shape: int, dtype: torch.dtype | None = None) -> TensorSpec:
        """A tensor [B, T, *shape]."""
        return self.empty(*self.rows, *shape, dtype=dtype)

    def state(self, count: int, dtype: torch.dtype = torch.float32) -> TensorSpec:
        """So many states [HV, K, V]."""
        return self.empty(count, self.HV, self.K, self.V, dtype=dtype)

    def group(self, x: Any) -> int:
        """How many value heads one head of x serves."""
        return 1 if x is None else self.HV // x.shape[2]

    def gate_gradient(self, gate: Any) -> TensorSpec | None:
        """The gradient of a gate [B, T, heads] per value head: in float32 where several of these share one gate."""
        if gate is None:
            return None
        return self.token_tensor(self.HV, dtype=gate.dtype if gate.shape[2] == self.HV else torch.float32)

    def join_segments(
        self, added: TensorSpec | None, transitions: Any, begin: Any, tokens: int, back: bool, delta: bool, precision: str,
        tile: Mapping[str, int], starts: TensorSpec | None = None, end: TensorSpec | None = None,
    ) -> None:  # fmt: skip
        """Turn `added` into the state that each segment of so many tokens starts from (back: into the gradient of that at its
        end). tile: its sizes BK and BV, and how the kernel is compiled. delta: whether transitions are matrices. starts: where
        these states go instead. end: see the kernel."""
        V = self.V if added is not None or starts is None else starts.shape[-1]
        starts = added if starts is None else starts
        self.launch(
            combine_segments, (-(-V // tile["BV"]) * self.N, self.HV), begin, added, starts, end, transitions, self.x.cu_seqlens,
            self.T, tokens, self.HV, V=V, DELTA=delta, BACK=back, BEGUN=begin is not None, PRECISION=precision, **tile,
        )  # fmt: skip

    def sum_gates(self, gate_grads: Any, center_grads: Any, found: Specs, chunks: Any) -> None:
        """Fill the gradients of beta, of g and of the centre, `found`, None where one is not wanted, from the partial sums that
        `reduce_gate_grads` takes."""
        parts, *part = (0, 0) if gate_grads is None else gate_grads.shape
        beta, g, center = found
        beta_count, g_count, center_count = (0 if y is None else prod(y.shape) for y in found)
        programs = -(-max(beta_count, g_count) // SUM_BLOCK) + center_count
        self.launch(
            reduce_gate_grads, (programs,), gate_grads, center_grads, *found, chunks, prod(part), beta_count, g_count, self.M,
            center_count, PARTS=parts, HEADS_BETA=self.group(beta), HEADS_G=self.group(g), BETA=beta is not None, G=g is not None,
            CENTER=center is not None, BLOCK=SUM_BLOCK,
        )  # fmt: skip

    def sum_heads(self, gradient: TensorSpec, like: Any) -> TensorSpec:
        """The gradient of an input from that of every value head: those that share a head are summed."""
        group = self.group(like)
        if group == 1:
            return gradient
        out = self.empty(*like.shape, dtype=gradient.dtype)
        count, width = prod(out.shape), out.shape[-1]
        unit = alignment(width)
        self.launch(
            sum_heads, (-(-count // SUM_BLOCK),), gradient, out, count // unit, UNIT=unit, WIDTH=width, GROUP=group,
            BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip
        return out

    def sum_tiles(self, parts: TensorSpec, out: TensorSpec) -> None:
        """A gradient from what the tiles of a head left of it, one after the other in `parts`."""
        count, every = prod(out.shape), prod(parts.shape)
        unit = alignment(out.shape[-1])
        self.launch(
            sum_tiles, (-(-count // SUM_BLOCK),), parts, out, count // unit, every // max(1, count), UNIT=unit, AT_ONCE=4,
            BLOCK=SUM_BLOCK, num_warps=4,
        )  # fmt: skip


def make_rule(call: type[Any]) -> Rule:
    """The rule whose launches the methods of a class derived from `Call` record."""

    def shapes(x: Any, device: torch.device, options: Sequence[Any], final: bool) -> tuple[Specs, Specs]:
        return call(x, device, options).shapes(final)

    def forward(
        recorder: Recorder, x: Any, device: torch.device, options: Sequence[Any], final: bool
    ) -> tuple[Specs, Specs]:
        return call(x, device, options, recorder).forward(final)

    def backward(
        recorder: Recorder, x: Any, device: torch.device, options: Sequence[Any], saved: Any, output_grads: Sequence[Any],
        state_grads: bool,
    ) -> Specs:  # fmt: skip
        return call(x, device, options, recorder).backward(saved, output_grads, state_grads)

    def infer(recorder: Recorder, x: Any, device: torch.device, options: Sequence[Any], final: bool) -> Specs:
        return call(x, device, options, recorder).infer(final)

    return Rule(shapes, forward, backward if hasattr(call, "backward") else None, infer)
