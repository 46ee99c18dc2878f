"""No command executes files of the current folder, in no process that it starts, and all of them run the same fastweights."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

import pytest

from fastweights.layers import import_mixers
from fastweights.safe_path import same_path

from ..evaluation.small import save
from . import hostile_place
from .hostile_place import nothing_ran, run

hostile = hostile_place.hostile  # a fixture

RECALL = (
    "recall --task mqar-shuffled --pairs 2 --vocab-size 16 --width 8 --layers 1 --steps 2 --batch-size 2 --test-examples 2 "
    "--learning-rates 0.01 --mixers linear,gdn --workers 2 --output out"
)


def test_the_command(hostile):
    """One that starts no process."""
    ended = run(str(Path(sysconfig.get_path("scripts"), "fastweights")), "mixers", "gdn")
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_recall_with_workers(hostile):
    ended = run(str(Path(sysconfig.get_path("scripts"), "fastweights")), *RECALL.split())
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr
    assert (hostile / "out" / "results.json").exists()


@pytest.mark.slow
def test_python_m(hostile):
    """Python itself finds the package, in the current folder where one is there."""
    (hostile / "fastweights" / "__init__.py").unlink()
    (hostile / "fastweights").rmdir()
    ended = run(sys.executable, "-m", "fastweights", *RECALL.split())
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_the_server_and_its_processes(hostile, tmp_path):
    """A vllm that notes where it is started from, and what a process of its own imports, stands for the server."""
    save(tmp_path / "model")
    module = tmp_path / "installed" / "vllm" / "entrypoints" / "launchers" / "api_server" / "entry.py"
    module.parent.mkdir(parents=True)
    for folder in (*module.parents[:4],):
        (folder / "__init__.py").touch()
    module.write_text(
        "import subprocess, sys, numpy, json, random\n"
        "subprocess.run([sys.executable, '-c', 'import numpy, json, random'], check=True)\nprint('served')\n"
    )
    metadata = tmp_path / "installed" / "vllm-0.32.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0\n")
    command = str(Path(sysconfig.get_path("scripts"), "fastweights"))
    ended = run(command, "serve", str(tmp_path / "model"), path=str(tmp_path / "installed"))
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr
    assert ended.stdout == "served\n"


def test_a_package_of_the_current_folder_beside_an_installed_one_is_refused(tmp_path, monkeypatch):
    """`python -m` takes the one in the current folder; its processes would run the other."""
    checkout = tmp_path / "fastweights"
    checkout.mkdir()
    (checkout / "__init__.py").touch()
    (checkout / "__main__.py").write_bytes((Path(__file__).parents[2] / "fastweights" / "__main__.py").read_bytes())
    (checkout / "cli.py").write_text("import sys\n\n\ndef main():\n    print(*sys.path, sep='\\n')\n    return 0\n")
    (checkout / "safe_path.py").write_bytes((Path(__file__).parents[2] / "fastweights" / "safe_path.py").read_bytes())
    monkeypatch.chdir(tmp_path)
    ended = run(sys.executable, "-m", "fastweights")
    assert ended.returncode == 2 and ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith("fastweights: error: python -m has found fastweights in the current folder")
    alone = run(sys.executable, "-S", "-m", "fastweights")  # without what is installed: Python's own modules come first
    assert alone.returncode == 0 and alone.stdout.splitlines()[-1] == str(tmp_path)
    named = run(
        sys.executable, "-S", "-P", "-m", "fastweights", path=str(tmp_path)
    )  # PYTHONPATH is the user's own word
    assert named.returncode == 0 and named.stdout.splitlines()[0] == str(tmp_path)


def test_processes_have_the_path_of_their_parent(monkeypatch, tmp_path):
    """The variables with which they start; without the block these are as before."""
    monkeypatch.setenv("PYTHONPATH", "mine")
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    monkeypatch.setattr("sys.path", ["", str(tmp_path), f"no{os.pathsep}folder"])
    with same_path():
        assert os.environ["PYTHONPATH"] == f"{Path.cwd()}{os.pathsep}{tmp_path}" and os.environ["PYTHONSAFEPATH"] == "1"
    assert os.environ["PYTHONPATH"] == "mine" and "PYTHONSAFEPATH" not in os.environ


@pytest.mark.slow
def test_python_3_10_starts_isolated_processes(hostile):
    """It does not know PYTHONSAFEPATH."""
    program = "import sys; from fastweights import safe_path; safe_path.HAS_SAFE_PATH = False; from fastweights.cli import main"
    ended = run(sys.executable, "-P", "-c", f"{program}; sys.exit(main({RECALL.split()!r}))")
    assert nothing_ran(hostile) and ended.returncode == 0, ended.stderr


def test_a_module_by_its_name_leaves_the_path_as_it_is(tmp_path, monkeypatch):
    """It is found in the current folder; what it imports there is not."""
    monkeypatch.setattr("sys.path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    Path("my_safe_module.py").write_text("import my_safe_neighbour\n")
    Path("my_safe_neighbour.py").touch()
    with pytest.raises(ValueError, match="cannot import my_safe_module: .*No module named 'my_safe_neighbour'"):
        import_mixers(["my_safe_module"])
    assert sys.path == before
