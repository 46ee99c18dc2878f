"""Committed pages are what their commands write, and one command writes all of them."""

from __future__ import annotations

import re
import sys

import pytest
from fastweights_studies.pages import __main__ as every_page
from fastweights_studies.pages import block, choosing, page_parts, performance, presets
from fastweights_studies.pages.rendering import Page, replace_part
from fastweights_studies.places import DOCS, ROOT

PAGES = [block.PAGE, choosing.PAGE, performance.PAGE, presets.PAGE, *page_parts.PAGES]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.name)
def test_a_page_is_what_its_command_writes(page: Page) -> None:
    page.check()
    assert f"`python -m {page.command}`" in page.path.read_text()


def test_a_page_that_is_not_up_to_date_names_its_command(tmp_path) -> None:
    page = Page(tmp_path / "a.md", lambda: "new", "some.module")
    page.path.write_text("old")
    with pytest.raises(AssertionError, match=r"a\.md is not up to date; run python -m some\.module"):
        page.check()
    page.write()
    page.check()


def test_one_command_writes_the_pages_of_every_module(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(every_page.runpy, "run_module", lambda name, run_name: written.append(name))
    monkeypatch.setattr(sys, "argv", ["pages"])
    every_page.main()
    assert written == [f"fastweights_studies.pages.{name}" for name in every_page.MODULES]
    commands = {
        found
        for path in (ROOT / "README.md", *DOCS.glob("*.md"))
        for found in re.findall(r"(?:Generated|written) by `python -m (\S+)`", path.read_text())
    }
    assert commands and commands <= set(written)
    monkeypatch.setattr(sys, "argv", ["pages", "choosing", "chosing"])
    with pytest.raises(SystemExit):
        every_page.main()


def test_only_what_is_between_the_marks_is_written() -> None:
    begin, end = "<!-- a: written by `python -m m` -->", "<!-- end of a -->"
    page = f"before\n{begin}\n\nold\n{end}\nafter {end}"
    assert replace_part(page, "a", r"new \1", "m") == f"before\n{begin}\n\nnew \\1\n{end}\nafter {end}"
    with pytest.raises(ValueError, match="the page needs the lines <!-- b: written by `python -m m` -->"):
        replace_part(page, "b", "new", "m")
