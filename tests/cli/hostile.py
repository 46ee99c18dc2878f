"""What a stranger may do to a folder, and the limits under which a command must cope with it."""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

SECONDS = 10  # no command may take longer
EXTRA_MEMORY = 3 * 2**29  # bytes of address space that a command may take beside what the tests already have
NESTED = "[" * 100_000


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
