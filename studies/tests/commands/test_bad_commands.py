"""Bad commands of the studies: each ends soon with one line on stderr, nothing written."""

import pytest

from fastweights.cli import main
from tests.cli import refusing
from tests.cli.refusing import IMPORTS, LONG, check_refusal

place, refused = refusing.place, refusing.refused  # fixtures
# (command, a word of the message)
COMMANDS = [
    *[
        (f"{command} --import {name}", IMPORTS[name][1])
        for command in ("inspect model", "leaderboard rules")
        for name in ("exits.py", "nothing.py")
    ],
    ("leaderboard rules tracking --mixers gdn:backend=triton", "backend 'triton' needs"),
    (f"inspect model --text text.txt --output {LONG}", "choose a shorter name"),
    (f"inspect {LONG}", "choose a shorter name"),
    ("inspect model --text empty.txt", "at least 2 tokens"),
    ("inspect model --output text.txt/new", "must be in a folder"),
    ("inspect nowhere", "nowhere"),
    ("inspect model --measures widow", "'window'"),
    ("inspect model --tokens 0", "tokens must be"),
    ("inspect model --tokens 99999999999999999999999", "tokens"),
    ("inspect model --every 0", "every must be"),
    ("inspect model --text nowhere.txt", "nowhere.txt"),
    ("inspect model --output text.txt", "text.txt"),
]


@pytest.mark.parametrize(("command", "word"), COMMANDS, ids=[command[:80] for command, _ in COMMANDS])
def test_a_bad_command_is_one_line(refused, command, word):
    check_refusal(refused, command, word)


@pytest.mark.parametrize("command", ["inspect", "reproduce", "leaderboard"])
def test_help_at_80_columns_cuts_nothing(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    main([command, "--help"])
    printed = capsys.readouterr().out
    assert "Usage: fastweights " in printed and "…" not in printed
