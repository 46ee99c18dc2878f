"""The block around a rule: what a choice keeps, and what a mixer of a user's own is given.

studies/tests/leaderboard/test_blocks.py builds every mixer of the library in every block.
"""

import pytest

from fastweights.layers import BLOCKS, MemoryLayer, Mixer, MixerChoice, MixerOptions, in_block, register_mixer, registry
from fastweights.ops import linear_attention

HEADS = 4


def options(text):
    return in_block(MixerChoice.of(text), "matched", HEADS).options


def test_every_rule_has_the_convolutions_and_none_a_gate():
    assert {"conv_size": 4, "activation": "silu"}.items() <= options("softmax").items()
    gdn = options("gdn")
    assert (gdn["conv_size"], gdn["output_gate"], gdn["skip_init"], gdn["long_memory"]) == (4, None, None, "windows")
    assert options("palimpsa-m")["norm_groups"] == HEADS


def test_options_that_were_chosen_stay():
    choice = in_block(MixerChoice("gdn", {"conv_size": 2, "output_gate": "sigmoid"}, "mine"), "matched", HEADS)
    assert (choice.label, choice.options["conv_size"], choice.options["output_gate"]) == ("mine", 2, "sigmoid")
    assert options("gka:ridge=0.01@a")["ridge"] == 0.01


def test_windows_go_to_rules_that_learn_a_decay():
    assert options("deltanet:decay=head")["long_memory"] == "windows"
    assert "long_memory" not in options("deltanet")
    assert options("pdn")["long_memory"] == "windows"  # of its preconditioner
    assert "long_memory" not in options("pdn:tie_preconditioner=true")
    for name, own in (("gdn", {"long_memory": "own"}), ("deltanet", {})):
        windows = in_block(MixerChoice(name), "with-own-windows", HEADS).options
        assert {key: windows[key] for key in windows.keys() & {"long_memory"}} == own


def test_the_published_block_has_the_first_values_of_authors():
    wanted = {
        "gdn": {"long_memory": "own"}, "deltanet": {}, "deltanet:decay=head": {"long_memory": "own"}, "softmax": {},
        "pdn": {"long_memory": "own"}, "retnet": {}, "rwkv7": {}, "vla-deltanet": {},
        "mamba2": {"long_memory": "own"}, "palimpsa-d": {"long_memory": "own", "skip_init": 1.0},
    }  # fmt: skip
    for text, added in wanted.items():
        choice = MixerChoice.of(text)
        found = in_block(choice, "published", HEADS)
        assert (found.options, found.label) == ({**added, **choice.options}, choice.label)
    asked = MixerChoice("gdn", {"long_memory": "windows"})
    assert in_block(asked, "published", HEADS) == asked
    assert list(BLOCKS)[:2] == ["matched", "published"]
    with pytest.raises(ValueError, match="block must be one of"):
        in_block(MixerChoice("gdn"), "equal", HEADS)


class Few(MixerOptions):
    """hidden_size, num_heads and head_dim alone."""


class OwnMemory(MemoryLayer):
    op = linear_attention


class OwnFew(Mixer):
    Options = Few


def test_a_mixer_of_your_own_takes_the_options_that_it_has(monkeypatch):
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    for name, layer in {"memory": OwnMemory, "few": OwnFew, "none": type("OwnNone", (Mixer,), {})}.items():
        register_mixer(name, summary="s", equation="e", source="s", state="H K V")(layer)
    memory = options("memory")
    assert (memory["conv_size"], memory["output_gate"]) == (4, None) and "long_memory" not in memory
    assert options("few") == options("none") == {}
