"""Folders of models that a stranger made: `inspect` ends with one line, runs nothing of them and writes nothing."""

import pytest

from tests.cli import hostile_folders
from tests.cli.hostile_folders import MODEL, RUN, TOKENIZER, cases, check_one_line

whole, place, within_limits = hostile_folders.whole, hostile_folders.place, hostile_folders.within_limits  # fixtures
CODE = {name: harm for name, harm in {**MODEL, **TOKENIZER}.items() if "code" in name}


@pytest.mark.parametrize(("command", "harm"), [*cases("inspect", CODE, every="inspect"), *cases("inspect", RUN)])
def test_one_line_and_nothing_else(place, capfd, command, harm):
    check_one_line(place, capfd, command, harm, ["--output", "new"])
