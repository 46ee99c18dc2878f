"""Files of a stranger that the commands of the studies read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.hostile import HARMS, check_reading

# What a command reads, and the command.
READ = {
    "out/mqar-small.json": "leaderboard mqar --mixers linear --output out --workers 1",
    "out/C1.json": "reproduce --list --output out",
    "measured/kernels-nvidia-h200.json": "reproduce S1 --measurements measured --output out",
    "measured/training-steps-a.json": "leaderboard training-speed --measurements measured --output out",
    "measured/decode-table-a.json": "leaderboard decoding-speed --measurements measured --output out",
}


@pytest.mark.parametrize("harm", HARMS)
@pytest.mark.parametrize("file", READ)
def test_files_that_a_command_reads(
    file: str, harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    check_reading(tmp_path / file, READ[file], harm, capfd)
