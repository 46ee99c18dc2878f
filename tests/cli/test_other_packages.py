"""Commands of other packages: the example of docs/commands.md, found by its entry point, behaves as the library's own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer

from fastweights.cli.plugins import ELSEWHERE, add_commands

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
OWN_MIXER = """
from fastweights.layers import register_mixer
from fastweights.layers.linear_attention import LinearAttention

register_mixer("own-linear", layer=LinearAttention, summary="s", equation="e", source="s", state="H K V")
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The commands of packages, among them one that is installed in a folder and one that does not load."""
    section = PAGE.read_text().partition("## A command of your own")[2]
    (source,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    (points,) = re.findall(r"^    (\[project\.entry-points.*?)\n\n", section, re.DOTALL | re.MULTILINE)
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "states.py").write_text(source)
    group, states = re.fullmatch(r'\[project\.entry-points\."(.*)"\]\s+states = "(.*)"', points).groups()
    about = tmp_path / "my_package-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: my_package\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{group}]\nstates = {states}\nbroken = my_package.missing:command\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = typer.Typer()
    with pytest.warns(
        UserWarning, match=r"^command broken \(my_package.missing:command\) does not load: ModuleNotFound"
    ):
        add_commands(made)
    yield made
    for name in ("my_package", "my_package.states"):
        sys.modules.pop(name, None)


def run(app: typer.Typer, *arguments: str) -> int:
    return app(["states", *arguments], standalone_mode=False) or 0


def test_the_example_of_the_page(app, capsys, tmp_path):
    assert run(app, "--lengths", "10,20") == 0
    assert "deltanet: 2,048, 2,048" in capsys.readouterr().out.splitlines()
    mixer = tmp_path / "own_mixer.py"
    mixer.write_text(f"print('text of the module')\n{OWN_MIXER}")
    assert run(app, "--lengths", "10", "--json", "--import", str(mixer)) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["own-linear"] == [2048] and "text of the module" in printed.err
    assert run(app, "--lengths", "10", "--import", "no_such_module") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fastweights: error: cannot import no_such_module: there is no such module")


def test_its_help_is_plain(app, capsys):
    assert run(app, "--help") == 0
    assert "Show how many numbers each memory keeps of a sequence." in capsys.readouterr().out


def test_what_is_missing_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "path", [place for place in sys.path if not list(Path(place).glob("fastweights_studies*"))]
    )
    made = typer.Typer()
    add_commands(made)
    name = next(iter(ELSEWHERE))
    assert made([name, "--any", "thing"], standalone_mode=False) == 2
    assert f"{name} needs fastweights-studies; install it with pip install" in capsys.readouterr().err
