"""The variance of what a memory answers, of ops on random streams and of the layers of trained models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fastweights.layers import PalimpsaD, RecursiveLeastSquares, probe
from fastweights.layers.mixer import Mixer
from fastweights.ops import palimpsa_posterior
from fastweights.ops.shared.inverse_gram import apply_inverse_gram

__all__ = ["diagonal_variance", "exact_variance", "layer_variances", "lookup_in_place_of_memory"]


def exact_variance(q: Tensor, k: Tensor, beta: Tensor, ridge: float) -> Tensor:
    """q_t^T P_(t-1) q_t with P = (ridge I + sum beta k k^T)^-1, before the token's own write. q, k [B, T, H, K], beta [B, T, H]:
    [B, T, H]."""
    following = torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], 1).double()
    u = k.double() * beta.double().sqrt()[..., None]
    y, _ = apply_inverse_gram(
        u, following, ridge=ridge, initial_state=None, heads=k.shape[2], dtype=torch.float64, final=False, cu_seqlens=None,
        backend="torch",
    )  # fmt: skip
    first = q[:, :1].double().square().sum(-1) / ridge
    return torch.cat([first, (following * y).sum(-1)[:, :-1]], 1)


def diagonal_variance(q: Tensor, k: Tensor, beta: Tensor, g: Tensor, prior: float) -> Tensor:
    """Palimpsa's (1 / (J_(t-1) + prior))^T q_t^2, before the token's own write: [B, T, H, V]. beta [B, T, H, V], g [B, T, H]."""
    following = torch.cat([q[:, 1:], torch.zeros_like(q[:, :1])], 1).double()
    beta = beta.double()
    _, variance, _ = palimpsa_posterior(
        following, k.double(), torch.zeros_like(beta), beta, g.double(), prior=prior, scale=1.0, backend="torch"
    )
    first = (q[:, :1].double().square().sum(-1) / prior)[..., None].expand(-1, -1, -1, beta.shape[-1])
    return torch.cat([first, variance[:, :-1]], 1)


def layer_variances(model: Any, ids_BT: Tensor) -> Tensor:
    """Of every head of every layer of `rls` or `palimpsa-d`, the mean over value channels: [B, T, layers * heads]."""
    layers = _layers(model)
    shown = {name for layer in layers for name in layer.probe_names()}
    with torch.no_grad(), probe(model, *sorted(shown & {"q", "k", "g", "beta", "importance"})) as seen:
        model(ids_BT)
    found = []
    for index, layer in enumerate(layers):
        q, k = seen["q"][index], seen["k"][index]
        if isinstance(layer, RecursiveLeastSquares):
            found.append(exact_variance(q, k, seen["beta"][index], layer.options.ridge))
        elif isinstance(layer, PalimpsaD):
            given = (seen["importance"][index], seen["g"][index])
            found.append(diagonal_variance(q, k, *given, layer.options.prior).mean(-1))
    return torch.cat(found, 2)


@contextmanager
def lookup_in_place_of_memory(model: Any, routed_BT: Tensor, sharpness: float | Tensor) -> Iterator[None]:
    """Within the block the memory of every layer is replaced at the routed tokens by softmax attention over the layer's own keys
    and values of the tokens before, with logits sharpness q.k. The layers' other weights stay as they are. Gradients flow through
    the attention."""
    layers = _layers(model)
    with probe(model, "q", "k", "v", detach=False) as seen:
        for index, layer in enumerate(layers):
            layer.__dict__["read_out"] = _read_out(layer, index, seen, routed_BT, sharpness)
        try:
            yield
        finally:
            for layer in layers:
                del layer.__dict__["read_out"]


def _read_out(layer: Any, index: int, seen: Any, routed_BT: Tensor, sharpness: float | Tensor) -> Callable[..., Tensor]:
    plain = layer.read_out

    def read_out(o_BTGV: Tensor, v_BTGV: Tensor, x_BTD: Tensor) -> Tensor:
        q, k, v = (seen[name][index] for name in ("q", "k", "v"))
        looked_up = _lookup(q, k, v, sharpness)
        return plain(torch.where(routed_BT[..., None, None], looked_up.to(o_BTGV.dtype), o_BTGV), v_BTGV, x_BTD)

    return read_out


def _lookup(q_BTHK: Tensor, k_BTHK: Tensor, v_BTHV: Tensor, sharpness: float | Tensor) -> Tensor:
    """The values of the tokens before, by the softmax of sharpness q.k; 0 at the first token."""
    scores = sharpness * torch.einsum("bthk,bshk->bhts", q_BTHK, k_BTHK)
    before = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril(-1)
    weights = scores.masked_fill(~before, -torch.inf).softmax(-1).nan_to_num()
    return torch.einsum("bhts,bshv->bthv", weights, v_BTHV)


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, Mixer)]
