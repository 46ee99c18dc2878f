"""The Kalman filter: the conditional mean of a drifting memory, given all observations so far."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import kalman_filter, recursive_least_squares
from fastweights.testing import CASES
from fastweights.testing.contract.compare import assert_close

backends = pytest.mark.parametrize("backend", ["reference", "torch"])


def draw(**sizes: int) -> dict[str, Tensor]:
    return dict(CASES["kalman_filter-channel"].draw(**sizes).tokens)


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    """One channel, one value. Variance 1 and noise 1: half of 6 is written, and a variance of 1/2 is left. The halved memory has
    1/8; with process noise 7/8 it is 1 again: half of 5 - 1.5 is added to 1.5."""
    one = torch.ones(1, 2, 1, 1, dtype=torch.float64)
    v = torch.tensor([6.0, 5.0], dtype=torch.float64).view(1, 2, 1, 1)
    process_noise = torch.tensor([0.0, 7 / 8], dtype=torch.float64).view(1, 2, 1)
    g = torch.tensor([0.0, math.log(0.5)], dtype=torch.float64).view(1, 2, 1)
    o, state = kalman_filter(
        one, one, v, one[..., 0], process_noise, g, scale=1.0, output_final_state=True, backend=backend
    )
    assert o.flatten().tolist() == pytest.approx([3.0, 3.25])
    assert state is not None and [x.item() for x in state] == pytest.approx([3.25, 0.5])


@backends
def test_outputs_are_conditional_means(backend: str) -> None:
    """Of all states and observations as one Gaussian vector, conditioned on the observations up to each token."""
    time, key, value = 9, 3, 2
    x = draw(batch=1, heads=1, time=time, key=key, value=value)
    q, k, v, r, Q, g = (x[name][0, :, 0] for name in ("q", "k", "v", "noise", "process_noise", "g"))
    covariance, at = torch.eye(key, dtype=torch.float64), []
    cross: dict[tuple[int, int], Tensor] = {}  # of the states of two tokens
    for t in range(time):
        a = g[t].exp()
        for s in range(t):
            cross[t, s] = a[:, None] * cross[t - 1, s]
        cross[t, t] = covariance = a[:, None] * covariance * a + Q[t].diag()
    for t in range(time):
        observed = torch.stack(
            [torch.stack([k[i] @ (cross[i, j] if i >= j else cross[j, i].mT) @ k[j] for j in range(t + 1)]) for i in range(t + 1)]
        ) + r[: t + 1].diag()  # fmt: skip
        read = torch.stack([q[t] @ cross[t, j] @ k[j] for j in range(t + 1)])
        at.append(read @ torch.linalg.solve(observed, v[: t + 1]))
    o, _ = kalman_filter(**x, scale=1.0, backend=backend)
    torch.testing.assert_close(o[0, :, 0], torch.stack(at), rtol=1e-9, atol=1e-11)


@backends
def test_a_memory_that_does_not_drift_is_a_regression(backend: str) -> None:
    x = CASES["recursive_least_squares-none"].draw(time=70).tokens
    gain = x["beta"] + 0.1
    wanted = recursive_least_squares(x["q"], x["k"], x["v"], gain, output_final_state=True, backend="reference")
    got = kalman_filter(x["q"], x["k"], x["v"], 1 / gain, output_final_state=True, backend=backend)
    assert_close([got[0], *got[1]], [wanted[0], *wanted[1]], 1e-9)


@pytest.mark.parametrize("given", ["g", "process_noise", "both"])
@backends
def test_numbers_per_head_are_numbers_per_channel(given: str, backend: str) -> None:
    x = draw(time=70)
    names = ("g", "process_noise") if given == "both" else (given,)
    wide = {**x, **{name: x[name][..., :1].expand_as(x[name]) for name in names}}
    narrow = {**x, **{name: x[name][..., 0] for name in names}}
    assert_close([kalman_filter(**narrow, backend=backend)[0]], [kalman_filter(**wide, backend="reference")[0]], 1e-10)


def test_noise_has_no_sign() -> None:
    x = draw(time=4)
    for name in ("noise", "process_noise"):
        with pytest.raises(ValueError, match=f"{name} must be at least 0, got -"):
            kalman_filter(**{**x, name: x[name] - 2})
