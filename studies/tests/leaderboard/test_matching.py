"""Equal state and equal parameters for every mixer of the registry."""

import dataclasses

import pytest
from fastweights_studies.leaderboard import SIZES
from fastweights_studies.leaderboard.matching import Matching
from fastweights_studies.leaderboard.trainings import match_mixer

from fastweights.layers import MIXERS, MixerChoice
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training import RecallExperiment

MODEL = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2}
MATCHING = Matching(MODEL, 16, FastWeightsForCausalLM)


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_takes_part_at_equal_state_and_parameters(name):
    found, reference = MATCHING.of(MixerChoice(name)), MATCHING.of(MixerChoice("linear"))
    config = FastWeightsConfig(**MODEL, mixer=found.choice.entry, intermediate_size=found.intermediate_size)
    model = FastWeightsForCausalLM(config)
    assert (model.num_parameters(), model.state_size(1)) == (found.parameters, found.state)
    assert abs(found.parameters / reference.parameters - 1) < 0.02
    assert found.grows == (name in ("softmax", "vla-softmax"))
    if not found.grows:
        assert 0.85 * reference.state < found.state <= reference.state == 2 * 16 * 16


def test_a_larger_head_would_have_too_much_state():
    found = MATCHING.of(MixerChoice("mesa"))
    larger = MixerChoice("mesa", {"head_dim": found.choice.options["head_dim"] + 1})
    assert FastWeightsForCausalLM(FastWeightsConfig(**MODEL, mixer=larger.entry)).state_size() > 512


def test_a_state_may_be_above_the_reference_by_a_share():
    close = dataclasses.replace(MATCHING, excess=0.07)  # of 256 numbers per head; a preconditioner has 16
    assert close.of(MixerChoice("pgdn")).choice.options == {"head_dim": 16}
    assert dataclasses.replace(close, excess=0.06).of(MixerChoice("pgdn")).choice.options == {"head_dim": 15}


@pytest.mark.parametrize("heads, size", [(8, 45), (12, 44)])
def test_widths_are_multiples_of_what_is_declared(heads, size):
    """Of two Gram matrices of the state of heads of 64, at most 45 channels."""
    matching = Matching({**MODEL, "num_heads": heads, "hidden_size": 512}, 64, FastWeightsForCausalLM, multiple=8)
    found, reference = matching.of(MixerChoice("mesa")), matching.of(MixerChoice("linear"))
    assert found.choice.options == {"head_dim": size} and found.intermediate_size % 8 == 0
    slope = 3 * 512  # of the width
    assert abs(found.parameters - reference.parameters) <= 4 * slope


def test_a_head_size_that_was_chosen_stays():
    found = MATCHING.of(MixerChoice("gdn", {"head_dim": 8}, "small"))
    assert (found.choice.options, found.choice.label, found.state) == ({"head_dim": 8}, "small", 2 * 8 * 8)
    assert abs(found.parameters / MATCHING.of(MixerChoice("linear")).parameters - 1) < 0.02


def test_the_language_model_has_about_20_million_parameters():
    size = SIZES["full"].language
    matching = Matching({**size.model, "vocab_size": size.vocabulary}, size.head_dim, FastWeightsForCausalLM)
    assert 18e6 < matching.of(MixerChoice("gdn")).parameters < 23e6


@pytest.mark.parametrize("size", SIZES)
def test_the_columns_are_tasks_of_the_declared_state(size):
    for task in SIZES[size].tasks.values():
        for column in task.columns:
            (run,) = RecallExperiment(**task.experiment(column), mixers=("linear",), learning_rates=(1.0,)).runs()
            assert run.tokens > 0 and task.shared["width"] >= column["head_dim"]
    found = match_mixer(task, column, MixerChoice("linear"))
    assert found.state == task.shared["layers"] * task.shared["heads"] * column["head_dim"] ** 2
