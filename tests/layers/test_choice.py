"""Mixers with options and labels, as a command's text names them."""

import pytest

from fastweights.layers import MixerChoice, parse_mixers
from fastweights.models import FastWeightsConfig


def parsed(text):
    return [(choice.name, choice.options, choice.label) for choice in parse_mixers(text)]


def test_names_options_and_labels():
    small = {"conv_size": 2, "expand_v": 2}
    assert parsed("gdn") == [("gdn", {}, "gdn")]
    assert parsed("gdn,gdn:conv_size=2,expand_v=2,pgdn") == [
        ("gdn", {}, "gdn"),
        ("gdn", small, "gdn:conv_size=2,expand_v=2"),
        ("pgdn", {}, "pgdn"),
    ]
    assert parsed("gdn:conv_size=2, expand_v=2@small, linear:conv_size=2@other,gdn@plain") == [
        ("gdn", small, "small"),
        ("linear", {"conv_size": 2}, "other"),
        ("gdn", {}, "plain"),
    ]


def test_values_are_json_or_text():
    text = "gdn:output_gate=none,negative_eigenvalues=true,expand_v=0.5,backend=torch"
    options = {"output_gate": None, "negative_eigenvalues": True, "expand_v": 0.5, "backend": "torch"}
    ((_, found, label),) = parsed(text)
    assert found == options and label == text
    assert parsed(text.replace("none", "null"))[0][1] == options
    assert MixerChoice("gdn", options).label == text


def test_a_value_may_be_a_list():
    text = "palimpsa-d:b_scale=[0.1, 1.0],conv_size=2@drawn,gdn"
    assert parsed(text) == [("palimpsa-d", {"b_scale": [0.1, 1.0], "conv_size": 2}, "drawn"), ("gdn", {}, "gdn")]
    choice = MixerChoice("palimpsa-d", {"b_scale": [0.1, 1.0]})
    assert parse_mixers(f"gdn,{choice.label}") == (MixerChoice("gdn"), choice)


def test_a_choice_is_the_mixer_of_a_model():
    (choice,) = parse_mixers("gdn:conv_size=2@small")
    config = FastWeightsConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_heads=2, mixer=choice.entry)
    assert config.mixers() == [("gdn", {"conv_size": 2})]
    assert MixerChoice("gdn").entry == "gdn"


def test_a_choice_is_given_as_text_as_table_or_itself():
    small = MixerChoice("gdn", {"conv_size": 2}, "small")
    table = {"name": "gdn", "options": {"conv_size": 2}, "label": "small"}
    assert all(MixerChoice.of(given) == small for given in (small, "gdn:conv_size=2@small", table, small.record()))
    assert MixerChoice.of({"name": "gdn"}) == MixerChoice.of("gdn") == MixerChoice("gdn")
    assert MixerChoice("gdn").short == "gdn" and small.short is small


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("gdn,pgdn", ValueError, "must be one NAME.*got 'gdn,pgdn'; list them one by one"),
        ({"name": "gdn", "lable": "a"}, ValueError, r"mixer as a table has no key 'lable' \(did you mean 'label'\?\)"),
        ({"label": "a"}, ValueError, "must have the key 'name'"),
        (3, TypeError, "mixer must be the name of a mixer"),
    ],
)
def test_what_is_no_choice_is_refused(given, error, message):
    with pytest.raises(error, match=message):
        MixerChoice.of(given)


@pytest.mark.parametrize(
    ("choice", "entry", "kept"),
    [
        ("gka:ridge=0.01@a", {"name": "gka", "gate_bias": True, "ridge": 0.5}, {"gate_bias": True, "ridge": 0.01}),
        # the same option of the same class of options
        ("gdn", {"name": "gka", "gate_bias": True, "conv_init": "normal"}, {"conv_init": "normal"}),
        (
            "palimpsa-m",
            {"name": "gdn", "conv_init": "normal", "expand_v": 2.0},
            {"conv_init": "normal", "expand_v": 2.0},
        ),
        ("gdn", {"name": "palimpsa-m", "long_memory": "steps", "norm_groups": 2}, {"long_memory": "steps"}),
        ("kda", {"name": "gdn", "negative_eigenvalues": True}, {"negative_eigenvalues": True}),
        # of one name, another meaning
        ("gdn", {"name": "lattice", "decay": "none", "activation": "none"}, {"activation": "none"}),
        ("mesa", {"name": "gka", "ridge": 0.02, "iterations": 20}, {}),
        ("vla", {"name": "pgdn", "ridge": 0.3}, {}),
        # what the mixer is by its name
        ("longhorn", {"name": "gdn", "normalize_qk": True, "gain": "unit"}, {}),
        ("softmax", {"name": "gdn", "conv_size": 2, "head_dim": 8}, {"head_dim": 8}),
        ("gdn:conv_size=3", "gka", {"conv_size": 3}),
    ],
)
def test_options_of_another_mixer_hold_where_they_mean_the_same(choice, entry, kept):
    made = MixerChoice.of(choice).in_place_of(entry)
    name = choice.partition(":")[0]
    assert made == ({"name": name, **kept} if kept else name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gdn:conv_sise=2", r"has no option 'conv_sise' \(did you mean 'conv_size'\?\)"),
        ("gnd:conv_size=2", r"unknown mixer 'gnd' \(did you mean 'gdn'\?\)"),
        ("gdn:num_heads=2", "has no option 'num_heads'"),
        ("gdn,", "unknown mixer ''"),
        ("", "unknown mixer ''"),
        ("gdn:", "options of a mixer must be NAME=VALUE.*got ''"),
        ("gdn:conv_size=", "options of a mixer must be NAME=VALUE.*got 'conv_size='"),
        ("gdn:=2", "options of a mixer must be NAME=VALUE.*got '=2'"),
        ("gdn,conv_size=2", "option 'conv_size=2' belongs to no mixer.*gdn:conv_size=2"),
        ("conv_size=2", "option 'conv_size=2' belongs to no mixer"),
        ("gdn:conv_size=2@a,expand_v=2", "option 'expand_v=2' belongs to no mixer.*before the label"),
        ("gdn:conv_size=2,conv_size=3", "option 'conv_size' is there twice"),
        ("palimpsa-d:b_scale=[0.1,1.0", "unknown mixer '1.0'|belongs to no mixer"),
        ("gdn@", "the label after @ must not be empty"),
        (f"gdn@{'x' * 101}", "label of a mixer must be one line of at most 100 characters"),
        ("gdn:expand_v=NaN", "options of mixer 'gdn' must be values that JSON can hold"),
    ],
)
def test_what_does_not_follow_the_grammar_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        parse_mixers(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": 3}, "mixer must be the name of a mixer"),
        ({"name": "gdn", "options": [1]}, "options of mixer 'gdn' must be a table"),
        ({"name": "gdn", "label": 3}, "label must be a string"),
    ],
)
def test_wrong_kinds_are_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        MixerChoice(**arguments)


def test_a_choice_cannot_be_changed_through_the_dict_that_it_was_made_from():
    options = {"conv_size": 2}
    choice = MixerChoice("gdn", options)
    options["conv_size"] = 3
    assert choice.options == {"conv_size": 2} and hash(choice) == hash(MixerChoice("gdn", {"conv_size": 2}))
