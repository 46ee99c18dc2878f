"""own-3: how far products of transitions grow, and which bound keeps training safe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.data import make_task
from fastweights.layers import MixerChoice, RecursiveLeastSquares
from fastweights.ops import precondition_keys

from ..claims.claim import OWN, Claim
from ..claims.conditions import Conditions
from ..claims.draws import RIDGE, Draws
from ..claims.measurement import Measurement, Number, measure_by_seed
from ..claims.trained import mixer_fields, train_parts, trained_model
from ..claims.verdict import Verdict
from ..claims.words import Quantity, Words
from ..inspection.reading import LayerReading, read_layers
from ..inspection.transitions import transitions
from .products import log_norms, penalties, penalty_bound, preconditioner_bound

CHANNELS, LENGTH, STARTS, ASCENT, RATE = 8, 64, 4, 100, 0.05
PERIODS = 8  # times that the chosen stream is read in a row
RANDOM_LENGTH = 512
DECAYS, BOUNDS, CENTER = (0.5, 0.9, 0.99, 1.0), (1.5, 2.0), -0.2
REFRESH, REFRESH_EVERY = 1e-3, 20
PAIRS, SEQUENCES = 16, 8
TRAINED: dict[str, Any] = {
    "task": "mqar-shuffled",
    "pairs": (PAIRS,),
    "vocab_size": 64,
    "width": 32,
    "heads": 2,
    "layers": 1,
    "steps": 300,
    "learning_rates": (1e-2,),
    "test_examples": 256,
    "evaluations": 1,
    "save_models": True,
    "mixers": (
        MixerChoice("deltanet"),
        MixerChoice("pdn"),
        MixerChoice("pdn", {"tie_preconditioner": True}, "pdn tied"),
        MixerChoice("pgdn"),
        MixerChoice("rls"),
        MixerChoice("vla-conv"),
    ),
}

Stream = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]  # keys to write keys, read keys and the bound's logarithms


def precondition(decay: float, bound: float) -> Stream:
    """Preconditioned DeltaNet with gain 1."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k = F.normalize(raw, dim=-1)
        ones = torch.ones_like(k[..., :1])
        w, _ = precondition_keys(k[:, :, None], math.log(decay) * ones, ones, CENTER, bound=bound, backend="torch")
        w = w[:, :, 0]
        return w, k, preconditioner_bound((w / k).detach(), k.detach(), ones[..., 0])

    return stream


def precondition_both_sides(decay: float, bound: float) -> Stream:
    """The same preconditioner shared by both sides: written and read with D^(1/2) k. Its products never grow: the bound is 0."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        w, k, _ = precondition(decay, bound)(raw)
        root = (w / k).sqrt() * k
        return root, root, torch.zeros_like(k[..., 0])

    return stream


def penalize(refresh: float) -> Stream:
    """Variational linear attention with free penalty directions of length K^-1/2: raw holds keys and directions."""

    def stream(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, u = (F.normalize(x, dim=-1) for x in raw.chunk(2, -1))
        u = u * u.shape[-1] ** -0.5
        A, growth = penalties(u, RIDGE, refresh, REFRESH_EVERY)
        alpha = F.normalize((A @ k[..., None]).squeeze(-1), dim=-1)
        return alpha, k, penalty_bound(A.detach(), growth.detach(), RIDGE)

    return stream


def regress(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Recursive least squares: the product of its steps is ridge P_T, at most 1."""
    k = F.normalize(raw, dim=-1)
    P, _ = penalties(k, RIDGE)
    return (P @ k[..., None]).squeeze(-1), k, torch.zeros_like(k[..., 0])


class Rule(NamedTuple):
    """A rule whose steps are multiplied: its streams, with this many vectors per token, and the fields of its numbers."""

    stream: Stream
    vectors: int
    mixer: str
    column: Mapping[str, Any]


RULES = (
    *(
        Rule(precondition(decay, x), 1, "pdn", {"rule": "pdn", "decay": decay, "bound": x})
        for x in BOUNDS
        for decay in DECAYS
    ),
    Rule(precondition_both_sides(0.9, 2.0), 1, "pdn", {"rule": "two_sided", "decay": 0.9, "bound": 2.0}),
    Rule(penalize(0.0), 2, "vla", {"rule": "vla_without_refresh"}),
    Rule(penalize(REFRESH), 2, "vla", {"rule": "vla_with_refresh"}),
    Rule(regress, 1, "rls", {"rule": "rls"}),
)


WORDS = Words(
    subject="{rule}, decay {decay}, x = {bound}",
    terms={
        "rule": {
            "two_sided": "two-sided",
            "vla_without_refresh": "vla without refresh",
            "vla_with_refresh": "vla with refresh",
        }
    },
    choices=TRAINED["mixers"],
)


def choose_streams(stream: Stream, draws: Draws, vectors: int) -> Tensor:
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


def measure_streams(seed: int, device: str) -> Iterator[Number]:
    """Random and chosen streams of every rule."""
    draws = Draws(seed, device)
    for rule in RULES:
        random = draws.normal(STARTS, RANDOM_LENGTH, rule.vectors * CHANNELS)
        repeated = choose_streams(rule.stream, draws, rule.vectors).repeat(1, PERIODS, 1)
        (random_norms, random_bound), (norms, bound) = (multiply(rule.stream, raw) for raw in (random, repeated))
        numbers = {"random_log_norm": random_norms.max(), "chosen_log_norm": norms.max()}
        best = norms[:, -1].argmax()
        half = LENGTH * PERIODS // 2
        numbers |= {"growth": find_slope(norms[best], half), "growth_bound": find_slope(bound[best], half)}
        for measure, value in numbers.items():
            yield Number(measure, value.item(), rule.column, mixer=rule.mixer)
        for steps in range(LENGTH, PERIODS * LENGTH + 1, LENGTH):
            column = {**rule.column, "steps": steps}
            yield Number("log_norm_after", norms[best, steps - 1].item(), column, mixer=rule.mixer)
            yield Number("bound_after", bound[best, steps - 1].item(), column, mixer=rule.mixer)
        excess = max((random_norms - random_bound).max().item(), (norms - bound).max().item())
        yield Number("excess", excess, rule.column, mixer=rule.mixer)


def multiply(stream: Stream, raw: Tensor) -> tuple[Tensor, Tensor]:
    """Log norms of the products of a stream's steps, and their bounds."""
    write, read, bound = stream(raw)
    return log_norms(write, read), bound


def find_slope(logs: Tensor, start: int) -> Tensor:
    """Growth per step from the step `start` to the end."""
    return (logs[-1] - logs[start - 1]) / (len(logs) - start)


def multiply_in_layer(layer: LayerReading) -> tuple[Tensor, Tensor]:
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


def measure_models(conditions: Conditions) -> Iterator[Number]:
    """The products in layers that have learnt to recall."""
    for result in train_parts("own-3", {"": TRAINED}, conditions)[""]:
        model = trained_model("own-3", "", TRAINED, result, conditions)
        task = make_task(TRAINED["task"], pairs=PAIRS, vocab_size=TRAINED["vocab_size"])
        batch = task.batch("test", seed=result.run["seed"], index=0, batch_size=SEQUENCES)
        rows = batch.input_ids.to(conditions.device)
        found = [multiply_in_layer(layer) for ids in rows for layer in read_layers(model, ids, every=1)]
        norms, bounds = (torch.cat(column) for column in zip(*found))
        for measure, value in (
            ("trained_accuracy", result.counted_value),
            ("trained_log_norm", norms.max().item()),
            ("trained_last_log_norm", norms[:, -1].mean().item()),
            ("trained_last_bound", bounds[:, -1].mean().item()),
            ("trained_excess", (norms - bounds).max().item()),
        ):
            yield Number(measure, value, **mixer_fields(result), seed=result.run["seed"])


def measure(conditions: Conditions) -> Measurement:
    of_streams = measure_by_seed(measure_streams)(conditions)
    return Measurement((*of_streams.numbers, *measure_models(conditions)))


def decide(found: Measurement) -> Verdict:
    excess = max(found.largest("excess"), found.largest("trained_excess"))
    vla, refreshed, exact = (
        found.largest("growth", rule=rule) for rule in ("vla_without_refresh", "vla_with_refresh", "rls")
    )
    forgets = max(found.largest("growth", rule="pdn", decay=decay) for decay in DECAYS if decay < 1)
    keeps = max(found.largest("chosen_log_norm", rule="pdn", decay=1.0, bound=x) / math.log(x) for x in BOUNDS)
    statements = (
        f"largest log norm over its bound {excess:.1e}",
        f"chosen products of PDN grow by up to {math.expm1(forgets):.1%} per step where the preconditioner forgets, to "
        f"x^{keeps:.1f} in all where it does not (bound x^{CHANNELS + 1}); VLA by {math.expm1(vla):.2%} per step, with refresh "
        f"{math.expm1(refreshed):.2%}",
        f"in trained layers norms reach {math.exp(found.largest('trained_log_norm')):.2f}",
    )
    bounded = excess <= 1e-9 and keeps <= CHANNELS + 1
    if not bounded:
        return Verdict("does not hold", statements)
    return Verdict("holds" if forgets > 0.01 and max(vla, exact) < 1e-3 else "holds weakly", statements)


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
    numbers={
        "random_log_norm": Quantity("{subject}: largest log norm of random products"),
        "chosen_log_norm": Quantity("{subject}: largest log norm of chosen products"),
        "growth": Quantity("{subject}: growth per step of chosen products"),
        "growth_bound": Quantity("{subject}: bound on it"),
        "log_norm_after": Quantity("{subject}: log norm after {steps} chosen steps"),
        "bound_after": Quantity("{subject}: bound after {steps} chosen steps"),
        "excess": Quantity("{subject}: largest log norm over its bound"),
        "trained_accuracy": Quantity("trained {mixer}: accuracy"),
        "trained_log_norm": Quantity("trained {mixer}: largest log norm"),
        "trained_last_log_norm": Quantity("trained {mixer}: mean log norm after the sequence"),
        "trained_last_bound": Quantity("trained {mixer}: mean bound after the sequence"),
        "trained_excess": Quantity("trained {mixer}: largest log norm over its bound"),
    },
    words=WORDS,
    seeds=(0, 1, 2),
    cost="10 minutes of one core",
)
