"""Five stacked layers of Gated KalmaNet, as in the paper's figure 1e: what an iteration in place of the exact solution does to
the gradients of each layer's weights."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import Tensor

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

LAYERS = 5


def gradients(
    solver: str, device: str, autocast: torch.dtype | None, head_dim: int, batch: int, length: int
) -> list[Tensor]:
    """Of the weights of each layer, the first one first."""
    torch.manual_seed(0)
    mixer = {"name": "gka", "solver": solver, "long_memory": "own"}  # the presets' first decays
    config = FastWeightsConfig(
        vocab_size=64, hidden_size=2 * head_dim, num_hidden_layers=LAYERS, num_heads=2, mixer=mixer
    )
    model = FastWeightsForCausalLM(config).to(device).train()
    tokens = torch.randint(64, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)
    with nullcontext() if autocast is None else torch.autocast(device, dtype=autocast):
        model(input_ids=tokens, labels=tokens).loss.backward()
    return [torch.cat([p.grad.flatten() for p in layer.parameters()]) for layer in model.model.layers]


def differences(device: str, autocast: torch.dtype | None, **sizes: int) -> list[float]:
    """Of Chebyshev's gradients from those of the exact solver, relative, of each layer."""
    found, exact = (gradients(solver, device, autocast, **sizes) for solver in ("chebyshev", "exact"))
    return [float((x - y).norm() / y.norm()) for x, y in zip(found, exact)]
