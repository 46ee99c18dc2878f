"""`--dry-run`, `--quiet` and `-h` of the studies' commands."""

import pytest

from fastweights.cli import main
from tests.cli.planning import check_plan, check_refused_plan
from tests.evaluation.small import TEXT, save


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("inspect model --text text.txt", ["tokens, at most: 1,024", "text: text.txt", "output: model/inspection"]),
        ("leaderboard rules tracking --mixers gdn --output out", ["trainings per mixer, at most: 3", "tracking-small.json"]),
        ("reproduce C1 C2 --output out", ["name: C1", "name: C2", "output: out/C2.json", "cost: "]),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_and_writes_nothing(folder, capsys, command, words):
    (folder / "model" / ".inspection.0badcafe.partial").mkdir()  # what a killed command leaves
    check_plan(folder, capsys, command, words)


@pytest.mark.parametrize(
    "command",
    [
        "leaderboard rules --mixers softmax",
        "leaderboard tracking --column pairs",
        "inspect model --measures nothing",
        "inspect model --every 0",
        "inspect model --output text.txt",
        "inspect text.txt",
    ],
)
def test_a_dry_run_refuses_what_the_command_would(folder, capsys, command):
    check_refused_plan(folder, capsys, command)


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        "inspect model --text text.txt --tokens 8 --every 4 --measures norms",
        "reproduce C2 --output out",
        "leaderboard decoding-speed --mixers gdn --measurements text --output out",
    ],
)
def test_quiet_commands_leave_standard_error_alone(folder, capsys, command):
    for option in ("-q", "--quiet"):
        assert main([*command.split(), option]) == 0
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out


@pytest.mark.parametrize("command", ["inspect", "reproduce", "leaderboard"])
def test_the_short_name_of_help(capsys, command):
    assert main([command, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([command, "--help"]) == 0
    assert capsys.readouterr().out == short and "Usage: fastweights" in short
