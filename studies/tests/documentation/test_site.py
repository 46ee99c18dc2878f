"""The site that `make docs` builds: its pages, their links as the site has them, and the build itself where MkDocs is there."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastweights_studies.pages import rendering

from fastweights.layers import MIXERS

from .site import ROOT, hooks, pages

CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
SITE = "docs/reference/"
SEARCH, FRAME = (Path(__file__).with_name(name) for name in ("search.js", "frame.js"))


def in_nav(entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [entry]
    return [page for item in (entry.values() if isinstance(entry, dict) else entry) for page in in_nav(item)]


def headings(text: str) -> set[str]:
    plain = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    return {rendering.anchor(heading) for heading in re.findall(r"^#{1,6} (.+)$", plain, re.MULTILINE)}


def test_every_page_is_in_the_navigation_once() -> None:
    listed = in_nav(CONFIG["nav"])
    added = {f"mixers/{name}.md" for name in MIXERS} | {f"reference/{name}.md" for name in hooks.REFERENCE}
    assert sorted(listed) == sorted({hooks.place_in_site(page) for page in pages()} - added)


def test_hooks_put_all_generated_pages_into_the_navigation() -> None:
    class Config:
        nav: Any = [{"Memories": ["mixers/index.md"]}, {"API": ["reference/index.md"]}]
        mdx_configs: Any = {}

    config = hooks.on_config(Config())
    assert {f"docs/{page}" for page in in_nav(config.nav)} == {
        page for page in pages() if re.match("docs/(mixers|ref)", page)
    }
    assert config.mdx_configs["toc"]["slugify"]("Rules: `a_b`, c", "-") == "rules-a_b-c"


@pytest.mark.parametrize("page", [*hooks.repository_pages(), *(f"docs/mixers/{name}.md" for name in MIXERS)])
def test_links_lead_to_pages_of_the_site(page: str) -> None:
    """As MkDocs checks them: to a page and a heading of it, or to a copied file."""
    text = pages()[page]
    copies = {hooks.place_in_site(source) for source in hooks.copied_files(pages())}
    places = {hooks.place_in_site(name): name for name in pages()}
    here = Path(hooks.place_in_site(page)).parent
    shown = hooks.linked_mixers(hooks.site_links(text, page), page)
    for piece, is_text in hooks.outside_code(shown):
        for link in hooks.LINK.finditer(piece) if is_text else ():
            path, _, anchor = link[2].partition("#")
            if re.match(r"[a-z]+:", path):
                continue
            target = os.path.normpath(here / path) if path else hooks.place_in_site(page)
            image = (ROOT / "docs" / target).exists() and target.endswith(".png")
            assert target in places or target in copies or image, link[2]
            assert not anchor or anchor in headings(pages()[places[target]]), link[2]


def test_links_that_leave_the_pages() -> None:
    text = "[a](../studies/results/x.json) [b](../README.md#layers) [c](ops.md) `[d](e.md)` [f](https://x.org)\n"
    assert hooks.site_links(text, "docs/cpu.md") == (
        "[a](files/studies/results/x.json) [b](index.md#layers) [c](ops.md) `[d](e.md)` [f](https://x.org)\n"
    )
    assert hooks.site_links("[a](../rules.md)", "docs/mixers/gdn.md") == "[a](../rules.md)"
    assert hooks.site_links("[a](docs/ops.md)", "README.md") == "[a](ops.md)"
    copied = hooks.copied_files({"docs/a.md": "[a](../examples/recall) [b](../README.md)"})
    assert "examples/recall/vla.toml" in copied and "README.md" not in copied


def test_lists_and_bars_as_python_markdown_reads_them() -> None:
    text = "Three `a` cases:\n- one\n  of two\n- two\n\n```python\nx\n- y\n```\n\n| `a \\| b` |\n"
    assert hooks.one_dialect(text) == text.replace("cases:\n", "cases:\n\n").replace("\\|", "|")


def test_mixers_in_tables_lead_to_their_pages() -> None:
    row = "| you need | `gdn` | `no_mixer` | as `gdn` |\n"
    assert hooks.linked_mixers(row, "docs/layers.md") == row.replace("| `gdn` |", "| [`gdn`](mixers/gdn.md) |")
    assert hooks.linked_mixers(row, "docs/cpu.md") == row


def test_the_reference_has_every_public_name() -> None:
    for name in hooks.REFERENCE:
        module = importlib.import_module(hooks.package(name))
        found = re.findall(r"^(?:::: |\[`\w+`\]\[)([\w.]+)\]?$", pages()[f"docs/reference/{name}.md"], re.MULTILINE)
        assert [place.rpartition(".")[2] for place in found] == list(module.__all__)


def test_links_of_the_reference_lead_to_entries() -> None:
    """A name that two packages export has one entry, and the other page a link to it."""
    text = "\n".join(pages()[f"docs/reference/{name}.md"] for name in hooks.REFERENCE)
    entries = re.findall(r"^::: ([\w.]+)$", text, re.MULTILINE)
    linked = re.findall(r"^\[`\w+`\]\[([\w.]+)\]$", text, re.MULTILINE)
    assert linked and set(linked) <= set(entries) and len(set(entries)) == len(entries)


def test_the_reference_has_every_documented_package() -> None:
    inner = ("kernels", "analysis", "cli", "serving", "integrations")  # commands, or not for users to call
    found = {path.parent.name for path in (ROOT / "fastweights").glob("*/__init__.py")}
    assert found - set(inner) == {name for name in hooks.REFERENCE if "." not in name}


def test_formulas_need_no_script() -> None:
    pytest.importorskip("latex2mathml")
    shown = hooks.mathml('<p><span class="arithmatex">\\(a_t \\le 1\\)</span></p><div class="arithmatex">\\[S\\]</div>')
    assert shown.count("<math") == 2 and "arithmatex" not in shown and 'display="block"' in shown


@pytest.mark.slow
def test_the_strict_build_needs_no_network(tmp_path: Path) -> None:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("needs pip install 'fastweights[docs]', as `make docs` does")
    nowhere = "http://127.0.0.1:9"  # a port where nobody answers
    environment = {**os.environ, "http_proxy": nowhere, "https_proxy": nowhere, "NO_MKDOCS_2_WARNING": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r'<(?:script|img|link)\b[^>]*\b(?:src|href)="((?:https?:)?//[^"]+)"', text)
        assert not loaded, (page, loaded)
        assert 'class="arithmatex"' not in text
    assert "<math" in (tmp_path / "reference" / "ops.html").read_text()
    check_search_without_a_server(tmp_path)
    assert (tmp_path / "files" / "studies" / "results" / "commands" / "recall_readme.json").exists()


def check_search_without_a_server(site: Path) -> None:
    """Every page loads our worker, and the script of the theme finds the pages by it: in node.js, where that is."""
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    for page in pages:
        (worker,) = re.findall(r'<script src="([^"]*iframe-worker[^"]*)"', page.read_text())
        assert (page.parent / worker).resolve() == (site / "javascripts" / "iframe-worker.js").resolve()
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")
    if node := shutil.which("node"):
        queries = {
            "cu_seqlens": "ops.html",
            "initial_state": "ops.html",
            "gdn": "mixers/gdn.html",
            "held_out_fraction": "train.html",
        }
        ended = subprocess.run([node, str(SEARCH), str(site), *queries], capture_output=True, text=True, timeout=100)
        assert ended.returncode == 0, ended.stderr
        found = json.loads(ended.stdout)
        for query, page in queries.items():
            assert page in found[query][:5], (query, found[query][:5])
        assert found["cu_seqlens"][0] == "ops.html"


def test_the_search_needs_no_server() -> None:
    """The plug-in would load a script from the network, were there none of ours."""
    assert "offline" in CONFIG["plugins"] and CONFIG["use_directory_urls"] is False
    (script,) = CONFIG["extra"]["polyfills"]
    assert "iframe-worker" in script and (ROOT / "docs" / script).is_file()


def test_names_are_words_of_the_search() -> None:
    """With what stands around them in text and code."""
    (search,) = (plugin["search"] for plugin in CONFIG["plugins"] if isinstance(plugin, dict) and "search" in plugin)
    separator = re.compile(search["separator"])
    for text in ("`cu_seqlens` packs", "op(q, cu_seqlens=cu_seqlens)", "(cu_seqlens: int32)", "x.cu_seqlens[1]"):
        assert "cu_seqlens" in separator.split(text)
    assert separator.split("at 0.5 of held-out text") == ["at", "0.5", "of", "held", "out", "text"]
    headings = re.findall("^## (.+)$", (ROOT / "docs" / "ops.md").read_text(), re.MULTILINE)
    assert any("cu_seqlens" in separator.split(heading) for heading in headings)  # titles come first


@pytest.mark.skipif(shutil.which("node") is None, reason="runs JavaScript in node.js")
def test_a_frame_stands_in_for_the_worker() -> None:
    """It gets the messages from before it has loaded, and its answers reach the page as those of a worker."""
    worker = ROOT / "docs" / "javascripts" / "iframe-worker.js"
    ended = subprocess.run([shutil.which("node"), str(FRAME), str(worker)], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == {"file:": ["answer to early", "answer to late"], "https:": []}


def test_the_site_is_not_committed() -> None:
    assert f"{CONFIG['site_dir']}/" in (ROOT / ".gitignore").read_text().splitlines()
    assert CONFIG["theme"]["font"] is False
    if shutil.which("git") and (ROOT / ".git").exists():
        assert not subprocess.run(["git", "ls-files", "site"], cwd=ROOT, capture_output=True, text=True).stdout
