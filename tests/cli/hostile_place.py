"""A current folder with files named as modules of Python and of the libraries, which leave a trace where they are executed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

__all__ = ["hostile", "nothing_ran", "run"]

# Modules of Python, of PyTorch and of the library's dependencies, which every process imports at some time.
NAMES = (
    *(
        "torch",
        "numpy",
        "json",
        "random",
        "pickle",
        "socket",
        "struct",
        "tempfile",
        "typing",
        "hashlib",
        "datetime",
        "datasets",
    ),
    *("dataclasses", "multiprocessing", "sitecustomize", "transformers", "rich", "typer", "filelock", "safetensors"),
    *("tokenizers", "matplotlib", "accelerate", "psutil", "vllm", "wandb", "tensorboard"),
)


@pytest.fixture
def hostile(tmp_path, monkeypatch) -> Path:
    """The current folder, with files whose execution leaves a trace and ends the process."""
    folder = tmp_path / "hostile"
    (folder / "fastweights").mkdir(parents=True)
    leaves_a_trace = f"open({str(tmp_path / 'ran')!r}, 'a').write(__name__ + ' ')\nraise SystemExit(99)\n"
    for name in (*NAMES, "fastweights/__init__"):
        (folder / f"{name}.py").write_text(leaves_a_trace)
    monkeypatch.chdir(folder)
    return folder


def run(*command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    """A command in the current folder. path: PYTHONPATH."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    if path:
        variables["PYTHONPATH"] = path
    return subprocess.run(command, capture_output=True, text=True, env={**variables, "OMP_NUM_THREADS": "1"})


def nothing_ran(folder: Path) -> bool:
    trace = folder.parent / "ran"
    return not trace.exists() or pytest.fail(f"executed: {trace.read_text()}")
