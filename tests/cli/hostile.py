"""What a stranger may do to a folder, and the limits under which a command must cope with it."""

from __future__ import annotations

import json
import os
import pty
import re
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fastweights.cli import main

from ..evaluation.small import save

SECONDS = 10  # no command may take longer
EXTRA_MEMORY = 3 * 2**29  # bytes of address space that a command may take beside what the tests already have
NESTED = "[" * 100_000
ESCAPE = "\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\u202e"
SHOWN = r"\x1b]0;title\x07\x1b[2J\x9b31m\r\x08\u202e"
# What Rich itself sends: colours, movements within a bar, and a cursor that is hidden while it is drawn.
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
RICH = re.compile(r"\x1b\[[0-9;]*[mAKG]|\x1b\[\?25[lh]|\r(?=\n|\x1b\[|$)")


def set_keys(name: str, **values: Any) -> Callable[[Path], None]:
    """Change keys of a JSON file."""

    def harm(folder: Path) -> None:
        path = folder / name
        known = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**known, **values}))

    return harm


def write(name: str, content: bytes | str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return harm


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:-50])


def link(name: str, target: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return harm


def pipe(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return harm


def subfolder(name: str) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).mkdir()

    return harm


def sparse(name: str) -> Callable[[Path], None]:
    """A file of 3 GB of zeros that takes no room."""

    def harm(folder: Path) -> None:
        os.truncate(folder / name, 3 * 2**30)

    return harm


def tokens(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def harm(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return harm


@contextmanager
def limits(seconds: int = SECONDS) -> Iterator[None]:
    def ended(*_: Any) -> None:
        pytest.fail(f"takes more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, ended)
    signal.alarm(seconds)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if Path("/proc").exists():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + EXTRA_MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def listing(folder: Path) -> set[tuple[Path, int]]:
    """Everything below a folder, with the time it was written."""
    return {(path, path.lstat().st_mtime_ns) for path in folder.rglob("*") if not path.is_dir()}


HARMS: dict[str, Callable[[str], Callable[[Path], None]]] = {
    "a pipe": pipe,
    "a device": lambda name: link(name, "/dev/zero"),
    "nested": lambda name: write(name, NESTED),
    "something else": lambda name: write(name, '{"format": 1, "x": 3}'),
    "rows of something else": lambda name: write(
        name,
        json.dumps({"format": 1, "rows": {"gdn-write 1": 3}, "comparisons": [3], "part": 3, "size": [], "setting": 3}),
    ),
    "3 GB": lambda name: lambda folder: (write(name, b"")(folder), sparse(name)(folder)),
}
FOLDERS = ("model", "out", "measured", "trained")  # of files that a command reads


def run(command: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capfd.readouterr()
    with limits():
        code = main(command.split())
    return code, capfd.readouterr().err


def check_one_line(code: int, error: str) -> None:
    assert code in (1, 2) and error.startswith("fastweights: error: ") and error.count("\n") == 1, error
    assert error.rstrip("\n").isprintable() and len(error) < 1200, error


def check_reading(path: Path, command: str, harm: str, capfd: pytest.CaptureFixture[str]) -> None:
    """A harmed file is refused with one line that names it, and nothing is written."""
    place = path.parents[1] if path.parent.name in FOLDERS else path.parent
    path.parent.mkdir(exist_ok=True)
    if path.parent.name == "model":
        save(path.parent)
    HARMS[harm](path.name)(path.parent)
    before = listing(place)
    code, error = run(command, capfd)
    check_one_line(code, error)
    left = {entry for entry in listing(place) if entry[0].name != ".lock"}
    assert (path.name in error or path.parent.name in error) and left == before


def on_a_terminal(work: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal gets, on both streams."""
    ours, theirs = pty.openpty()
    shown = b""
    with monkeypatch.context() as patched, open(theirs, "w") as terminal:
        patched.setattr(sys, "stdout", terminal)
        patched.setattr(sys, "stderr", terminal)
        work()
        terminal.flush()
        os.set_blocking(ours, False)
        try:
            while piece := os.read(ours, 65536):
                shown += piece
        except BlockingIOError:  # there is no more
            pass
    os.close(ours)
    return shown.decode().replace("\r\n", "\n")


def check_harmless(shown: str) -> None:
    assert not CONTROLS.search(RICH.sub("", shown)), repr(shown)
