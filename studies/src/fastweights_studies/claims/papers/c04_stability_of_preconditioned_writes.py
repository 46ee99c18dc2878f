"""C4: a bounded preconditioner keeps the eigenvalues of a step within 1. What products of steps do is another question."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import precondition_keys

from ..claim import Claim
from ..draws import Draws
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict
from ..words import Quantity

CHANNELS, MATRICES, PRODUCTS = 16, 20_000, 8
LENGTHS = (100, 1_000, 10_000)
CHOSEN, CANDIDATES = 200, 64
WITHIN, BEYOND = (1.5, 2.0), 2.5  # x


def find_largest_eigenvalue(keys: Tensor, factors: Tensor) -> float:
    """The largest size of an eigenvalue of I - (B k) k^T."""
    identity = torch.eye(keys.shape[-1], dtype=keys.dtype, device=keys.device)
    steps = identity - (factors * keys)[..., :, None] * keys[..., None, :]
    return torch.linalg.eigvals(steps).abs().max().item()


def draw_factors(draws: Draws, bound: float, *shape: int) -> Tensor:
    """Half of the rows anywhere in [1 / bound, bound], half at the ends."""
    log = draws.uniform(*shape, low=-1.0)
    log = torch.where(
        torch.arange(shape[0], device=log.device).view(-1, *[1] * (len(shape) - 1)) % 2 == 0, log, log.sign()
    )
    return torch.exp(math.log(bound) * log)


def measure_products(draws: Draws, bound: float, length: int) -> list[float]:
    """The largest norm of a product of steps from the first on, up to each of LENGTHS."""
    product = torch.eye(CHANNELS, dtype=torch.float64, device=draws.device).repeat(PRODUCTS, 1, 1)
    largest, found = 1.0, []
    for t in range(1, length + 1):
        k = draws.unit(PRODUCTS, CHANNELS)
        w = draw_factors(draws, bound, PRODUCTS, CHANNELS) * k
        product = product - w[:, :, None] * (k[:, None, :] @ product)
        if t <= 100 or t % 10 == 0:
            largest = max(largest, torch.linalg.matrix_norm(product, ord=2).max().item())
        if t in LENGTHS:
            found.append(largest)
    return found


def measure_chosen_products(draws: Draws, bound: float, decay: float | None = None) -> list[float]:
    """The norm of a product whose every step is the one of CANDIDATES that enlarges it most, with keys near the direction in
    which the product is largest. Factors are the worst ones in [1 / bound, bound]; with `decay` those of `precondition_keys`."""
    product = torch.eye(CHANNELS, dtype=torch.float64, device=draws.device)
    energy, ones = product.new_zeros(CANDIDATES, 1, CHANNELS), product.new_ones(CANDIDATES, 1, 1)
    found = []
    for _ in range(CHOSEN):
        largest = torch.linalg.svd(product)[0][:, 0]
        k = F.normalize(draws.normal(CANDIDATES, CHANNELS) + 3 * draws.uniform(CANDIDATES, 1) * largest, dim=-1)
        if decay is None:
            share = (k @ largest)[:, None] * k
            outside = (largest - bound * share).abs() > (largest - share / bound).abs()
            w, energies = torch.where(outside, bound, 1 / bound) * k, None
        else:
            given = (k[:, None, None], torch.log(decay * ones), ones)
            w, energies = precondition_keys(*given, -0.2, bound=bound, initial_state=energy, output_final_state=True)
            w = w[:, 0, 0]
        products = product - w[:, :, None] * (k @ product)[:, None, :]
        norms = torch.linalg.matrix_norm(products, ord=2)
        best = norms.argmax()
        product = products[best]
        energy = energy if energies is None else energies[best].expand_as(energy)
        found.append(norms.max().item())
    return found


def measure(seed: int, device: str) -> Iterator[Number]:
    draws = Draws(seed, device)
    for bound in (*WITHIN, BEYOND):
        keys = draws.unit(MATRICES, CHANNELS)
        largest = max(
            find_largest_eigenvalue(keys, draw_factors(draws, bound, MATRICES, CHANNELS)),
            find_largest_eigenvalue(keys[:1000], torch.full_like(keys[:1000], bound)),
        )
        yield Number("eigenvalue", largest, {"bound": bound})
    k = draws.unit(1, 2000, 4, CHANNELS)
    ones = torch.ones(1, 2000, 4, dtype=k.dtype, device=device)
    write_key, _ = precondition_keys(k, torch.log(0.9 * ones), ones, -0.2, bound=2.0)
    yield Number("op_eigenvalue", find_largest_eigenvalue(k, write_key / k), {"bound": 2.0})
    for bound in (*WITHIN, BEYOND):
        norms = measure_products(draws, bound, LENGTHS[-1] if bound in WITHIN else LENGTHS[0])
        for length, norm in zip(LENGTHS, norms):
            yield Number("product_norm", norm, {"length": length, "bound": bound})
        if bound in WITHIN:
            slope = math.log(norms[-1] / norms[0]) / math.log(LENGTHS[-1] / LENGTHS[0])
            yield Number("slope", slope, {"bound": bound})
    for bound in WITHIN:
        norms = measure_chosen_products(draws, bound)
        yield Number("chosen_norm", norms[-1], {"bound": bound})
        for decay in (0.5, 0.9):
            norm = measure_chosen_products(draws, bound, decay)[-1]
            yield Number("op_chosen_norm", norm, {"decay": decay, "bound": bound})
        yield Number("growth", (norms[-1] / norms[CHOSEN // 2 - 1]) ** (2 / CHOSEN), {"bound": bound})


def decide(found: Measurement) -> Verdict:
    inside = max(*(found.largest("eigenvalue", bound=bound) for bound in WITHIN), found.largest("op_eigenvalue"))
    outside = found.smallest("eigenvalue", bound=BEYOND)
    growth, reached = found.largest("growth"), found.largest("op_chosen_norm")
    slope = max(found.mean("slope", bound=bound) for bound in WITHIN)
    statements = (
        f"largest eigenvalue {inside:.9f} for x up to 2, {outside:.2f} at {BEYOND}",
        f"largest norms of random products grow with the length's power {slope:.3f}, norms of products of chosen steps by a "
        f"factor of up to {growth:.2f} per step",
        f"chosen steps of precondition_keys reach {reached:.2f}",
    )
    if not (inside <= 1 + 1e-9 and outside > 1):
        return Verdict("does not hold", statements)
    return Verdict("holds" if slope <= 0.05 and growth <= 1.001 else "holds weakly", statements)


CLAIM = Claim(
    name="C4",
    paper="pdn",
    source="Lemma E.2",
    says=(
        "Writes preconditioned by factors in [1/x, x] are stable: eigenvalues of a step are within 1 while beta x <= 2."
    ),
    printed="|eigenvalues| <= 1",
    setting=(
        "Unit keys, beta 1, d = 16: 20,000 random and extreme steps per x, those of precondition_keys, and 8 "
        "products of 10,000 steps with keys and factors drawn anew, float64. Added after the first run: 200 steps "
        "that are each chosen of 64 to enlarge the product, with any factors and with those of precondition_keys."
    ),
    expected="holds",
    forecast=(
        "eigenvalues within 1 up to x = 2, above at 2.5; norms of products of 400 steps 1.2 at x = 1.5, 2.2 at 2, "
        "312 at 2.5"
    ),
    rule=(
        "holds if the largest eigenvalue is at most 1 + 1e-9 for x up to 2 and above 1 at x = 2.5; only weakly if "
        "norms of products grow with the number of steps for x up to 2 (slope above 0.05 in logarithms, 100 to "
        "10,000 random steps; added after the first run: 0.1% per chosen step)."
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "eigenvalue": Quantity("largest eigenvalue at x = {bound}"),
        "op_eigenvalue": Quantity("largest eigenvalue of precondition_keys at x = {bound:g}"),
        "product_norm": Quantity("largest norm of a product of up to {length} steps at x = {bound}"),
        "slope": Quantity("slope of its logarithm over that of the length at x = {bound}"),
        "chosen_norm": Quantity(f"norm of a product of {CHOSEN} chosen steps at x = {{bound}}"),
        "op_chosen_norm": Quantity("the same by precondition_keys, decay {decay}, x = {bound}"),
        "growth": Quantity("its growth per step at x = {bound}"),
    },
    seeds=(0, 1, 2),
    cost="a minute",
)
