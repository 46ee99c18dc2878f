"""What the documents say of recall at its defaults is what studies/src/fastweights_studies/measure/first_values.py measures."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from fastweights_studies.measure import first_values
from fastweights_studies.measure.recall import setting_column
from fastweights_studies.places import ROOT
from fastweights_studies.record import read_rows, select

from fastweights.layers import registry
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import RecallExperiment

RULES = (ROOT / "docs" / "rules.md").read_text()
BUILT_TO_FAIL = re.findall(
    r"^\| `([a-z-]+)` \|", RULES.partition("### Built to fail")[2].partition("\n#")[0], re.MULTILINE
)
LEARNED = 1 / 4 + 0.2  # guessing among the four values that a sequence shows, and what the defaults must add


@pytest.fixture(autouse=True, scope="module")
def ranges():
    """The mixers of the script, which only it knows."""
    first_values.register_ranges()
    yield
    for mixer in first_values.BOTH:
        del registry._REGISTRY.specs[f"{mixer}-ranges"]


@pytest.fixture(scope="module")
def rows():
    return read_rows(first_values.RESULT)


def best(rows, mixer):
    (chosen,) = (row for row in select(rows, mixer=mixer) if row.run["chosen"])
    return chosen.value


def defaults(rows, seed):
    column = setting_column(RecallExperiment(mixers=("softmax",), **first_values.DEFAULTS).runs()[0])
    return select(rows, options={}, seed=seed, column=column)


def test_all_mixers_but_those_built_to_fail_learn_at_the_defaults(rows):
    """`palimpsa-d` with three of five seeds."""
    seeds = {seed: defaults(rows, seed) for seed in first_values.SEEDS}
    assert {row.mixer for row in seeds[0]} == set(first_values.BUILT_IN)
    failed = {(seed, row.mixer) for seed, own in seeds.items() for row in own if best(own, row.mixer) < LEARNED}
    assert failed == {(0, "palimpsa-d"), (3, "palimpsa-d"), *((0, name) for name in BUILT_TO_FAIL)}
    for seed in first_values.SEEDS[1:]:
        assert {row.mixer for row in seeds[seed]} == {"softmax", *first_values.SLOW}


def test_the_file_holds_the_rows_of_the_script(rows):
    """Each once; no other experiment has the rows of another."""
    wanted = [
        row
        for experiment in first_values.experiments().values()
        for run in experiment.runs()
        for row in first_values.make_accuracy_rows(run, None, False, rows[0].origin)
    ]
    assert sorted(map(without_value, rows)) == sorted(map(without_value, wanted))


def without_value(row):
    """A row as text, whatever the order of its names, and whenever it was measured."""
    run = {name: True if name == "chosen" else x for name, x in row.run.items()}
    return json.dumps({**dataclasses.asdict(row), "run": run, "value": None, "origin": None}, sort_keys=True)


def test_what_the_script_varies():
    """One thing each, beside D = 1."""
    for mixer in first_values.BOTH:
        for choice in first_values.variants(mixer):
            torch.manual_seed(0)
            run = RecallExperiment(mixers=(choice,), pairs=(4,), width=512, heads=256).runs()[0]
            layer = FastWeightsForCausalLM(run.model_config()).model.layers[1].mixer
            name, options = first_values.describe_layer(choice)
            assert name == mixer
            rate, dt = layer.decay.A_log.exp(), torch.nn.functional.softplus(layer.decay.dt_bias)
            assert layer.options.metaplasticity == (mixer == "palimpsa-m")
            assert layer.skip.D.unique().tolist() == [options["skip_init"]]
            assert layer.options.conv_init == options.get("conv_init", "uniform")
            _, largest = options.get("rates", (1, 16))
            assert 0.9 * largest < rate.max() <= largest
            low, high = options.get("steps", (0.001, 0.1))
            assert 0.999 * low < dt.min() < 1.2 * low and 0.8 * high < dt.max() < 1.001 * high
