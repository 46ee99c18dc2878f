"""What the command costs before it works: help without torch, defaults that are the library's, Ctrl-C at any moment."""

import subprocess
import sys
from dataclasses import fields
from types import ModuleType

import pytest
import typer

from fastweights.__main__ import main as process
from fastweights.cli import app, main
from fastweights.data import TASKS
from fastweights.data.registry import ORDER
from fastweights.evaluation import MEASURES, EvaluationSettings
from fastweights.evaluation.suites import SUITES
from fastweights.training import WorkerError, load_recall_file

HELP = """
import sys
from fastweights.cli import main
commands = "recall train convert evaluate generate mixers tasks serve".split()
for arguments in [["--version"], ["--help"], *([name, "--help"] for name in commands)]:
    assert main(arguments) == 0
heavy = [name for name in ("torch", "transformers", "numpy") if name in sys.modules]
assert not heavy, heavy
import fastweights
assert fastweights.ops.delta_rule
assert "torch._dynamo" not in sys.modules
"""


class Interrupted(ModuleType):
    """A module whose import ends with Ctrl-C."""

    def __getattr__(self, name: str) -> None:
        raise KeyboardInterrupt


def test_help_needs_no_torch_and_ops_need_no_compiler():
    ended = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.parametrize(
    ("command", "settings", "renamed"),
    [
        ("recall", load_recall_file(None).parts[""], {"block": "block", "validation": "validation_examples"}),
        ("evaluate", EvaluationSettings(), {"measures": "on"}),
    ],
)
def test_defaults_are_those_of_the_library(command, settings, renamed):
    options = {option.name: option.default for option in typer.main.get_command(app).commands[command].params}
    compared = {field.name for field in fields(settings)} & set(options) - set(renamed.values())
    assert len(compared) > 10
    for name in compared:
        default = getattr(settings, name)
        as_typed = [",".join(map(str, default))] if isinstance(default, tuple) else default
        assert options[name] == as_typed, name


def test_help_names_every_measure_and_suite(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    main(["evaluate", "--help"])
    printed = capsys.readouterr().out
    named = [name for name in MEASURES if name in ORDER or name not in TASKS]
    assert ", ".join(named) in printed and ", ".join(SUITES) in printed


def test_ctrl_c_while_importing(capsys, monkeypatch):
    def stopped(code: int) -> str:
        assert code == 130
        return capsys.readouterr().err

    monkeypatch.setitem(sys.modules, "accelerate", Interrupted("accelerate"))
    assert stopped(main(["train", "run.toml"])) == "fastweights: error: stopped\n"
    monkeypatch.setitem(sys.modules, "fastweights.conversion", Interrupted("fastweights.conversion"))
    assert stopped(main(["convert", "--list"])) == "fastweights: error: stopped\n"
    monkeypatch.setitem(sys.modules, "fastweights.cli", Interrupted("fastweights.cli"))
    assert stopped(process()) == "fastweights: error: stopped\n"


def test_how_recall_goes_on(capsys, monkeypatch):
    def run(error: BaseException, *options: str) -> tuple[int, str]:
        def fails(*_, **__):
            raise error

        monkeypatch.setattr("fastweights.training.run_recall_parts", fails)
        return main(["recall", *options]), capsys.readouterr().err

    goes_on = "the same command continues where it stopped\n"
    anew = "the same command without --overwrite continues where it stopped\n"
    assert run(KeyboardInterrupt()) == (130, f"fastweights: error: stopped; {goes_on}")
    assert run(KeyboardInterrupt(), "--overwrite") == (130, f"fastweights: error: stopped; {anew}")
    assert run(WorkerError("it died", "where\n"), "--overwrite") == (1, f"where\nfastweights: error: it died; {anew}")
