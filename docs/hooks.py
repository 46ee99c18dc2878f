"""What MkDocs asks while it builds the site (mkdocs.yml): pages that are generated, links that leave docs/, formulas.

The README is the first page. Links from a page to a file of the repository that is no page, such as a result file, lead to a
copy in the site. mkdocs is imported where it is needed, so that tests can use the rest without it.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

ROOT = Path(__file__).parents[1]

LINK = re.compile(r"(\]\()([^)\s]+)(\))")
# A line of text, and a list right below it.
LIST = re.compile(r"^(?!- |\d+\. |[ |#>])(.+)\n(?=- |\d+\. )", re.MULTILINE)
CODE = re.compile(r"```(?s:.*?)```|`[^`\n]*`|^(?: {4}.*\n)+", re.MULTILINE)
NAMED = re.compile(r"(?<=\| )`([\w.-]+)`(?= \|)")
WITH_MIXERS = (
    "docs/layers.md",
    "docs/choosing.md",
)  # pages with tables of mixers, in the folder that all pages begin from
PAGES_OUTSIDE = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}  # of the repository, and in the site
COPIES = "files"  # folder of the site for files of the repository that are no pages
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)

REFERENCE = {
    "ops": "the memory rules as functions",
    "layers": "layers, their options, registration, probes",
    "models": "the language model, its cache, presets",
    "distributed": "one sequence over several processes",
    "integrations.transformers": "models of transformers on these ops",
    "integrations.flash_linear_attention": "a backend of flash-linear-attention",
    "data": "tasks to train on",
    "training": "recall experiments",
    "training.language": "training of language models",
    "distillation": "training of hybrids by the models that they were made of",
    "evaluation": "measures of text models",
    "conversion": "models continued with another memory",
    "results": "result files of experiments",
    "testing": "the contract that ops and mixers keep",
    "studies.claims": "the papers' claims as experiments",
    "studies.leaderboard": "every memory on the same tasks",
    "studies.inspection": "what the memories of a trained model do",
}


def outside_code(text: str) -> Iterator[tuple[str, bool]]:
    """The pieces of a page in order, each with whether it is text, in which brackets are links, and not code."""
    end = 0
    for code in CODE.finditer(text):
        yield text[end : code.start()], True
        yield code[0], False
        end = code.end()
    yield text[end:], True


def place_in_site(target: str) -> str:
    """Where a file or folder of the repository is in the site; paths are relative to the repository."""
    if target in PAGES_OUTSIDE:
        return PAGES_OUTSIDE[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{COPIES}/{target}/index.md" if (ROOT / target).is_dir() else f"{COPIES}/{target}"


def linked_files(text: str, page: str) -> list[str]:
    """Files and folders of the repository that a page links to; `page` is its own path there."""
    found = []
    for piece, is_text in outside_code(text):
        for link in LINK.finditer(piece) if is_text else ():
            path = link[2].partition("#")[0]
            if path and not re.match(r"[a-z]+:", path):
                found.append(normal(PurePosixPath(page).parent / path))
    return found


def one_dialect(text: str) -> str:
    """The Markdown of GitHub as Python-Markdown reads it: a blank line before a list, no escaped bars in code."""
    unescaped = "".join(piece if is_text else piece.replace("\\|", "|") for piece, is_text in outside_code(text))
    blocks = re.split(r"(^```(?s:.*?)^```)", unescaped, flags=re.MULTILINE)
    return "".join(block if block.startswith("```") else LIST.sub(r"\1\n\n", block) for block in blocks)


def linked_mixers(text: str, page: str) -> str:
    """The text with a link to its page from every mixer that is alone in a cell of a table."""
    from fastweights.layers import MIXERS

    if page not in WITH_MIXERS:
        return text
    return NAMED.sub(lambda cell: f"[`{cell[1]}`](mixers/{cell[1]}.md)" if cell[1] in MIXERS else cell[0], text)


def site_links(text: str, page: str) -> str:
    """The text of a page with its links as they are in the site."""
    here = PurePosixPath(place_in_site(page)).parent

    def replace(link: re.Match[str]) -> str:
        path, mark, anchor = link[2].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return link[0]
        target = place_in_site(normal(PurePosixPath(page).parent / path))
        return f"{link[1]}{relative(target, here)}{mark}{anchor}{link[3]}"

    return "".join(LINK.sub(replace, piece) if is_text else piece for piece, is_text in outside_code(text))


def normal(path: PurePosixPath) -> str:
    """Without "..": a path relative to the repository."""
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        else:
            parts.append(part)
    return "/".join(parts)


def relative(target: str, folder: PurePosixPath) -> str:
    return ("../" * len(folder.parts)) + target


def generated_pages() -> dict[str, str]:
    """Pages that are no files: their path in docs/, and their text."""
    from fastweights_studies.pages import mixer_pages

    pages = {f"mixers/{name}": text for name, text in mixer_pages.render_all().items()}
    listed = "\n".join(f"- [{package(name)}]({name}.md): {what}" for name, what in REFERENCE.items())
    pages["reference/index.md"] = f"# API reference\n\nThe public names, from their docstrings.\n\n{listed}\n"
    return {**pages, **{f"reference/{name}.md": reference_page(package(name)) for name in REFERENCE}}


def package(name: str) -> str:
    """The package of a page of the reference: one of the library, or of the studies."""
    return f"fastweights_{name}" if name.startswith("studies.") else f"fastweights.{name}"


def reference_page(package: str) -> str:
    """One entry per public name, from where it is defined: an op has the name of the package that it is in. An op in place has
    another name there, so its entry is that of the package that exports it. What another page has gets a link."""
    module = importlib.import_module(package)
    entries = []
    for name in module.__all__:
        found = getattr(module, name)
        named = isinstance(found, type) or inspect.isroutine(found)
        place = found.__module__ if named and hasattr(importlib.import_module(found.__module__), name) else package
        where = f"{place}.{name}"
        elsewhere = page_of_entry(name, found, place) != package
        entries.append(f"[`{name}`][{where}]" if elsewhere else f"::: {where}")
    return f"# {package}\n\n" + "\n\n".join([(module.__doc__ or "").partition("\n")[0], *entries]) + "\n"


def page_of_entry(name: str, found: object, place: str) -> str:
    """The package whose page has the entry: of those that export the name the innermost around its definition, else the first."""
    packages = [package(one) for one in REFERENCE]
    exporting = [one for one in packages if getattr(importlib.import_module(one), name, None) is found]
    exporting = [one for one in exporting if name in importlib.import_module(one).__all__]
    around = [one for one in exporting if f"{place}.".startswith(f"{one}.")]
    return max(around, key=len, default=exporting[0])


def folder_page(folder: str) -> str:
    names = sorted(path.name for path in (ROOT / folder).iterdir() if path.is_file())
    return f"# {folder}\n\n" + "\n".join(f"- [{name}]({name})" for name in names) + "\n"


def copied_files(texts: Mapping[str, str]) -> list[str]:
    """Files and folders outside docs/ that pages link to, by the pages' paths in the repository; with folders go their files."""
    wanted, found = [link for page, text in texts.items() for link in linked_files(text, page)], []
    while wanted:
        target = wanted.pop()
        if target in found or target.startswith("docs/") or target in PAGES_OUTSIDE:
            continue
        found.append(target)
        if (ROOT / target).is_dir():
            wanted += [f"{target}/{path.name}" for path in (ROOT / target).iterdir() if path.is_file()]
        elif target.endswith(".md"):
            wanted += linked_files((ROOT / target).read_text(), target)
    return sorted(found)


def repository_pages() -> dict[str, str]:
    """The text of every page that is a file, by its path in the repository."""
    paths = [*(ROOT / "docs").rglob("*.md"), *(ROOT / name for name in PAGES_OUTSIDE)]
    return {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted(paths)}


def mathml(content: str) -> str:
    from latex2mathml.converter import convert

    def formula(found: re.Match[str]) -> str:
        return convert(html.unescape(found[2]), display="inline" if found[1] == "span" else "block")

    return FORMULA.sub(formula, content)


# What MkDocs calls.


def on_config(config: Any) -> Any:
    from fastweights_studies.pages import mixer_pages
    from fastweights_studies.pages.rendering import anchor

    config.mdx_configs.setdefault("toc", {})["slugify"] = lambda heading, separator: anchor(heading)
    for section in config.nav:
        if "Memories" in section:
            section["Memories"] += [{name: f"mixers/{name}.md"} for name in mixer_pages.names()]
        if "API" in section:
            section["API"] += [{package(name): f"reference/{name}.md"} for name in REFERENCE]
    return config


def on_files(files: Any, config: Any) -> Any:
    from mkdocs.structure.files import File

    made = generated_pages()
    texts = {**repository_pages(), **{f"docs/{path}": text for path, text in made.items()}}
    for path, text in made.items():
        files.append(File.generated(config, path, content=text))
    for source in (*PAGES_OUTSIDE, *copied_files(texts)):
        place = place_in_site(source)
        if (ROOT / source).is_dir():
            files.append(File.generated(config, place, content=folder_page(source)))
        else:
            files.append(File.generated(config, place, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    place = page.file.src_uri
    outside = {in_site: source for source, in_site in PAGES_OUTSIDE.items()}
    source = outside.get(place, place.removeprefix(f"{COPIES}/") if place.startswith(f"{COPIES}/") else f"docs/{place}")
    return linked_mixers(one_dialect(site_links(markdown, source)), source)


def on_page_content(html: str, **_: Any) -> str:
    return mathml(html)
