"""Where and when a script measures, and the option for a user's mixers."""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import fastweights
from fastweights.environment import cpu_model, installed_version
from fastweights.layers import import_mixers
from fastweights_studies.origin import find_commit
from fastweights_studies.places import ROOT
from fastweights_studies.record import Origin

__all__ = [
    "describe",
    "describe_checkout",
    "digest",
    "find_gpu",
    "hash_files",
    "parse_with_mixers",
]

OPS = ("fastweights/kernels", "fastweights/ops", "studies/src/fastweights_studies/measure/judge")
PACKAGES = {"triton": ("triton",), "fla": ("fla-core",)}  # beside torch, where they are installed


def hash_files(root: Path = ROOT) -> str:
    """A hash of the Python files of the ops and of what judges them: the same as long as none of them changes."""
    total = hashlib.sha256()
    for path in sorted(path for folder in OPS for path in (root / folder).rglob("*.py")):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def digest(content: Any) -> str:
    """A checksum of results, which a figure keeps, so that a test sees when it shows others."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def describe(device: str | None = None, **versions: str) -> Origin:
    """Where and when this process measures. device: the processor if not given; versions: of more libraries.

    Among the versions, "files" is the hash of the ops' files.
    """
    return describe_checkout(ROOT, device, versions)


def describe_checkout(root: Path, device: str | None = None, versions: Mapping[str, str] = {}) -> Origin:
    """As `describe`, of another checkout of the repository that this machine measures."""
    found = {name: installed_version(*packages) for name, packages in PACKAGES.items()}
    head, changed = find_commit(root)
    return Origin(
        device=device or cpu_model(),
        versions={
            "fastweights": fastweights.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            **{name: version for name, version in found.items() if version is not None},
            **versions,
            "files": hash_files(root),
        },
        commit=head,
        date=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        changed=changed,
    )


def find_gpu() -> str:
    """The name of this machine's GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("this script needs an NVIDIA GPU, and torch sees none")
    return torch.cuda.get_device_name()


def parse_with_mixers(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a command, once the modules of its option --import have registered their mixers."""
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="module or .py file that registers mixers of your own; may be repeated",
    )
    arguments = parser.parse_args()
    try:
        import_mixers(arguments.imports)
    except ValueError as error:
        parser.error(str(error))
    return arguments
