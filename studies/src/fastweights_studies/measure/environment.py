"""What a result file says of where it was measured, how it is written, and the option for a user's mixers."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fastweights
from fastweights.environment import cpu_model
from fastweights.files import write_bytes
from fastweights.layers import import_mixers
from fastweights_studies.places import ROOT

MEASURED = ("fastweights", "studies/src")
OPS = ("fastweights/kernels", "fastweights/ops", "studies/src/fastweights_studies/measure/judge")


def commit(root: Path = ROOT) -> str:
    """The commit measured, with a mark when its Python files differed; "unknown" outside a checkout."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    if not (root / ".git").exists():
        return "unknown"

    try:
        changed = git("status", "--porcelain", "--", *(f"{folder}/*.py" for folder in MEASURED))
        return git("rev-parse", "HEAD") + (" with uncommitted changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def source(root: Path = ROOT) -> str:
    """A hash of the Python files of the ops and of what judges them: the same as long as none of them changes."""
    total = hashlib.sha256()
    for path in sorted(path for folder in OPS for path in (root / folder).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def digest(content: Any) -> str:
    """A checksum of results, which a figure keeps, so that a test sees when it shows others."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe() -> dict[str, Any]:
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "source": source(),
        "processor": cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "fastweights": fastweights.__version__,
    }


def file_suffix(device: str) -> str:
    """The name of a device as result files have it."""
    return device.replace(" ", "-").lower()


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, (json.dumps(content, indent=1) + "\n").encode())


def rows_in(path: Path, rows: str) -> dict[str, Any]:
    """What a result file holds under `rows` at this moment; other processes may write it too."""
    return json.loads(path.read_text())[rows] if path.exists() else {}


def kept_rows(folder: Path, name: str, rows: str) -> tuple[Path, str, dict[str, Any]]:
    """The result file `name` for this machine's GPU, the name of the GPU, and what the file holds under `rows` already."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs an NVIDIA GPU, and torch sees none")
    device = torch.cuda.get_device_name()
    path = folder / f"{name}-{file_suffix(device)}.json"
    return path, device, rows_in(path, rows)


def parse_with_mixers(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a command, once the modules of its option --import have registered their mixers."""
    parser.add_argument(
        "--import", dest="imports", action="append", default=[], metavar="MODULE",
        help="module or .py file that registers mixers of your own; may be repeated",
    )  # fmt: skip
    arguments = parser.parse_args()
    try:
        import_mixers(arguments.imports)
    except ValueError as error:
        parser.error(str(error))
    return arguments
