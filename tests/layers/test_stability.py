"""Eigenvalues of the steps of preconditioned and learnt writes, with beta at its largest, and the memory after many of them."""

import math

import pytest
import torch

from fastweights.layers import build_mixer, probe
from fastweights.ops import delta_rule

BOUNDED = {
    "pgdn": {},
    "pgdn bound": {"bound": 2.0},
    "pgdn tied": {"tie_preconditioner": True},
    "pgdn both": {"preconditioner": "both"},
    "pgdn amplify": {"interval": "amplify"},
    "pgdn tanh": {"squash": "tanh"},
    "pdn": {"bound": 1.2},
    "deltanet": {"learn_write_key": True},
}


def insistent(variant):
    """A layer whose beta is at its largest and whose memory does not decay, in float64."""
    torch.manual_seed(0)
    layer = build_mixer(
        variant.split()[0],
        hidden_size=16,
        num_heads=2,
        negative_eigenvalues=True,
        activation="none",
        **BOUNDED[variant],
    ).double()
    if layer.preconditioner is not None:
        torch.nn.init.constant_(
            layer.preconditioner.center, 3.0
        )  # channels of a lower energy are written more strongly
    if layer.decay is not None:
        torch.nn.init.constant_(layer.decay.A_log, -50.0)
    if layer.learnt is not None:
        torch.nn.init.normal_(layer.learnt.w_proj.weight, std=2.0)
    layer.gain.b_proj.weight.data.zero_()
    layer.gain.finish = lambda y: layer.gain.largest * torch.ones_like(y)
    return layer


@pytest.mark.parametrize("variant", BOUNDED)
def test_every_step_has_its_eigenvalues_in_the_unit_disc(variant):
    layer = insistent(variant)
    x = torch.randn(1, 60, 16, dtype=torch.float64)
    with torch.no_grad(), probe(layer, "k", "write_key", "beta") as seen:
        layer(x)
    k, w, beta = (seen[name][0][0] for name in ("k", "write_key", "beta"))
    steps = torch.eye(8).double() - beta[..., None, None] * w[..., :, None] * k[..., None, :]
    sizes = torch.linalg.eigvals(steps).abs()
    assert sizes.max() <= 1 + 1e-9
    assert (1 - beta * (k * w).sum(-1)).min() < -0.3  # and some of them are negative


@pytest.mark.parametrize("variant", BOUNDED)
def test_the_memory_of_a_long_sequence_stays_bounded(variant):
    layer = insistent(variant)
    x = torch.randn(1, 4096, 16, dtype=torch.float64)
    with torch.no_grad(), probe(layer, "k", "v", "write_key", "beta", "state", every=512) as seen:
        layer(x)
    assert seen["state"][0]["S"].abs().max() < 300
    k, v, w = (seen[name][0] for name in ("k", "v", "write_key"))
    beyond = torch.full_like(seen["beta"][0], 3.2)
    _, state = delta_rule(k, k, v, beyond / (k * w).sum(-1), write_key=w, output_final_state=True)
    assert not state.abs().max() < 1e9  # with eigenvalues of -2.2


def test_the_largest_beta():
    largest = {
        2.0: [
            {"squash": "none"},
            {"interval": "dampen"},
            {"bound": 1.0},
            {"gain": "longhorn"},
            {"preconditioner": "query"},
        ],
        2 / 1.5: [{}, {"interval": "amplify"}, {"squash": "tanh"}, {"preconditioner": "both"}],
    }
    for beta, options in largest.items():
        for own in options:
            layer = build_mixer("pgdn", hidden_size=8, num_heads=2, negative_eigenvalues=True, **own)
            assert layer.gain.largest == beta
            assert math.isclose(build_mixer("pgdn", hidden_size=8, num_heads=2, **own).gain.largest, 1.0)
