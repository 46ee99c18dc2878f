"""Measures of confidence against cases that can be counted, and the variances of layers against the direct formulas."""

import pytest
import torch
from fastweights_studies.own.confidence import (
    auroc,
    calibration_error,
    fitted_probability,
    reliability,
    selective_accuracy,
)
from fastweights_studies.own.memory_variance import (
    diagonal_variance,
    exact_variance,
    layer_variances,
    lookup_in_place_of_memory,
)

from fastweights.layers import probe
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM


def test_auroc_counts_pairs():
    score = torch.tensor([0.1, 0.4, 0.4, 0.8, 0.2])
    positive = torch.tensor([False, True, False, True, False])
    wins = [(a > b) + 0.5 * (a == b) for a in score[positive].tolist() for b in score[~positive].tolist()]
    assert auroc(score, positive) == pytest.approx(sum(wins) / len(wins))
    assert auroc(score, torch.ones(5, dtype=torch.bool)) != auroc(score, positive)  # NaN


def test_abstention_keeps_the_surest():
    right = torch.tensor([True, False, True, True])
    assert selective_accuracy(torch.tensor([0.1, 0.9, 0.3, 0.2]), right, 0.75) == 1
    assert selective_accuracy(torch.tensor([0.4, 0.1, 0.3, 0.2]), right, 0.5) == 0.5


def test_calibration():
    predicted, right = torch.tensor([0.2, 0.2, 0.9, 0.9]), torch.tensor([False, False, True, False])
    assert reliability(predicted, right, 2) == [(pytest.approx(0.2), 0.0), (pytest.approx(0.9), 0.5)]
    assert calibration_error(predicted, right, 2) == pytest.approx((0.2 + 0.4) / 2)


def test_a_fitted_probability_is_that_of_the_draws():
    torch.manual_seed(0)
    x = torch.randn(20_000, 2, dtype=torch.float64)
    p = torch.sigmoid(1.5 * x[:, 0] - 0.5)
    right = torch.rand(20_000) < p
    fitted = fitted_probability(x[:10_000], right[:10_000], x[10_000:])
    assert (fitted - p[10_000:]).abs().max() < 0.05
    assert fitted_probability(x[:, :1], x[:, 0] > 0, x[:, :1]).isfinite().all()  # separable


def test_variances_are_those_before_the_token_is_written():
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, 6, 2, 4, dtype=torch.float64)
    beta, g = torch.rand(1, 6, 2), -torch.rand(1, 6, 2)
    gains = torch.rand(1, 6, 2, 3)
    exact, diagonal = exact_variance(q, k, beta, 0.5), diagonal_variance(q, k, gains, g, 2.0)
    for t in range(6):
        for h in range(2):
            gram = 0.5 * torch.eye(4, dtype=torch.float64)
            J = torch.zeros(4, 3, dtype=torch.float64)
            for s in range(t):
                gram = gram + beta[0, s, h] * torch.outer(k[0, s, h], k[0, s, h])
                J = g[0, s, h].exp() * J + torch.outer(k[0, s, h].square(), gains[0, s, h].double())
            own = q[0, t, h]
            assert exact[0, t, h].item() == pytest.approx((own @ torch.linalg.inv(gram) @ own).item(), rel=1e-6)
            wanted = (own.square()[:, None] / (J + 2.0)).sum(0)
            torch.testing.assert_close(diagonal[0, t, h], wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("mixer", ["rls", "palimpsa-d"])
def test_routed_tokens_are_answered_by_attention(mixer):
    torch.manual_seed(0)
    config = FastWeightsConfig(vocab_size=16, hidden_size=16, num_hidden_layers=2, num_heads=2, mixer=mixer)
    model = FastWeightsForCausalLM(config).eval()
    ids = torch.randint(16, (3, 9))
    assert layer_variances(model, ids).shape == (3, 9, 4) and (layer_variances(model, ids) > 0).all()
    with torch.no_grad():
        plain = model(ids).logits
        route = torch.zeros_like(ids, dtype=torch.bool)
        with lookup_in_place_of_memory(model, route, 10.0):
            assert torch.equal(model(ids).logits, plain)
        route[1, 5] = True
        with lookup_in_place_of_memory(model, route, 10.0):
            changed = model(ids).logits
        assert torch.equal(changed[[0, 2]], plain[[0, 2]]) and torch.equal(changed[1, :5], plain[1, :5])
        assert not torch.equal(changed[1, 5], plain[1, 5])
        assert torch.equal(model(ids).logits, plain)  # the layers are as before
        layer = model.model.layers[0].mixer
        with probe(model, "q", "k", "v") as seen:
            model(ids)
        q, k, v = (seen[name][0][1] for name in ("q", "k", "v"))
        weights = torch.einsum("hk,shk->hs", 10.0 * q[5], k[:5]).softmax(-1)
        wanted = torch.einsum("hs,shv->hv", weights, v[:5])
        answers = {}
        read_out = layer.read_out
        layer.__dict__["read_out"] = lambda o, *others: answers.setdefault("o", o) is None or read_out(o, *others)
        with lookup_in_place_of_memory(model, route, 10.0):
            model(ids)
        torch.testing.assert_close(answers["o"][1, 5], wanted)
