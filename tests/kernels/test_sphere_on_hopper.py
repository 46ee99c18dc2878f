"""Lattice's launches on Hopper GPUs, encode and similarity: what they compute, which calls take them, and their machine code."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.ops import lattice
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .gluon_by_tensors import Pointer, Programs, Shared, load, nothing

GLUON, PLAIN = {"slots_back_in_turn"}, {"turn_slots_back"}


def copy_tile(buffer: Shared, x: Pointer, mask: Any = None) -> None:
    buffer.store(load(x, mask))


def programs() -> Programs:
    found = Programs(4)
    found.language.int32, found.language.SwizzledSharedLayout = torch.int32, nothing
    found.language.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    found.language.broadcast = torch.broadcast_tensors
    found.language.max_contiguous = found.language.multiple_of = lambda x, count: x
    found.known |= {
        "async_copy": types.SimpleNamespace(
            commit_group=nothing, wait_group=nothing, async_copy_global_to_shared=copy_tile
        ),
        "share": lambda x, lane: x[:, lane : lane + 1].expand_as(x),
        "lanes_before": lambda x, by: torch.cat([x[:, :by], x[:, :-by]], 1),
        "inverse_root": lambda x, dtype: x.rsqrt(), "find_edges": lambda edges, n, T: (
            torch.tensor(0), torch.tensor(T), torch.tensor(0)
        ),
    }  # fmt: skip
    return found


class Case:
    """A sequence and a head of two, in float64. b, states and the gradient at the end are any numbers."""

    def __init__(self, time: int, K: int, V: int, objective: str) -> None:
        torch.manual_seed(0)
        self.time, self.objective, self.chunks = time, objective, -(-time // 16)
        self.q, self.k = (torch.randn(time, 2, K, dtype=torch.float64) / 4 for _ in range(2))
        self.v, self.do = (torch.randn(time, 2, V, dtype=torch.float64) / V**0.5 for _ in range(2))
        self.gamma, self.decay = torch.rand(time, 2, dtype=torch.float64), 1 - torch.rand(time, 2, dtype=torch.float64) / 8
        self.b = torch.rand(self.chunks, 2, K, 16, dtype=torch.float64) - 0.5
        self.first = torch.rand(1, 2, K, dtype=torch.float64) + 0.5
        self.states = torch.randn(self.chunks, 2, K, V, dtype=torch.float64) / V**0.5
        self.d_end = torch.randn(2, K, V, dtype=torch.float64)

    def steps(self, head: int, t: int) -> tuple[Tensor, ...]:
        """f, w and what the gradient of b takes of A and of D."""
        b = self.b[t // 16, head, :, t % 16]
        gain = self.gamma[t, head] * (self.first[0, head] if t == 0 else 1)
        d, error = self.decay[t, head], self.k[t, head] - (b if self.objective == "encode" else 0)
        a, across = gain * error, ((self.v[t, head] ** 2).sum() - b * b).clamp(min=0)
        inverse = (d * d + a * a * across).rsqrt()
        f, w = (d - a * b) * inverse, a * inverse
        of_A, of_D = w * (w * b * f - 1), w**3 * b
        if self.objective == "encode":
            of_A = of_A + gain * (inverse * b + across * w * inverse * f)
            of_D = of_D - gain * (inverse - across * w * inverse * w)
        return f, w, of_A, of_D

    def by_tokens(self, head: int, of_outputs: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """A, D, the gradient at every chunk's end, its product with the slots at the start, and the gradient at the start, token
        by token; of the outputs of every chunk alone or of all."""
        K = self.states.shape[2]
        A, D = (torch.zeros(self.chunks, K, 16, dtype=torch.float64) for _ in range(2))
        L, ends, starts = self.d_end[head].clone(), [], []
        for chunk in reversed(range(self.chunks)):
            L = torch.zeros_like(L) if of_outputs else L
            tokens, s = range(16 * chunk, min(16 * chunk + 16, self.time)), [self.states[chunk, head]]
            ends.append(L.clone())
            for t in tokens:
                f, w, _, _ = self.steps(head, t)
                s.append(f[:, None] * s[-1] + torch.outer(w, self.v[t, head]))
            for t in reversed(tokens):
                f, _, of_A, of_D = self.steps(head, t)
                L = L + torch.outer(self.q[t, head], self.do[t, head])
                A[chunk, :, t % 16], D[chunk, :, t % 16] = (L * s[t % 16]).sum(1), L @ self.v[t, head]
                x = 0 * f if of_outputs else of_A * A[chunk, :, t % 16] + of_D * D[chunk, :, t % 16]
                L = f[:, None] * L + torch.outer(x, self.v[t, head])
            starts.append((L * s[0]).sum(1))
            L = L - starts[-1][:, None] * s[0]
        return A, D, torch.stack(ends[::-1]), torch.stack(starts[::-1]), L

    def pairs(self) -> Tensor:
        """As `prepare_turns_back` has them."""
        h = torch.nn.functional.pad(self.v, (0, 0, 0, 0, 0, -self.time % 16)).unflatten(0, (-1, 16)).transpose(1, 2)
        inner = h @ h.mT
        inner[:, :, 0] = inner.diagonal(dim1=2, dim2=3)
        return torch.cat([h @ self.states.mT, inner], -1)


@pytest.mark.parametrize("objective", ["encode", "similarity"])
@pytest.mark.parametrize(("time", "K", "V"), [(55, 64, 64), (32, 64, 128), (7, 32, 64)])
def test_gradients_in_slots_are_those_of_the_tokens(objective: str, time: int, K: int, V: int) -> None:
    from fastweights.kernels.sphere.turns_back_on_hopper import slots_back_in_turn

    case = Case(time, K, V, objective)
    own = [case.by_tokens(head, True) for head in range(2)]
    A, D, at_start = (torch.stack([one[i] for one in own], 1).float() for i in (0, 1, 3))
    adjoints, start = torch.empty(case.chunks, 2, K, V), torch.empty(1, 2, K, V)
    given = (case.q, case.k, case.v, case.gamma, case.decay, case.do, case.d_end, case.b, case.first)
    programs().run(
        slots_back_in_turn, (1, 2, K // 32), *(x.float() for x in given), A, D, case.pairs().float(), at_start,
        case.states.float(), adjoints, start, None, time, 2, K, V, objective, 1, 1, 1,
    )  # fmt: skip
    for head in range(2):
        wanted_A, wanted_D, ends, _, wanted_start = case.by_tokens(head, False)
        A[-1, head, :, (time - 1) % 16 + 1 :] = D[-1, head, :, (time - 1) % 16 + 1 :] = 0  # nobody reads them
        got = (A[:, head], D[:, head], adjoints[:, head], start[0, head])
        for found, wanted in zip(got, (wanted_A, wanted_D, ends, wanted_start)):
            torch.testing.assert_close(found, wanted.float(), rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
