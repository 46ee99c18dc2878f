"""C19: does variational linear attention keep its memory small, and what of that does the delta rule alone?"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, linear_attention, variational_linear_attention

from ..claim import Claim, Measurement, Verdict, over_seeds
from ..draws import RIDGE, SCALES, Draws, penalty_stream

CHANNELS, LENGTH, EVERY, HEADS = 32, 1000, 50, 8


def norm(S: Tensor) -> float:
    return torch.linalg.matrix_norm(S).mean().item()


def measure(seed: int, device: str) -> dict[str, float]:
    draws = Draws(seed, device)
    k, u = penalty_stream(draws, LENGTH, CHANNELS, HEADS)
    v = draws.normal(1, LENGTH, HEADS, CHANNELS)
    ones, unit = torch.ones_like(v[..., 0]), F.normalize(k, dim=-1)
    _, linear = linear_attention(k, k, v, output_final_state=True)
    _, delta = delta_rule(unit, unit, v, ones, output_final_state=True)
    assert linear is not None and delta is not None
    found = {"linear attention": norm(linear), "delta rule": norm(delta)}
    for label, scale in SCALES.items():
        state, norms = None, []
        for start in range(0, LENGTH, EVERY):
            piece = slice(start, start + EVERY)
            _, state = variational_linear_attention(
                k[:, piece], k[:, piece], v[:, piece], scale(CHANNELS) * u[:, piece], ridge=RIDGE, initial_state=state,
                output_final_state=True,
            )  # fmt: skip
            assert state is not None
            norms.append(norm(state[0]))
        found[f"VLA, {label}"] = norms[-1]
        found[f"VLA, {label}, largest over time"] = max(norms)
    return found


def decide(found: Measurement) -> Verdict:
    largest = {label: found.largest(f"VLA, {label}, largest over time") for label in SCALES}
    linear, delta = found.mean("linear attention"), found.mean("delta rule")
    last = {label: found.mean(f"VLA, {label}") for label in SCALES}
    share = (linear - delta) / (linear - min(last.values()))
    reason = (
        "|S_1000|: "
        + ", ".join(f"{last[label]:.1f} ({label}; at most {largest[label]:.1f})" for label in SCALES)
        + f", delta rule {delta:.1f}, linear {linear:.0f}: {linear / min(last.values()):.0f} times below; the delta rule alone "
        f"gives {share:.0%} of the reduction"
    )
    below = [label for label in SCALES if largest[label] < 15]
    return Verdict("holds" if below else "does not hold", reason)


CLAIM = Claim(
    name="C19",
    paper="vla",
    source="section 6.2",
    says="The norm of VLA's memory stays below 15, 110 times below linear attention's.",
    printed="< 15, 110 times",
    setting=(
        "As C18, with 8 heads and penalty directions by a random matrix, of either length; largest of every 50th token."
    ),
    expected="does not hold",
    forecast="26 (at most 31), 60 times; 32 for the delta rule alone",
    rule="holds if the norm stays below 15 with one of the two lengths of u; the share of the delta rule is reported.",
    measure=over_seeds(measure),
    decide=decide,
    seeds=(0, 1, 2),
)
