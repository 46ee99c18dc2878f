"""Experiments are grids of runs; bad settings are refused when they are made, with the name of the setting."""

import dataclasses
import re

import pytest

from fastweights.data import MQAR
from fastweights.layers import MixerChoice
from fastweights.training import RecallExperiment, RecallRun

from .small import small_experiment, small_run


def test_the_grid_has_every_combination_once():
    experiment = small_experiment(mixers=("linear", "gdn"), pairs=(1, 2), learning_rates=(0.1, 0.2), seeds=(0, 7))
    runs = experiment.runs()
    assert len(runs) == len({run.name for run in runs}) == 16
    assert {(run.mixer, run.pairs, run.learning_rate, run.seed) for run in runs} == {
        (mixer, pairs, rate, seed)
        for mixer in ("linear", "gdn")
        for pairs in (1, 2)
        for rate in (0.1, 0.2)
        for seed in (0, 7)
    }


def test_runs_take_over_every_shared_setting():
    changed = {"vocab_size": 24, "width": 12, "heads": 3, "layers": 2, "steps": 5, "length": 20, "weight_decay": 0.5}
    run = small_experiment(**changed).runs()[0]
    assert {name: getattr(run, name) for name in changed} == changed
    config = run.model_config()
    assert (config.vocab_size, config.hidden_size, config.num_heads, config.num_hidden_layers) == (24, 12, 3, 2)
    task = run.make_task()
    assert (task.length, task.pairs, task.vocab_size) == (20, 2, 24)


def test_task_options_reach_the_task_of_every_run():
    options = {"random_non_queries": False, "power_a": 0.5}
    experiment = small_experiment(task="mqar", task_options=options, pairs=(1, 2))
    options["power_a"] = 0.25  # the experiment holds a copy
    for run in experiment.runs():
        task = run.make_task()
        assert isinstance(task, MQAR) and (task.random_non_queries, task.power_a) == (False, 0.5)
        assert run.record()["task_options"] == {"random_non_queries": False, "power_a": 0.5}


def test_later_settings_at_the_values_of_old_files_are_not_in_records():
    later, old = {"task_options", "warmup_start", "initializer_range"}, {"initializer_range": 0.02}
    assert not later & small_run(**old).record().keys() and not later & small_experiment(**old).record().keys()
    changed = small_run(warmup_start=0.5, task_options={"padding": "start"}).record()
    assert (changed["warmup_start"], changed["initializer_range"]) == (0.5, 0.05)
    assert changed["task_options"] == {"padding": "start"}


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (TypeError, [("power_a", 1)], "task_options must be a table"),
        (TypeError, {1: 2}, "task_options must be a table"),
        (ValueError, {"pairs": 3}, "task_options must leave out pairs.*set pairs instead"),
        (ValueError, {"power": 1.0}, "an option of task 'mqar'.*did you mean 'power_a'"),
        (ValueError, {"power_a": -1.0}, "power_a"),
        (TypeError, {"random_non_queries": "no"}, "random_non_queries must be True or False"),
    ],
)
def test_bad_task_options_are_refused(error, options, message):
    with pytest.raises(error, match=message):
        small_experiment(task="mqar", task_options=options)


def test_learning_rates_that_differ_have_names_that_differ():
    names = {run.name for run in small_experiment(learning_rates=(0.001, 0.00100000001)).runs()}
    assert len(names) == 2


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ValueError, {"mixer": "gnd"}, "unknown mixer 'gnd'.*did you mean 'gdn'"),
        (TypeError, {"mixer": 3}, "mixer must be the name of a mixer"),
        (ValueError, {"task": "mqr"}, "mqar"),
        (ValueError, {"pairs": 0}, "pairs"),
        (TypeError, {"pairs": 2.0}, "pairs"),
        (ValueError, {"length": 6}, "length must be at least 7"),
        (ValueError, {"vocab_size": 4}, "vocab_size"),
        (ValueError, {"width": 9}, "width must be a multiple of heads, got width 9 and 2 heads"),
        (ValueError, {"steps": 0}, "steps"),
        (TypeError, {"steps": True}, "steps"),
        (ValueError, {"batch_size": -1}, "batch_size"),
        (TypeError, {"layers": 1.5}, "layers"),
        (ValueError, {"learning_rate": 0.0}, "learning_rate"),
        (ValueError, {"learning_rate": float("nan")}, "learning_rate"),
        (ValueError, {"learning_rate": float("inf")}, "learning_rate"),
        (ValueError, {"seed": -1}, "seed"),
        (ValueError, {"weight_decay": -0.1}, "weight_decay"),
        (ValueError, {"warmup_fraction": 1.5}, "warmup_fraction"),
        (ValueError, {"warmup_start": 1.5}, "warmup_start must be a finite number, at least 0 and at most 1"),
        (ValueError, {"initializer_range": 0.0}, "initializer_range must be positive"),
        (ValueError, {"max_gradient_norm": 0.0}, "max_gradient_norm"),
        (ValueError, {"device": "gpu"}, "device"),
    ],
)
def test_bad_settings_are_refused(error, changes, message):
    with pytest.raises(error, match=message):
        small_run(**changes)


@pytest.mark.parametrize("name", ["mixers", "pairs", "learning_rates", "seeds"])
def test_grids_must_be_neither_empty_nor_repeat_themselves(name):
    with pytest.raises(ValueError, match=f"{name} must be a list of at least one value"):
        small_experiment(**{name: ()})
    values = getattr(small_experiment(), name)
    with pytest.raises(ValueError, match=f"{name} must differ"):
        small_experiment(**{name: values * 2})


VARIANTS = ("gdn", MixerChoice("gdn", {"conv_size": 2}), MixerChoice("gdn", {"expand_v": 2}, label="wide values"))


def test_variants_of_a_mixer_have_models_titles_and_files_of_their_own():
    plain, short, wide = small_experiment(mixers=VARIANTS).runs()
    assert [run.model_config().mixer for run in (plain, short, wide)] == [
        {"name": "gdn", "long_memory": "own"},
        {"name": "gdn", "long_memory": "own", "conv_size": 2},
        {"name": "gdn", "long_memory": "own", "expand_v": 2},
    ]
    assert short.title.startswith("gdn:conv_size=2, 2 pairs") and wide.title.startswith("wide values, 2 pairs")
    names = {run.name for run in (plain, short, wide)}
    assert len(names) == 3 and all(re.fullmatch(r"[A-Za-z0-9._+=-]+", name) for name in names)


def test_labels_must_differ():
    with pytest.raises(ValueError, match="mixers must differ.*'gdn' is there twice; give one of them another label"):
        small_experiment(mixers=("gdn", MixerChoice("pgdn", label="gdn")))
    small_experiment(mixers=("gdn", MixerChoice("gdn", label="again")))


def test_a_mixer_without_options_is_recorded_as_before_there_were_labels():
    assert small_run().record()["mixer"] == "gdn" and "label" not in small_run().record()
    recorded = small_experiment(mixers=VARIANTS).record()["mixers"]
    assert recorded == [
        "gdn",
        {"name": "gdn", "options": {"conv_size": 2}, "label": "gdn:conv_size=2"},
        {"name": "gdn", "options": {"expand_v": 2}, "label": "wide values"},
    ]


def test_misspelt_settings_are_refused():
    with pytest.raises(TypeError, match="batchsize"):
        RecallExperiment(batchsize=4)


def test_settings_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_run().steps = 3  # type: ignore[misc]


def test_the_defaults_compare_memories_of_one_size():
    experiment = RecallExperiment()
    channels = experiment.width // experiment.heads
    assert len(experiment.mixers) >= 4
    assert min(experiment.pairs) < channels <= max(experiment.pairs)
    assert isinstance(experiment.runs()[0], RecallRun)


def test_a_block_is_part_of_the_run_and_an_own_option_goes_before_it():
    run = small_run(mixer="gdn:output_gate=sigmoid", block="matched", layers=2, softmax_layers=(1,))
    memory, attention = (options for _, options in run.model_config().mixers())
    assert (memory["output_gate"], memory["long_memory"], memory["conv_size"]) == ("sigmoid", "windows", 4)
    assert (attention["conv_size"], attention["activation"]) == (4, "silu")
    assert run.record()["block"] == "matched" and run.record()["mixer"]["options"] == {"output_gate": "sigmoid"}


def test_records_from_before_there_were_blocks_are_of_the_published_one():
    """With the first values of before, too."""
    run = small_run(layers=2, softmax_layers=(1,))
    assert run.block == "published" and "block" not in run.record()
    assert run.model_config().mixers() == [("gdn", {"long_memory": "own"}), ("softmax", {})]
    with pytest.raises(ValueError, match="block must be one of 'matched', 'published'"):
        small_run(block="equal")
