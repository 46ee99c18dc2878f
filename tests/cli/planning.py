"""What a dry run of any command must do: say what the command would do, or refuse it, and write nothing."""

from fastweights.cli import main

__all__ = ["check_plan", "check_refused_plan"]


def contents(folder):
    return {path: (path.lstat().st_size, path.lstat().st_mtime_ns) for path in folder.rglob("*")}


def check_plan(folder, capsys, command, words):
    """The dry run says these words."""
    before = contents(folder)
    assert main([*command.split(), "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and all(word in printed.out for word in words), printed.out
    assert printed.out.endswith("Nothing was written.\n") and contents(folder) == before


def check_refused_plan(folder, capsys, command):
    """The dry run refuses what the command would, in one line."""
    before = contents(folder)
    assert main([*command.split(), "--dry-run"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and contents(folder) == before
