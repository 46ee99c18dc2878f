"""The suite is green on a new rule with kernels and its layer: in a package of a user, with a task, and in the library itself."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.training.run_files import read_toml

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "own_package"
OURS = "fading or look-back"
DEAR = (
    "extremes or gradcheck or bad_numbers or long_sequence or any_sizes or opcheck or divided"  # tests of the contract
)
# In the fast set, some files whose tests are parametrised by the ops, mixers and tasks that there are, and a list of all mixers.
QUICK = (
    *("tests/contract/test_ops.py", "tests/house/test_ops.py", "tests/layers/test_check_mixer.py"),
    *("tests/data/test_splits.py", "tests/house/test_docs.py"),
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH in which the package of examples/own_package is installed."""
    project = read_toml(EXAMPLE / "pyproject.toml")["project"]
    about = tmp_path / f"{project['name']}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    points = [f"[{group}]\n" + "".join(f"{name} = {module}\n" for name, module in of.items()) for group, of in groups]
    (about / "entry_points.txt").write_text("\n".join(points))
    shutil.copytree(EXAMPLE / "fading", tmp_path / "fading")
    return tmp_path


def run_tests(package: Path, *arguments: str, root: Path = ROOT, **variables: str) -> set[str]:
    """The tests of a repository that pass with the package, where none fails: names with their parameters."""
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "--tb=short", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(root)]), **variables}
    ended = subprocess.run(command, cwd=root, env=environment, text=True, capture_output=True)
    summary = ended.stdout[ended.stdout.rfind("short test summary info") :]
    assert ended.returncode == 0, "\n".join(re.findall(r"^(?:FAILED|ERROR).*", summary, re.MULTILINE)) or ended.stderr
    return set(re.findall(r"^PASSED \S*::(\S+)", summary, re.MULTILINE))


@pytest.mark.slow
def test_lists_of_ops_mixers_and_tasks_take_the_package(package: Path) -> None:
    """Tests of each kind of list, without the dearest of the contract."""
    passed = run_tests(
        package, "-p", "no:xdist", "-m", "not slow", "-k", f"({OURS} or table_of_layers) and not ({DEAR})", *QUICK
    )
    assert {
        *("test_shapes[fading_attention]", "test_dtypes[fading_attention-torch-torch.bfloat16]"),
        *("test_no_sequence_is_in_both_splits[look-back-long]", "test_the_table_of_layers_is_the_registry"),
        *("test_signature_is_that_of_the_declaration[fading_attention]",),
    } <= passed, sorted(passed)


@pytest.mark.slow
def test_the_whole_fast_suite_is_green_on_it(package: Path) -> None:
    passed = run_tests(package, "-m", "not slow", "-n", "auto", "--dist", "worksteal", "tests", OMP_NUM_THREADS="1")
    assert len([name for name in passed if re.search("fading|look-back", name)]) > 200


@pytest.mark.slow
@pytest.mark.kernels
def test_the_tests_of_kernels_are_green_on_it(package: Path) -> None:
    passed = run_tests(package, "-p", "no:xdist", "-m", "kernels and not gpu and not slow", "-k", OURS, "tests/kernels")
    assert "test_segments_are_the_whole[fading_attention]" in passed


LINES = {
    "fastweights/ops/__init__.py": "from .waning import waning_attention as waning_attention",
    "fastweights/layers/__init__.py": "from .waning import Waning as Waning",
}
LAYER = '''"""A memory that wanes."""

import torch

from ..ops import waning_attention
from .memory_layer import MemoryLayer
from .registry import register_mixer


@register_mixer'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A copy of the repository, to which the rule of the package is added as one of the library's own: a folder with the op, one
    with the kernels, a file with the layer, and a line for each of the two public names."""
    for name in ("fastweights", "tests", "docs", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    renamed = {
        file.stem: re.sub(
            "fading", lambda found: "Waning" if found[0] == "Fading" else "waning", file.read_text(), flags=re.I
        )
        for file in (EXAMPLE / "fading").glob("*.py")
    }
    op, _, layer = renamed["__init__"].partition("@register_mixer")
    op = re.sub(r"from fastweights.(layers|ops) import .*\n|@register_op\n", "", op)
    files = {
        "ops/waning/__init__.py": op.replace("from .kernels", "from ...kernels.waning.rule"),
        "kernels/waning/__init__.py": "",
        "kernels/waning/rule.py": renamed["kernels"],
        "layers/waning.py": LAYER + layer.replace("SPEC", "waning_attention.spec"),
    }
    for name, text in files.items():
        (tmp_path / "fastweights" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "fastweights" / name).write_text(text)
    for name, line in LINES.items():
        file = tmp_path / name
        file.write_text(re.sub(r"\n\n(?=from )", f"\n\n{line}\n", file.read_text(), count=1))
    return tmp_path


@pytest.mark.slow
def test_a_rule_of_the_library_is_its_folders_and_two_lines(library: Path) -> None:
    """The tests of the house and the contract, and those that list ops and mixers. Links lead to files that are not copied."""
    chosen = "(waning or house or registry or public_names) and not links"
    options = ("-p", "no:xdist", "-m", "not slow", "-k", chosen, "--ignore", "tests/house/test_own_package.py")
    passed = run_tests(library, *options, "tests", root=library)
    assert {
        *("test_gradcheck[waning_attention-torch-rows]", "test_signature_is_that_of_the_declaration[waning_attention]"),
        *(
            "test_the_table_of_ops_is_that_of_the_declarations",
            "test_names",
            "test_layers_use_the_public_faces_of_the_ops",
        ),
    } <= passed, sorted(passed)
