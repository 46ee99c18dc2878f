"""`fastweights mixers`: the list, a page per mixer, mixers of users."""

import inspect

import pytest

from fastweights.cli import main
from fastweights.layers import MIXERS, registry
from fastweights.layers.description import described_options

OWN = '''
from fastweights.layers import Mixer, register_mixer

@register_mixer("mine", summary="one of mine", equation="S = S + 1", source="a thesis, chapter 3", state="H V")
class Mine(Mixer):
    """A layer.

    Args:
        depth: how deep it is
            and no deeper.
    """

    def __init__(self, hidden_size, num_heads, depth, width=7):
        super().__init__()
'''


def shown(capsys, *arguments):
    assert main(["mixers", *arguments]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "…" not in printed.out
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    return printed.out


def flat(text):
    return " ".join(text.split())


def test_the_list_has_name_state_and_one_line(capsys, monkeypatch):
    shown(capsys)
    monkeypatch.setenv("COLUMNS", "160")
    assert main(["mixers"]) == 0
    rows = {line.split()[0]: flat(line) for line in capsys.readouterr().out.splitlines() if line.strip()}
    for name, spec in MIXERS.items():
        assert rows[name] == f"{name} {spec.state} {spec.summary}"


@pytest.mark.parametrize("name", ["gdn", "softmax", "gka", "lattice"])
def test_a_page_has_equation_source_state_cost_and_options(capsys, name):
    page, spec = flat(shown(capsys, name)), MIXERS[name]
    for text in (f"equation {spec.equation}", f"source {spec.source}", f"state {spec.state}", f"cost {spec.cost}"):
        assert flat(text) in page
    for option in described_options(spec):
        assert f" {option.name} {option.default} " in page, option


def test_defaults_are_those_of_the_name():
    defaults = {option.name: option.default for option in described_options(MIXERS["gla"])}
    assert (defaults["decay"], defaults["output_gate"], defaults["preconditioner"]) == ("channel", "silu", "none")


@pytest.mark.parametrize("name", MIXERS)
def test_every_option_is_explained_and_every_cost_is_stated(name):
    spec = MIXERS[name]
    options = described_options(spec)
    parameters = set(inspect.signature(spec.layer).parameters) - {"hidden_size", "num_heads"}
    assert {option.name for option in options} == parameters
    assert all(option.meaning and option.default for option in options) and (spec.cost or name not in registry.ORDER)


def test_mixers_of_users(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    (tmp_path / "own.py").write_text(OWN)
    own = ("--import", str(tmp_path / "own.py"))
    assert "mine H V one of mine" in flat(shown(capsys, *own))
    page = flat(shown(capsys, "mine", *own))
    assert "source a thesis, chapter 3" in page and "cost not stated" in page
    assert "depth required how deep it is and no deeper." in page and "width 7" in page


def test_an_unknown_name_is_one_line(capsys):
    assert main(["mixers", "gnd"]) == 2
    error = capsys.readouterr().err
    assert "unknown mixer 'gnd' (did you mean 'gdn'?)" in error and error.count("\n") == 1
