"""Table 2 of Preconditioned DeltaNet: each rule is a named mixer of the class that its solve names, with its decay, gain and
preconditioner as options. test_memory_layers.py compares what each computes with its formula."""

import re
from pathlib import Path

import pytest

from fastweights.layers import MIXERS, LinearAttention, build_mixer
from fastweights.layers.delta_net import DeltaNet

RULES = Path(__file__).parents[2] / "docs" / "rules.md"
CLASSES = {"online": DeltaNet, "offline": LinearAttention}
TABLE = {  # decay, gain, preconditioner, solve
    "deltanet": ("none", "beta", None, "online"),
    "gdn": ("head", "beta", None, "online"),
    "kda": ("channel", "beta", None, "online"),
    "linear": ("none", None, None, "offline"),
    "retnet": ("fixed", None, None, "offline"),
    "gla": ("channel", None, None, "offline"),
    "comba": ("head", "beta", None, "online"),
    "longhorn": ("none", "longhorn", None, "online"),
    "nlms": ("none", "nlms", None, "online"),
    "efla": ("none", "exact", None, "online"),
    "pdn": ("none", "beta", "key", "online"),
    "pgdn": ("head", "beta", "key", "online"),
    "pkda": ("channel", "beta", "key", "online"),
    "pla": ("none", None, "query", "offline"),
    "pmamba2": ("head", "beta", "query", "offline"),
    "pgla": ("channel", None, "query", "offline"),
}


@pytest.mark.parametrize("name", TABLE)
def test_every_rule_is_a_mixer_of_the_class_of_its_solve(name):
    decay, gain, preconditioner, solve = TABLE[name]
    options = build_mixer(name, hidden_size=16, num_heads=2).options
    assert MIXERS[name].layer is CLASSES[solve]
    assert (options.decay, options.gain, options.preconditioner) == (decay, gain, preconditioner)
    if solve == "online":
        assert (options.state_feedback, options.output_correction) == (
            (True, 0.02) if name == "comba" else (False, None)
        )


def test_the_documented_table_is_this_one():
    section = RULES.read_text().split("### Preconditioned DeltaNet's table 2")[1].split("Decay, gain and")[0]
    rows = re.findall(r"^\| `([\w-]+)` \| (\w+) \| (\w+).* \| ([\w ]+) \| (\w+) \|$", section, flags=re.M)
    written = {
        name: (decay, None if gain == "none" else gain, how if how in ("key", "query") else None, solve)
        for name, decay, gain, how, solve in rows
    }
    assert written == TABLE and dict((row[0], row[3]) for row in rows)["comba"] == "output correction"
