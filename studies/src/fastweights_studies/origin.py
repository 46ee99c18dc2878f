"""Where and when this process measures."""

from __future__ import annotations

import subprocess
from datetime import datetime, timezone
from pathlib import Path

from fastweights.environment import machine, versions

from .places import ROOT
from .record import Origin

__all__ = ["find_commit", "find_origin"]

MEASURED = ("fastweights", "studies/src")


def find_origin(device: str) -> Origin:
    """The origin of what this process measures at this moment on a torch device."""
    place = machine(device)
    commit, changed = find_commit()
    return Origin(
        device=place.get("gpu") or place["cpu"],
        versions=versions(),
        commit=commit,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        changed=changed,
    )


def find_commit(root: Path = ROOT) -> tuple[str, bool]:
    """The commit of a checkout, and whether its Python files differ from it; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    if not (root / ".git").exists():
        return "unknown", False
    try:
        changed = git("status", "--porcelain", "--", *(f"{folder}/*.py" for folder in MEASURED))
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown", False
