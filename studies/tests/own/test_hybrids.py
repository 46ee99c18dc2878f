"""Hybrids trained as one: who is routed, that attention learns from it, and that the rule tells good hybrids from others."""

import pytest
import torch
from fastweights_studies.claims import STATUSES, Conditions, Measurement, find_claim
from fastweights_studies.own import o2b_hybrids_trained_as_one as hybrids
from fastweights_studies.own import o2c_hybrids_with_a_fitted_router as fitted
from fastweights_studies.own.memory_variance import lookup_in_place_of_memory

from fastweights.data.task import IGNORE_INDEX
from fastweights.training import RecallRun
from fastweights.training.recall.objectives import make_objective
from studies.tests.claims.made import make_numbers


@pytest.fixture
def run():
    return RecallRun(mixer=hybrids.make_mixers()[0], pairs=4, learning_rate=1e-2, vocab_size=32, width=16, layers=1)


@pytest.fixture
def model(run):
    torch.manual_seed(0)
    model = make_objective(run.make_task()).build(run.model_config())
    hybrids.add_sharpness(model)
    return model


def test_the_highest_share_is_chosen():
    assert hybrids.choose_highest(torch.tensor([3.0, 9.0, 1.0, 5.0, 2.0]), 0.4).tolist() == [
        False,
        True,
        False,
        True,
        False,
    ]
    assert (
        hybrids.choose_highest(torch.arange(5.0), 1.0).all()
        and not hybrids.choose_highest(torch.arange(5.0), 0.0).any()
    )


def routed_in(monkeypatch, run, model, training):
    """The places that a loss routes, and the batch."""
    seen = []

    def lookup(model, places, sharpness):
        seen.append(places.clone())
        return lookup_in_place_of_memory(model, places, sharpness)

    monkeypatch.setattr(hybrids, "lookup_in_place_of_memory", lookup)
    plain = make_objective(run.make_task())
    batch = run.make_task().batch("train", seed=0, index=0, batch_size=10)
    hybrids.Routed(plain, training).loss(model, *plain.inputs(batch)).backward()
    return seen[0], batch


def test_the_most_uncertain_queries_are_routed(monkeypatch, run, model):
    places, batch = routed_in(monkeypatch, run, model, "uncertain_queries")
    asks = batch.labels != IGNORE_INDEX
    assert not places[~asks].any() and places.sum() == round(0.2 * int(asks.sum()))
    doubt = hybrids.find_uncertainty(model, batch.input_ids)
    assert doubt[places].min() >= doubt[asks & ~places].max()


def test_all_queries_are_answered_by_attention_that_learns(monkeypatch, run, model):
    places, batch = routed_in(monkeypatch, run, model, "attention_alone")
    assert torch.equal(places, batch.labels != IGNORE_INDEX)
    assert model.log_sharpness.grad.abs() > 0
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "module", "settings"), [("own-2b", hybrids, "TRAINED"), ("own-2c", fitted, "SETTINGS")]
)
def test_a_tiny_study(name, module, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(hybrids, "SEQUENCES", 4)
    small = {"pairs": 4, "vocab_size": 32, "steps": 2, "batch_size": 2, "test_examples": 4}
    monkeypatch.setattr(module, settings, {**getattr(module, settings), **small})
    monkeypatch.setattr(hybrids, "in_processes", lambda measure, jobs, conditions: [measure(job) for job in jobs])
    claim = find_claim(name)
    found = claim.measure(Conditions(seeds=(0, 1), folder=tmp_path))
    assert claim.decide(found).status in STATUSES[:4]
    for kind in module.TRAININGS:
        for share in (0.0, 1.0):
            by = [list(hybrids.accuracies_of(found, "rls", kind, share, order).values()) for order in module.ORDERS]
            assert len(by[0]) == 2 and by[0] == by[1]


def measured(**changed):
    """Accuracies of two mixers, alike but for what is changed of rls."""
    numbers = []
    for mixer in hybrids.MIXERS:
        found = {"memory": 0.5, "random": 0.6, "hybrid": 0.8, "test": 0.7, "attention": 0.9}
        found |= changed if mixer == "rls" else {}
        for name, training, share, order in (
            ("memory", "memory_alone", 0.0, "variance"),
            ("random", "random_queries", 0.2, "chance"),
            ("hybrid", "uncertain_queries", 0.2, "variance"),
            ("test", "memory_alone", 0.2, "variance"),
            ("attention", "attention_alone", 1.0, "variance"),
        ):
            values = [found[name] + shift for shift in (-0.01, 0.0, 0.01)]
            numbers += make_numbers("routed_accuracy", values, mixer, training=training, share=share, order=order)
    return Measurement(tuple(numbers))


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({}, "holds"),
        ({"random": 0.8}, "holds weakly"),
        ({"test": 0.8}, "holds weakly"),
        ({"attention": 1.2}, "holds weakly"),
        ({"memory": 0.85}, "holds weakly"),
    ],
)
def test_what_decides(changed, status):
    assert find_claim("own-2b").decide(measured(**changed)).status == status


def test_two_mixers_that_are_no_better_than_chance_do_not_hold(monkeypatch):
    monkeypatch.setattr(hybrids, "MIXERS", ("rls",))
    assert find_claim("own-2b").decide(measured(random=0.8)).status == "not resolved"  # a tie
    assert find_claim("own-2b").decide(measured(random=0.85)).status == "does not hold"
    assert find_claim("own-2b").decide(measured(test=0.8)).status == "holds weakly"


HYBRID = ("random_queries", 0.2, "fitted_variance")
BY_CHANCE = ("random_queries", 0.2, "chance")
ALONE = ("memory_alone", 0.0, "fitted_variance")
ROUTED_IN_TEST = ("memory_alone", 0.2, "fitted_variance")


@pytest.mark.parametrize(
    ("equal", "status"),
    [
        ((), "holds"),
        ((ROUTED_IN_TEST,), "holds weakly"),
        ((BY_CHANCE,), "not resolved"),
        ((ALONE,), "not resolved"),
    ],
)
def test_what_decides_about_a_fitted_router(equal, status):
    """The other accuracies are lower than the hybrid's."""
    numbers = []
    for mixer in hybrids.MIXERS:
        for kind in (HYBRID, BY_CHANCE, ALONE, ROUTED_IN_TEST):
            training, share, order = kind
            values = [0.8 if kind in (HYBRID, *equal) else 0.7] * 3
            numbers += make_numbers("routed_accuracy", values, mixer, training=training, share=share, order=order)
    assert find_claim("own-2c").decide(Measurement(tuple(numbers))).status == status
