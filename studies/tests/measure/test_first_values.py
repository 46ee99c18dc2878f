"""What the documents say of recall at its defaults is what studies/src/fastweights_studies/measure/first_values.py measures."""

from __future__ import annotations

import json
import re

import pytest
import torch
from fastweights_studies.measure import first_values
from fastweights_studies.measure.environment import ROOT

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
def content():
    return json.loads(first_values.RESULT.read_text())


def best(rows, mixer):
    return max(row["accuracy"] for row in rows if row["mixer"] == mixer)


def test_all_mixers_but_those_built_to_fail_learn_at_the_defaults(content):
    rows = content["defaults of every mixer"]
    assert {row["mixer"] for row in rows} == set(first_values.BUILT_IN)
    assert {mixer for mixer in first_values.BUILT_IN if best(rows, mixer) < LEARNED} == set(BUILT_TO_FAIL)
    again = content["defaults of the slow ones"]
    assert {row["seed"] for row in again} == {1}
    assert all(best(again, mixer) >= LEARNED for mixer in first_values.SLOW)


def test_the_file_is_of_the_defaults_and_says_where_it_was_measured(content):
    run = RecallExperiment(mixers=("softmax",), pairs=(4,)).runs()[0].record()
    assert content["settings"] == {name: run[name] for name in run if name not in ("mixer", "learning_rate", "seed")}
    assert {"cpu", "torch", "fastweights"} <= set(content["measured with"][0])


def test_the_file_holds_the_rows_of_the_script(content):
    for name, experiment in first_values.experiments().items():
        wanted = {(run.choice.label, run.learning_rate, run.seed) for run in experiment.runs()}
        assert {(row["mixer"], row["learning_rate"], row["seed"]) for row in content[name]} == wanted, name


def test_what_the_script_varies():
    """One thing each, beside D = 1."""
    for mixer in first_values.BOTH:
        for choice in first_values.variants(mixer):
            torch.manual_seed(0)
            run = RecallExperiment(mixers=(choice,), pairs=(4,), width=512, heads=256).runs()[0]
            layer = FastWeightsForCausalLM(run.model_config()).model.layers[1].mixer
            change = choice.label.removeprefix(f"{mixer}: ")
            rate, dt = layer.decay.A_log.exp(), torch.nn.functional.softplus(layer.decay.dt_bias)
            assert layer.options.metaplasticity == (mixer == "palimpsa-m")
            assert layer.skip.D.unique().tolist() == [0.0 if change.startswith("D = 0") else 1.0]
            assert layer.options.conv_init == ("normal" if change == "filters normal" else "uniform")
            largest = 1 if change == "A in [0, 1]" else 16
            assert 0.9 * largest < rate.max() <= largest
            low, high = {"dt in [.01, .1]": (0.01, 0.1), "dt in [.1, 1]": (0.1, 1.0)}.get(change, (0.001, 0.1))
            assert 0.999 * low < dt.min() < 1.2 * low and 0.8 * high < dt.max() < 1.001 * high
