"""The documents agree with the code: links, anchors, the table of layers, ops in place, examples that run."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastweights import ops
from fastweights.cli import authoring as cli_authoring
from fastweights.kernels.runtime.private_api import TESTED
from fastweights.layers import MIXERS
from fastweights.layers.registry import ORDER
from fastweights.ops import authoring as ops_authoring
from fastweights.ops.framework.spec import spec_of

from ..public_signatures import DECODING, MEMORIES

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
# Whose examples tests/test_readme.py, tests/distributed, tests/layers/test_docs.py and tests/documentation run.
OWN_TESTS = ("README.md", "context_parallel.md", "layers.md", "own_rule.md", "tasks.md")
IMAGE_BYTES = 100_000

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """The text without its blocks and spans of code, in which brackets are no links."""
    return re.sub(r"`[^`\n]*`", "code", re.sub(r"```.*?```", "", text, flags=re.DOTALL))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page: a heading that repeats is numbered."""
    found: Counter[str] = Counter()
    made = set()
    for heading in re.findall(
        r"^#{1,6} (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE
    ):
        slug = re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")
        made.add(f"{slug}-{found[slug]}" if found[slug] else slug)
        found[slug] += 1
    return made


def broken_links(page: Path, text: str) -> list[str]:
    """Links of a page to files and headings that do not exist."""
    broken = []
    for link in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_exist(page: Path) -> None:
    assert not broken_links(page, page.read_text())


@pytest.mark.parametrize("link", ["docs/none.md", "docs/ops.md#no-such-heading", "#no-such-heading"])
def test_broken_links_are_found(link: str) -> None:
    page = ROOT / "README.md"
    assert broken_links(page, f"see [this]({link})") == [link]
    assert not broken_links(page, "see [this](docs/ops.md#backends), [that](#layers) and `x[0](y)`")


def test_every_page_is_listed_in_the_readme() -> None:
    linked = {link.partition("#")[0] for link in LINK.findall((ROOT / "README.md").read_text())}
    assert {str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md")} <= linked


def test_images_are_small_and_shown() -> None:
    texts = "".join(page.read_text() for page in PAGES)
    for image in (ROOT / "docs" / "images").iterdir():
        assert image.stat().st_size <= IMAGE_BYTES, image
        assert image.name in texts, f"no page shows {image}"


def test_the_table_of_layers_is_the_registry() -> None:
    """Of docs/layers.md; the README has the same names by families."""
    table = (ROOT / "docs" / "layers.md").read_text().partition("## All layers")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    assert rows == [(name, MIXERS[name].state) for name in ORDER]
    families = (ROOT / "README.md").read_text().partition("## Layers")[2].partition("\n## ")[0]
    names = re.findall(r"`([\w-]+)`", "".join(row for row in families.splitlines(True) if row.startswith("| ")))
    assert sorted(names) == sorted(ORDER)


def test_the_table_of_ops_is_that_of_the_declarations() -> None:
    """Every op that users rely on once, with the states and the kernels that it declares."""
    sizes = {"GKV": "K V", "GKK": "K^2", "GK": "K", "": ""}  # of one head; a count of tokens is not counted
    text = (ROOT / "docs" / "rules.md").read_text().partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+`) \| [^|]+ \| ([^|]+) \| (yes )?\|$", text, re.MULTILINE)
    listed = {name: (state, bool(kernels)) for names, state, kernels in rows for name in re.findall(r"`(\w+)`", names)}
    assert len(rows) > 10 and set(listed) == set(MEMORIES)
    for name, (state, has_kernels) in listed.items():
        spec = spec_of(getattr(ops, name))
        counts = Counter(sizes[declared.dims] for declared in spec.states.values())
        terms = {f"{count} {size}" if count > 1 else size for size, count in counts.items() if size}
        assert set(state.split(" + ")) == terms, name
        assert has_kernels is ("triton" in spec.backends), name


def test_every_op_in_place_is_described() -> None:
    text = (ROOT / "docs" / "ops.md").read_text()
    for name in DECODING:
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(("page", "face"), [("ops.md", ops_authoring), ("commands.md", cli_authoring)])
def test_the_authoring_faces_are_described(page: str, face: ModuleType) -> None:
    text = (ROOT / "docs" / page).read_text()
    for name in face.__all__:
        assert f"`{name}`" in text, name


def test_tested_versions_are_those_of_the_launch_layer() -> None:
    for page in ("docs/kernels.md", "CHANGELOG.md"):
        text = " ".join((ROOT / page).read_text().split())
        for package, (first, last) in TESTED.items():
            assert f"{package} {first[0]}.{first[1]} to {last[0]}.{last[1]}" in text, (page, package)


# Around the memories one module has one forward and one backward, which the guide does not list.
UNLISTED_KERNELS = "pointwise"


def launched_kernels(folder: Path) -> set[tuple[str, str]]:
    """Every kernel that is launched, and the module that it stands in."""
    trees = {path: ast.parse(path.read_text()) for path in folder.rglob("*.py")}
    calls = [node for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    names = {ast.unparse(call.args[0]) for call in calls if re.search(r"launch\w*$", ast.unparse(call.func))}
    return {
        (node.name, str(path.relative_to(folder).with_suffix("")))
        for path, tree in trees.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name in names
        if any(re.match(r"(triton|gluon)\.jit", ast.unparse(decorator)) for decorator in node.decorator_list)
    }


def test_the_kernels_that_the_guide_lists_are_those_that_are_launched() -> None:
    """Each with the module that it stands in: one for a whole row, or one for each. The map has every op with kernels."""
    about, _, text = (ROOT / "docs" / "kernels.md").read_text().partition("## Launches per family")
    families = dict(re.findall(r"^\| `(\w+)/`[^|]* \| ([^|]+) \|$", about, re.MULTILINE))
    with_kernels = [name for name in MEMORIES if "triton" in spec_of(getattr(ops, name)).backends]
    assert set(with_kernels) <= set(re.findall(r"`(\w+)`", " ".join(families.values())))
    text = text.partition("\n## ")[0]
    rows = re.findall(r"^\| (`[^|]+) \| ([a-z][^|]*) \| [^|]+ \|$", text, re.MULTILINE)
    listed = set()
    for names, modules in rows:
        kernels, places = re.findall(r"`(\w+)`", names), modules.split(", ")
        listed |= set(zip(kernels, places * len(kernels) if len(places) == 1 else places, strict=len(places) > 1))
    launched = launched_kernels(ROOT / "fastweights" / "kernels")
    of_families = {kernel for kernel in launched if kernel[1].partition("/")[0] in families}
    assert listed == {kernel for kernel in of_families if not kernel[1].startswith(UNLISTED_KERNELS)}


EXAMPLES = [
    (page, code)
    for page in PAGES
    if page.name not in OWN_TESTS
    for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
]


@pytest.mark.parametrize(("page", "code"), EXAMPLES, ids=[page.name for page, _ in EXAMPLES])
def test_examples_run(page: Path, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "example"}
    exec(compile(code, page.name, "exec"), names)
    if "gained_attention" in names:
        check_gained_attention(names["gained_attention"])


def check_gained_attention(op: Callable[..., Any]) -> None:
    """The op of docs/ops.md computes what its equation says, by chunks as by the loop, packed too."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 150, 2, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    v = torch.randn(1, 150, 4, 5, dtype=torch.float64, generator=generator)
    beta, g = (torch.rand(1, 150, 4, dtype=torch.float64, generator=generator) - shift for shift in (0.0, 1.0))
    expected, state = ops.linear_attention(q, k, beta[..., None] * v, g, output_final_state=True)
    for backend in ("reference", "torch"):
        o, S = op(q, k, v, beta, g, output_final_state=True, backend=backend)
        torch.testing.assert_close(o, expected)
        torch.testing.assert_close(S, state)
        packed, _ = op(q, k, v, beta, g, cu_seqlens=torch.tensor([0, 70, 150]), backend=backend)
        alone, _ = op(*(x[:, 70:] for x in (q, k, v, beta, g)), backend=backend)
        torch.testing.assert_close(packed[:, 70:], alone)
