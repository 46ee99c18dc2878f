"""C2: with two channels and one key the diagonal preconditioners of queries and of keys differ."""

from __future__ import annotations

import torch

from fastweights.ops import delta_rule, linear_attention, precondition_keys, precondition_queries

from ..claim import Claim
from ..conditions import Conditions
from ..measurement import Measurement, Number
from ..verdict import Verdict, decided
from ..words import Quantity

PRINTED = {"query_side": 1 / 2, "key_side": 1 / 3}


def measure(conditions: Conditions) -> Measurement:
    ones = torch.ones(1, 1, 1, 2, dtype=torch.float64, device=conditions.device)
    beta, g = ones[..., 0], torch.zeros_like(ones[..., 0])
    read = []
    for channel in range(2):  # the memory as its answers to the two unit queries
        q = torch.eye(2, dtype=ones.dtype, device=conditions.device)[channel].view(1, 1, 1, 2)
        q_tilde, _ = precondition_queries(q, ones, g, beta, ridge=1.0)
        o, _ = linear_attention(q_tilde, ones, ones, scale=1.0)
        read.append(o.flatten())
    write_key, _ = precondition_keys(ones, g, beta, 0.0, squash="none", ridge=1.0)
    _, S = delta_rule(ones, ones, ones, beta, write_key=write_key, output_final_state=True)
    assert S is not None
    return Measurement(
        tuple(
            Number(f"{side}_difference", (memory - PRINTED[side]).abs().max().item())
            for side, memory in (("query_side", torch.stack(read)), ("key_side", S))
        )
    )


def decide(found: Measurement) -> Verdict:
    largest = max(found.largest(f"{side}_difference") for side in PRINTED)
    return decided(
        largest < 1e-12, f"all elements are 1/2 on the query side and 1/3 on the key side up to {largest:.0e}"
    )


CLAIM = Claim(
    name="C2",
    paper="pdn",
    source="Theorem C.2",
    says="Diagonal preconditioners at query time and at key time give different memories.",
    printed="S = 1/2 1 1' (queries) and 1/3 1 1' (keys)",
    setting=(
        "K = V = 2, one token with k = v = (1, 1), ridge 1; the key side is the unstable form with A before the token."
    ),
    expected="holds",
    forecast="1/2 and 1/3",
    rule="holds if every element is 1/2 and 1/3 to 1e-12.",
    measure=measure,
    decide=decide,
    numbers={
        "query_side_difference": Quantity("query side, largest difference from 1/2"),
        "key_side_difference": Quantity("key side, largest difference from 1/3"),
    },
    safe="identity",
)
