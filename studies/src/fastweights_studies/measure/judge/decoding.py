"""One token for a batch of sequences: the state is read and written once, so bandwidth is the floor."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastweights import ops

from .accuracy import Failure, errors, in_float64, over_budget
from .cases import CASES, Case, Sizes
from .measuring import floors, times
from .peers import Step, decoding_peers
from .timing import Ceilings, Work

SIZES = Sizes(B=64, T=1, H=16, K=128, V=128)


def alone(states: Mapping[str, Tensor]) -> Any:
    """States as the ops take them."""
    return next(iter(states.values())) if len(states) == 1 else tuple(states.values())


def ours(case: Case, backend: str) -> Step | None:
    """The op's form that updates its states in place, where it has one; it returns o."""
    step = getattr(ops, f"{case.op.__name__}_", None)
    if step is None:
        return None
    return lambda x, s: step(**x, **case.constants, state=alone(s), backend=backend)


def general(case: Case, backend: str) -> Step:
    """The op itself on one token."""
    return lambda x, s: case.ours(x, backend, initial_state=alone(s), output_final_state=True)


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in tensors.items()}


def check(case: Case, step: Step, in_place: bool, inputs: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> Any:
    exact = in_float64(states)
    o, final = case.ours(in_float64(inputs), "torch", initial_state=alone(exact), output_final_state=True)
    finals = final if isinstance(final, tuple) else (final,)
    after = copies(states)
    got = step(inputs, after)
    if not in_place:
        got, *new = got
        after = dict(zip(states, new[0] if isinstance(new[0], tuple) else new))
    return errors({"o": got, **after}, {"o": o, **dict(zip(states, finals))})


@torch.no_grad()
def judge_decoding(
    name: str,
    dtype: torch.dtype,
    backend: str,
    repeats: int,
    ceilings: Ceilings,
    with_peers: bool,
    sizes: Sizes = SIZES,
) -> dict[str, Any]:
    case, seed = CASES[name], torch.seed() % 2**31
    inputs = copies(case.draw(sizes, dtype, "cuda", seed))
    states = copies(case.draw_states(sizes, sizes.B, "cuda", seed + 1))
    mine = ours(case, backend)
    steps: dict[str, Step] = {"ours": mine or general(case, backend)}
    if with_peers:
        steps |= decoding_peers(name)
    found, failed = {}, {}
    for who in list(steps):
        try:
            found[who] = check(case, steps[who], who == "ours" and mine is not None, inputs, states)
        except Exception as error:  # theirs: ours is worth measuring
            if who == "ours":
                raise
            failed[who] = Failure.of_error(error, 200)
            del steps[who]
    row: dict[str, Any] = {"errors": found, "failed": failed, "in_place": mine is not None}
    refused = list(over_budget(found["ours"], dtype).values())
    if refused:
        return {**row, "refused": refused}
    held = {who: copies(states) for who in steps}
    works: dict[str, Work] = {who: partial(step, inputs, held[who]) for who, step in steps.items()}
    traffic = sum(2 * x.numel() * x.element_size() for x in states.values()) + case.bytes(inputs, backward=False)
    row["decode"] = {**floors(traffic / ceilings.bandwidth, 0.0), **times(works, repeats)}
    return row
