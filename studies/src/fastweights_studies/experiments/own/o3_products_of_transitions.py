"""own-3: how far products of transitions grow, and which bound keeps training safe."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.data import make_task
from fastweights.layers import MixerChoice, RecursiveLeastSquares
from fastweights.ops import precondition_keys

from ...inspection.reading import LayerReading, read_layers
from ...inspection.transitions import transitions
from ..claim import OWN, Claim, Conditions, Measurement, Verdict
from ..draws import RIDGE, Draws
from ..products import log_norms, penalties, penalty_bound, preconditioner_bound
from ..trained import train_parts, trained_model

CHANNELS, LENGTH, STARTS, ASCENT, RATE = 8, 64, 4, 100, 0.05
PERIODS = 8  # times that the chosen stream is read in a row
RANDOM_LENGTH = 512
DECAYS, BOUNDS, CENTER = (0.5, 0.9, 0.99, 1.0), (1.5, 2.0), -0.2
REFRESH, REFRESH_EVERY = 1e-3, 20
PAIRS, SEQUENCES = 16, 8
TRAINED: dict[str, Any] = {
    "task": "mqar-shuffled", "pairs": (PAIRS,), "vocab_size": 64, "width": 32, "heads": 2, "layers": 1, "steps": 300,
    "learning_rates": (1e-2,), "test_examples": 256, "evaluations": 1, "save_models": True,
    "mixers": ("deltanet", "pdn", MixerChoice("pdn", {"tie_preconditioner": True}, "pdn tied"), "pgdn", "rls", "vla-conv"),
}  # fmt: skip

Stream = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # keys to write keys, read keys and the bound's logarithms


def preconditioned(decay: float, bound: float) -> Stream:
    """Preconditioned DeltaNet with gain 1."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = F.normalize(raw, dim=-1)
        ones = torch.ones_like(k[..., :1])
        w, _ = precondition_keys(k[:, :, None], math.log(decay) * ones, ones, CENTER, bound=bound, backend="torch")
        w = w[:, :, 0]
        return w, k, preconditioner_bound((w / k).detach(), k.detach(), ones[..., 0])

    return stream


def two_sided(decay: float, bound: float) -> Stream:
    """The same preconditioner shared by both sides: written and read with D^(1/2) k. Its products never grow: the bound is 0."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, k, _ = preconditioned(decay, bound)(raw)
        root = (w / k).sqrt() * k
        return root, root, torch.zeros_like(k[..., 0])

    return stream


def variational(refresh: float) -> Stream:
    """Variational linear attention with free penalty directions of length K^-1/2: raw holds keys and directions."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, u = (F.normalize(x, dim=-1) for x in raw.chunk(2, -1))
        u = u * u.shape[-1] ** -0.5
        A, growth = penalties(u, RIDGE, refresh, REFRESH_EVERY)
        alpha = F.normalize((A @ k[..., None]).squeeze(-1), dim=-1)
        return alpha, k, penalty_bound(A.detach(), growth.detach(), RIDGE)

    return stream


def exact(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Recursive least squares: the product of its steps is ridge P_T, at most 1."""
    k = F.normalize(raw, dim=-1)
    P, _ = penalties(k, RIDGE)
    return (P @ k[..., None]).squeeze(-1), k, torch.zeros_like(k[..., 0])


STREAMS: dict[str, tuple[Stream, int]] = {
    **{f"pdn, decay {a}, x = {x}": (preconditioned(a, x), 1) for x in BOUNDS for a in DECAYS},
    "two-sided, decay 0.9, x = 2.0": (two_sided(0.9, 2.0), 1),
    "vla without refresh": (variational(0.0), 2),
    "vla with refresh": (variational(REFRESH), 2),
    "rls": (exact, 1),
}  # with the number of vectors per token


def chosen(stream: Stream, draws: Draws, vectors: int) -> Tensor:
    """Streams that gradient ascent on the last log norm has found, from random ones, [STARTS, LENGTH, vectors K]."""
    raw = draws.normal(STARTS, LENGTH, vectors * CHANNELS).requires_grad_()
    optimizer = torch.optim.Adam([raw], lr=RATE)
    for _ in range(ASCENT):
        write, read, _ = stream(raw)
        loss = -log_norms(write, read)[:, -1].sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return raw.detach()


def of_streams(seed: int, device: str) -> dict[str, float]:
    """Random and chosen streams of every rule."""
    draws = Draws(seed, device)
    found = {}
    for name, (stream, vectors) in STREAMS.items():
        random = draws.normal(STARTS, RANDOM_LENGTH, vectors * CHANNELS)
        repeated = chosen(stream, draws, vectors).repeat(1, PERIODS, 1)
        excess = []
        for label, raw in (("random", random), ("chosen", repeated)):
            write, read, bound = stream(raw)
            norms = log_norms(write, read)
            excess.append((norms - bound).max().item())
            found[f"{name}: largest log norm of {label} products"] = norms.max().item()
            if label == "chosen":
                best = norms[:, -1].argmax()
                half = LENGTH * PERIODS // 2
                found[f"{name}: growth per step of chosen products"] = slope(norms[best], half)
                found[f"{name}: bound on it"] = slope(bound[best], half)
                for period in range(1, PERIODS + 1):
                    found[f"{name}: log norm after {period * LENGTH} chosen steps"] = norms[
                        best, period * LENGTH - 1
                    ].item()
                    found[f"{name}: bound after {period * LENGTH} chosen steps"] = bound[
                        best, period * LENGTH - 1
                    ].item()
        found[f"{name}: largest log norm over its bound"] = max(excess)
    return found


def slope(logs: Tensor, start: int) -> float:
    """Growth per step from the step `start` to the end."""
    return ((logs[-1] - logs[start - 1]) / (len(logs) - start)).item()


def of_layer(layer: LayerReading) -> tuple[Tensor, Tensor]:
    """Log norms of the products in a trained layer and their bounds, [heads, T]."""
    found = transitions(layer)
    assert found is not None and found.write is not None and found.read is not None
    write, read, decay = (x.transpose(0, 1) for x in (found.write, found.read, found.decay))
    norms = log_norms(write, read, decay)
    if "penalty_direction" in layer.values:
        A, u = layer.states["A"].transpose(0, 1), layer.per_head("penalty_direction").transpose(0, 1)
        ridge = layer.mixer.options.ridge
        before = torch.cat([torch.eye(A.shape[-1], dtype=A.dtype).expand_as(A[:, :1]) / ridge, A[:, :-1]], 1)
        return norms, penalty_bound(A, torch.einsum("htk,htkj,htj->ht", u, before, u), ridge)
    if isinstance(layer.mixer, RecursiveLeastSquares):
        return norms, torch.zeros_like(norms)
    beta = layer.per_head("beta").transpose(0, 1)
    return norms, preconditioner_bound(write / (beta[..., None] * read), read, beta, decay)


def of_models(conditions: Conditions) -> dict[str, list[float]]:
    """The products in layers that have learnt to recall."""
    values: dict[str, list[float]] = {}
    for result in train_parts("own-3", {"": TRAINED}, conditions)[""]:
        model = trained_model("own-3", "", TRAINED, result, conditions)
        task = make_task(TRAINED["task"], pairs=PAIRS, vocab_size=TRAINED["vocab_size"])
        rows = task.batch("test", seed=result.run["seed"], index=0, batch_size=SEQUENCES).input_ids.to(
            conditions.device
        )
        found = [of_layer(layer) for ids in rows for layer in read_layers(model, ids, every=1)]
        norms, bounds = (torch.cat(column) for column in zip(*found))
        name = f"trained {result.mixer}"
        for label, value in (
            ("accuracy", result.counted_value),
            ("largest log norm", norms.max().item()),
            ("mean log norm after the sequence", norms[:, -1].mean().item()),
            ("mean bound after the sequence", bounds[:, -1].mean().item()),
            ("largest log norm over its bound", (norms - bounds).max().item()),
        ):
            values.setdefault(f"{name}: {label}", []).append(value)
    return values


def measure(conditions: Conditions) -> Measurement:
    rows = [of_streams(seed, conditions.device) for seed in conditions.seeds]
    return Measurement({**{name: [row[name] for row in rows] for name in rows[0]}, **of_models(conditions)})


def decide(found: Measurement) -> Verdict:
    excess = max(found.largest(name) for name in found.values if name.endswith("largest log norm over its bound"))
    grown = {name: found.largest(f"{name}: growth per step of chosen products") for name in STREAMS}
    forgets = max(grown[name] for name in STREAMS if name.startswith("pdn") and "decay 1.0" not in name)
    keeps = max(
        found.largest(f"pdn, decay 1.0, x = {x}: largest log norm of chosen products") / math.log(x) for x in BOUNDS
    )
    learnt = max(found.largest(name) for name in found.values if name.endswith(": largest log norm"))
    reason = (
        f"largest log norm over its bound {excess:.1e}; chosen products of PDN grow by up to {math.expm1(forgets):.1%} per step "
        f"where the preconditioner forgets, to x^{keeps:.1f} in all where it does not (bound x^{CHANNELS + 1}); VLA by "
        f"{math.expm1(grown['vla without refresh']):.2%} per step, with refresh {math.expm1(grown['vla with refresh']):.2%}; in "
        f"trained layers norms reach {math.exp(learnt):.2f}"
    )
    bounded = excess <= 1e-9 and keeps <= CHANNELS + 1
    if not bounded:
        return Verdict("does not hold", reason)
    return Verdict(
        "holds" if forgets > 0.01 and max(grown["vla without refresh"], grown["rls"]) < 1e-3 else "holds weakly", reason
    )


CLAIM = Claim(
    name="own-3",
    paper=OWN,
    source="C4 and C16, whose eigenvalues and norms of single steps do not decide what products do",
    says=(
        "Products of PDN's steps grow only as fast as the preconditioner changes, so without limit if it forgets and at most to "
        "x^(K+1) if not; VLA's cannot grow exponentially without its refresh; those of exact recursive least squares never grow."
    ),
    printed="PDN: eigenvalues of a step within 1; VLA: norm of a step exactly 1 (false, C16)",
    setting=(
        f"float64, K = {CHANNELS}, gain 1: {STARTS} random streams of {RANDOM_LENGTH} tokens, and {STARTS} of {LENGTH} tokens "
        f"found by {ASCENT} steps of gradient ascent on the last log norm, read {PERIODS} times in a row; factors of "
        "precondition_keys with decays 0.5 to 1 and x = 1.5 and 2, free penalty directions of length K^-1/2 with ridge 0.1, "
        "refresh 0 or 1e-3 every 20 tokens; and layers trained for 300 steps on shuffled recall of 16 pairs."
    ),
    expected="holds",
    forecast=(
        "chosen products of PDN grow by 2% to 5% per step at decay 0.9 and x = 1.5, by less at 0.99, not at 1; VLA's reach "
        "a factor of 3 and stop; in trained layers no norm above 1.5"
    ),
    rule=(
        "holds if no norm exceeds its bound by 1e-9 in logarithms, some chosen stream of PDN with a decay below 1 grows by "
        "more than 1% per step, and chosen streams of VLA without refresh and of rls grow by less than 0.1% per step; weakly "
        "if only the bounds hold."
    ),
    measure=measure,
    decide=decide,
    seeds=(0, 1, 2),
    cost="10 minutes of one core",
)
