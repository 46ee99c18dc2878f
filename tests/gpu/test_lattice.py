"""Lattice on a CUDA device over many tokens, and where its steps have nothing to divide by."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.availability import HAS_TRITON
from fastweights.ops import lattice

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not HAS_TRITON, reason="needs an NVIDIA GPU and triton"),
    pytest.mark.parametrize("objective", ["decode", "encode", "similarity"]),
]


def draw(time: int, width: int) -> list[Tensor]:
    """q, k, v, gamma and decay in bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    drawn = [torch.randn(1, time, 2, width, device="cuda", generator=generator) for _ in range(3)]
    gates = [torch.rand(1, time, 2, device="cuda", generator=generator) for _ in range(2)]
    return [
        x.bfloat16() for x in (*(F.normalize(x, dim=-1) for x in drawn[:2]), drawn[2], gates[0], 0.9 + gates[1] / 10)
    ]


@pytest.mark.parametrize("width", [64, 128])
def test_slots_keep_their_length_over_65536_tokens(objective: str, width: int) -> None:
    q, k, v, gamma, decay = draw(65536, width)
    o, S = lattice(q, k, v, gamma, decay=decay, objective=objective, output_final_state=True, backend="triton")
    assert o.isfinite().all()
    assert (S.norm(dim=-1) - 1).abs().max() <= 1e-3


def test_no_nan_where_nothing_is_written_or_a_value_is_a_slot(objective: str) -> None:
    q, k, v, gamma, decay = draw(80, 64)
    v[:, 3], k[:, 5], gamma[:, 9] = 0, 0, 0
    v[:, 20:40] = torch.eye(64, device="cuda")[1]
    inputs = [x.requires_grad_() for x in (q, k, v, gamma, decay)]
    o, S = lattice(*inputs[:4], decay=decay, objective=objective, output_final_state=True, backend="triton")
    assert o.isfinite().all() and S.isfinite().all()
    assert all(x.isfinite().all() for x in torch.autograd.grad(o.float().sum() + S.sum(), inputs))
