"""What pip gets: the source distribution, the wheel that is built from it, and the command of a fresh installation."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys, hatchling.build as backend; print(getattr(backend, 'build_' + sys.argv[1])(sys.argv[2]))"
EXTRAS = "viz,train"


def run(*command: str | Path, cwd: Path, path: str | None = None, columns: int = 80) -> str:
    """The output of a command, which finds no modules beside those of its environment and `path`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["COLUMNS"] = str(columns)
    if path is not None:
        environment["PYTHONPATH"] = path
    ended = subprocess.run([*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source distribution, and the wheel built from it."""
    pytest.importorskip("hatchling", reason="needs pip install 'fastweights[test]'")
    folder, path = tmp_path_factory.mktemp("built"), os.environ.get("PYTHONPATH")
    source = folder / run(sys.executable, "-c", BUILD, "sdist", folder, cwd=ROOT, path=path).split()[-1]
    with tarfile.open(source) as archive:
        safely = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python before 3.11.4 has none
        archive.extractall(folder, **safely)
    unpacked = folder / source.name.removesuffix(".tar.gz")
    return source, folder / run(sys.executable, "-c", BUILD, "wheel", folder, cwd=unpacked, path=path).split()[-1]


def test_the_distributions_are_complete(built: tuple[Path, Path]) -> None:
    source, wheel = built
    with tarfile.open(source) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "mkdocs.yml", "docs/ops.md", "docs/hooks.py"} <= inside
    assert {"tests/test_package.py", "examples/own_rule/two_speed.py"} <= inside
    package = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fastweights").rglob("*") if path.is_file()}
    package = {name for name in package if "__pycache__" not in name}
    packed = set(zipfile.ZipFile(wheel).namelist())
    assert package <= inside and package <= packed
    assert not any("results" in name and name.endswith(".json") for name in packed)  # measured numbers are the studies'


@pytest.mark.slow
def test_a_fresh_installation_runs(built: tuple[Path, Path], tmp_path: Path) -> None:
    """Packages of other projects are those of this environment, found by a .pth file; nothing comes from the network."""
    _, wheel = built
    environment, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    there = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=work).strip())
    with pytest.raises(AssertionError, match="No module named 'fastweights'"):
        run(python, "-c", "import fastweights", cwd=work)
    (there / "packages_of_the_tests.pth").write_text(
        "".join(f"{path}\n" for path in sys.path if "site-packages" in path)
    )
    install = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index")
    run(*install, "--ignore-installed", "--no-deps", wheel, cwd=work)
    # Refuses what the extras name and is not there.
    run(*install, f"fastweights[{EXTRAS}] @ {wheel.as_uri()}", cwd=work)
    place = run(python, "-c", "import fastweights; print(fastweights.__file__)", cwd=work)
    assert Path(place.strip()).is_relative_to(environment)

    command = environment / "bin" / "fastweights"
    missing = subprocess.run([command, "reproduce", "C1"], cwd=work, capture_output=True, text=True)
    assert missing.returncode == 2
    assert missing.stderr.endswith(
        "fastweights: error: reproduce needs fastweights-studies; install it with pip install fastweights-studies\n"
    )
    small = "--mixers linear,gdn --pairs 2 --steps 3 --width 8 --heads 1 --learning-rates 0.01 --test-examples 8 --workers 1"
    run(command, "recall", *small.split(), "--output", "recall", cwd=work)
    results = json.loads((work / "recall" / "results.json").read_text())
    assert [row["mixer"] for row in results["summary"]] == ["linear", "gdn"]
    assert (work / "recall" / "accuracy-by-pairs.png").exists()  # of the extra viz
