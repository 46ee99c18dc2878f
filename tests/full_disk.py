"""Disks that are full, for real: a limit on the size of files, and a file system of a few pages."""

import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process, or of one that it starts, can become larger than `size` bytes: EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def on_small_disk(folder: str, kilobytes: int, command: list[str]) -> list[str]:
    """The command with a file system of that size at `folder`, which only it sees: ENOSPC."""
    mount = f'mount -t tmpfs -o size={kilobytes}k small "$0" && exec "$@"'
    return ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, folder, *command]


def small_disks_work() -> bool:
    """Whether this machine lets a user mount a file system in a namespace of its own."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run(on_small_disk("/mnt", 16, ["true"]), capture_output=True).returncode == 0
