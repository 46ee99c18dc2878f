"""Calls of flash-linear-attention's chunk_gated_delta_rule and chunk_kda, and what the recurrence says that they compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

GDR, KDA = "chunk_gated_delta_rule", "chunk_kda"
PACKAGES = {GDR: "fla.ops.gated_delta_rule", KDA: "fla.ops.kda"}
T, HEADS, VALUE_HEADS, K, V = 100, 2, 4, 16, 32
ENDS = [0, 70, 71, T]
Options = dict[str, Any]


def tensors(name: str, options: Options) -> dict[str, Tensor]:
    """The tensors of a call in float32. An option whose value is `...` stands for a tensor of its own."""
    torch.manual_seed(0)
    batch, count = (1, len(ENDS) - 1) if "cu_seqlens" in options else (2, 2)
    gate = (batch, T, VALUE_HEADS, *((K,) if name == KDA else ()))
    found = {
        "q": torch.randn(batch, T, HEADS, K),
        "k": F.normalize(torch.randn(batch, T, HEADS, K), dim=-1),
        "v": torch.randn(batch, T, VALUE_HEADS, V),
        "g": torch.randn(gate) if "use_gate_in_kernel" in options else -0.2 * torch.rand(gate),
        "beta": torch.randn(gate[:3]) if "use_beta_sigmoid_in_kernel" in options else torch.rand(gate[:3]),
        "initial_state": torch.randn(count, VALUE_HEADS, *((V, K) if options.get("state_v_first") else (K, V))),
        "A_log": torch.randn(VALUE_HEADS),
        "dt_bias": torch.randn(gate[2:]).flatten(),
    }
    return {key: x for key, x in found.items() if key in ("q", "k", "v", "g", "beta") or key in options}


def wanted(x: dict[str, Tensor], options: Options) -> tuple[Tensor, Tensor]:
    """Outputs and final states by the recurrence S = a S + beta k (v - (a S)^T k)^T, in the dtype of the tensors."""
    q, k, v, g, beta, state = (x.get(name) for name in ("q", "k", "v", "g", "beta", "initial_state"))
    if options.get("use_qk_l2norm_in_kernel"):
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
    if options.get("use_gate_in_kernel"):
        g = g + x["dt_bias"].view(g.shape[2:]) if "dt_bias" in x else g
        rate = x["A_log"].exp().view(-1, *[1] * (g.ndim - 3)) if "A_log" in x else 1.0
        bound = options.get("lower_bound")
        g = -rate * (1 + g.exp()).log() if bound is None else bound / (1 + (-rate * g).exp())
    if options.get("use_beta_sigmoid_in_kernel"):
        beta = (2 if options.get("allow_neg_eigval") else 1) / (1 + (-beta).exp())
    if state is not None and options.get("state_v_first"):
        state = state.transpose(2, 3)
    q, k = (y.repeat_interleave(VALUE_HEADS // HEADS, 2) for y in (q, k))
    q = q * options.get("scale", K**-0.5)
    g = g if g.ndim == 4 else g[..., None]
    rows = [(row, 0, T) for row in range(len(q))]
    if "cu_seqlens" in options:
        rows = [(0, begin, end) for begin, end in zip(ENDS, ENDS[1:])]
    outputs, states = [], []
    for n, (row, begin, end) in enumerate(rows):
        S = q.new_zeros(VALUE_HEADS, K, V) if state is None else state[n]
        for t in range(begin, end):
            S = g[row, t].exp()[..., None] * S
            error = v[row, t] - (S * k[row, t][..., None]).sum(1)
            S = S + beta[row, t][:, None, None] * k[row, t][..., None] * error[:, None]
            outputs.append((S * q[row, t][..., None]).sum(1))
        states.append(S)
    final = torch.stack(states)
    o = torch.stack(outputs).view(-1, T, VALUE_HEADS, V)
    return o, final.transpose(2, 3) if options.get("state_v_first") else final


def results(compute: Callable, x: dict[str, Tensor]) -> dict[str, Tensor]:
    """Outputs, final states, and the gradients of a sum of both with given weights."""
    x = {name: y.detach().requires_grad_() for name, y in x.items()}
    o, final = compute(x)
    towards = sum((y * torch.linspace(-9, 9, y.numel(), device=y.device).sin().view_as(y)).sum() for y in (o, final))
    gradients = torch.autograd.grad(towards, list(x.values()))
    return {"o": o.detach(), "final state": final.detach(), **dict(zip(x, gradients))}


LAYER = {
    "use_gate_in_kernel": True, "A_log": ..., "dt_bias": ..., "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True, "state_v_first": True, "initial_state": ...,
}  # fmt: skip
CASES: dict[str, Options] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "first state": {"initial_state": ...},
    "v first": {"initial_state": ..., "state_v_first": True},
    "packed": {"cu_seqlens": ..., "initial_state": ...},
    "unit keys": {"use_qk_l2norm_in_kernel": True},
    "logits of beta": {"use_beta_sigmoid_in_kernel": True},
    "beta up to 2": {"use_beta_sigmoid_in_kernel": True, "allow_neg_eigval": True},
    "gate": {"use_gate_in_kernel": True, "A_log": ..., "dt_bias": ...},
    "gate without bias": {"use_gate_in_kernel": True, "A_log": ...},
    "as a layer calls it": {**LAYER, "cu_seqlens": ...},
    "hints": {"cu_seqlens": ..., "cu_seqlens_cpu": torch.tensor(ENDS)},
}
OF_KDA: dict[str, Options] = {
    "lower bound": {"use_gate_in_kernel": True, "A_log": ..., "dt_bias": ..., "lower_bound": -6.0},
    "lower bound without A_log": {"use_gate_in_kernel": True, "dt_bias": ..., "lower_bound": -5.0},
    "safe gate": {"use_gate_in_kernel": True, "A_log": ..., "safe_gate": True, "lower_bound": -5.0},
    "safe gate before": {"safe_gate": True, "disable_recompute": True, "max_num_seqs": 3},
}
ALL = [(name, case) for name in (GDR, KDA) for case in CASES] + [(KDA, case) for case in OF_KDA]
CASES |= OF_KDA


def plain(options: Options) -> Options:
    """The options of a case that are not tensors with gradients."""
    found = {name: value for name, value in options.items() if value is not ...}
    return {**found, **({"cu_seqlens": torch.tensor(ENDS)} if "cu_seqlens" in options else {})}
