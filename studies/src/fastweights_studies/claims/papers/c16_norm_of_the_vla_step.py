"""C16: is the Jacobian of a step of variational linear attention of norm exactly 1?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..claim import Claim
from ..draws import SCALE_TERMS, SCALES, Draws, penalized_keys, step_norms
from ..measurement import Measurement, Number, measure_by_seed
from ..verdict import Verdict, decided
from ..words import Quantity, Words

LENGTH = 1000


def propagate_gradient(gradient: Tensor, k: Tensor, alpha: Tensor) -> tuple[float, float]:
    """The largest norm of a gradient in S_T on its way back to S_0, and its norm there; it begins with norm 1."""
    gradient, largest = gradient / gradient.norm(), 1.0
    for t in range(LENGTH - 1, -1, -1):  # dL/dS_(t-1) = (I - alpha k^T)^T dL/dS_t
        gradient = gradient - k[t][:, None] * (alpha[t] @ gradient)
        largest = max(largest, gradient.norm().item())
    return largest, gradient.norm().item()


def measure(seed: int, device: str) -> Iterator[Number]:
    for scale in SCALES:
        for channels in (32, 128):
            column = {"channels": channels, "scale": scale}
            k, y = penalized_keys(Draws(seed, device), LENGTH, channels, SCALES[scale](channels))
            k, alpha = k[:, 0], F.normalize(y[:, 0], dim=-1)
            seen = torch.cat([torch.arange(60), torch.arange(60, LENGTH, 100 if channels == 128 else 10)])
            norms = step_norms(k[seen], alpha[seen])
            yield Number("largest_norm", norms.max().item(), column)
            yield Number("smallest_norm", norms.min().item(), column)
            if channels == 32:
                gradient = Draws(seed + 1, device).normal(channels, channels)
                largest, last = propagate_gradient(gradient, k, alpha)
                yield Number("largest_gradient_ratio", largest, column)
                yield Number("gradient_ratio", last, column)


def decide(found: Measurement) -> Verdict:
    largest = found.largest("largest_norm")
    between, last = found.largest("largest_gradient_ratio"), found.largest("gradient_ratio")
    return decided(
        largest <= 1 + 1e-6,
        f"norm of a step up to {largest:.3f}",
        f"a gradient in S_0 has at most {last:.2f} of the norm of that in S_T, so that this half of the claim "
        f"{'holds' if last <= 1 else 'does not hold'} here",
        f"on the way back it reaches {between:.2f}",
    )


CLAIM = Claim(
    name="C16",
    paper="vla",
    source="Proposition 2, Corollary 1",
    says=(
        "The Jacobian I - alpha k' of a step has spectral norm exactly 1, so gradients in S_0 are no larger than "
        "those in S_T."
    ),
    printed="1",
    setting=(
        "Keys ELU + 1 of normal numbers brought to length 1, penalty directions by a random matrix, of either "
        "length that the paper has, ridge 0.1, 1000 tokens, d = 32 and 128, float64."
    ),
    expected="does not hold",
    forecast="norms from 1.0004 to 1.28 at d = 32, 1.002 at 128",
    rule=(
        "holds if no norm is above 1 + 1e-6. (The half about gradients is reported; its outcome in words was added after the "
        "run.)"
    ),
    measure=measure_by_seed(measure),
    decide=decide,
    numbers={
        "largest_norm": Quantity("largest norm, {subject}"),
        "smallest_norm": Quantity("smallest norm, {subject}"),
        "largest_gradient_ratio": Quantity("largest |dL/dS_t| / |dL/dS_T|, {subject}"),
        "gradient_ratio": Quantity("|dL/dS_0| / |dL/dS_T|, {subject}"),
    },
    words=Words(subject="d = {channels}, {scale}", terms=SCALE_TERMS),
    seeds=(0, 1, 2),
    cost="10 seconds",
    safe="computed before",
)
