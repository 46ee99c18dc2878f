"""Commands and run files on the pages: subcommands, options and their values exist. They are parsed here; test_first_commands.py
runs those of the first pages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer
from fastweights_studies.claims import claim_names
from fastweights_studies.places import SOURCES

from fastweights.cli import USAGE_ERROR, load_app
from fastweights.distillation import DistillRun
from fastweights.evaluation import MEASURES
from fastweights.layers import MIXERS, parse_mixers
from fastweights.training import load_recall_file
from fastweights.training.language import load_run

from .site import ROOT

PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in sorted(PAGES)}
# In a line of a block, or between backticks; what stands before it is a path, or torchrun with its own options.
COMMAND = re.compile(r"(?:(?<=`)|^ {4}|^)(?:\S*/)?(?:torchrun [^`\n]*-m )?fastweights ([a-z][^`\n]*)", re.MULTILINE)
MAKE = re.compile(r'(?:(?<=`)|^ {4})make ([a-z-]+)(?: ARGS="([^"]*)")?', re.MULTILINE)
PLACEHOLDERS = {"NAME", "...", "CLAIM", ""}  # an option that is not given leaves the empty string
TOML = [(page, block) for page, text in TEXTS.items() for block in re.findall(r"```toml\n(.*?)```", text, re.DOTALL)]


def commands() -> list[tuple[str, str]]:
    found = [(page, command) for page, text in TEXTS.items() for command in COMMAND.findall(text)]
    made = [(page, match) for page, text in TEXTS.items() for match in MAKE.findall(text)]
    return found + [(page, f"{target} {arguments}") for page, (target, arguments) in made if arguments]


COMMANDS = list(dict.fromkeys(commands()))


def check(line: str) -> None:
    """Raises where the command line would not be taken."""
    name, *words = shlex.split(line, comments=True)
    group = typer.main.get_command(load_app())
    command = group.commands[name]  # type: ignore[attr-defined]
    if not words:  # the name alone, in a sentence
        return
    with command.make_context(name, list(words)) as context:
        values = context.params
    if "--import" not in words:
        for text in values.get("mixers") or ():
            parse_mixers(text)
    if name == "mixers" and "--import" not in words:
        assert values["name"] in {None, *PLACEHOLDERS, *MIXERS}
    for measure in ",".join(values.get("on") or ()).split(","):
        assert measure in {*PLACEHOLDERS, *MEASURES}
    for claim in values.get("claims") or ():
        assert claim in {*PLACEHOLDERS, *claim_names()}
    for word in words:
        assert not word.startswith("examples/") or (ROOT / word).exists(), word


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line}" for page, line in COMMANDS])
def test_a_command_is_taken(page: str, line: str) -> None:
    check(line)


@pytest.mark.parametrize(
    "line",
    ["no-such-command x", "recall --no-such-option 3", "recall --mixers no_such_mixer", "recall --width many", "mixers gdnn",
     "evaluate MODEL --on no-such-measure", "reproduce C99", "train examples/none.toml"],
)  # fmt: skip
def test_a_command_that_is_not_taken_is_found(line: str) -> None:
    with pytest.raises((KeyError, ValueError, AssertionError, USAGE_ERROR)):
        check(line)


def test_the_commands_are_found() -> None:
    lines = {line for _, line in COMMANDS}
    assert {"train run.toml", "mixers gdn", "recall --list", "reproduce --list", "serve runs/model"} <= {
        line.split("#")[0].strip() for line in lines
    }
    assert any(line.startswith("recall --mixers linear,gdn,pgdn,softmax --pairs") for line in lines)


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+(?: [a-z-]+)*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    targets = {name for line in targets for name in line.split()}
    named = {target for text in TEXTS.values() for target, _ in MAKE.findall(text)}
    assert {"recall", "lm", "docs", "test"} <= named <= targets


# Of torchrun and of SLURM.
LAUNCHERS = {
    *("--nproc-per-node", "--nnodes", "--node-rank", "--master-addr", "--master-port", "--max-restarts", "--log-dir"),
    *("--redirects", "--tee", "--nodes", "--ntasks-per-node", "--gpus-per-node", "--gpus-per-task", "--signal"),
}


def test_options_in_sentences_exist() -> None:
    """Of the pages that speak of nothing but `fastweights`."""
    group = typer.main.get_command(load_app())
    known = {option for command in (group, *group.commands.values()) for x in command.params for option in x.opts}  # type: ignore[attr-defined]
    pages = ("README.md", "docs/start.md", "docs/train.md", "docs/commands.md", "docs/inspecting.md", "docs/tasks.md")
    named = {option for page in pages for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+", TEXTS[page])}
    assert {"--list", "--mixers", "--to", "--lm-eval"} <= named
    assert named - LAUNCHERS <= {*known, "--help"}


def test_scripts_and_their_options_exist() -> None:
    found = 0
    for page, text in TEXTS.items():
        for module, options in re.findall(r"python -m (fastweights_studies[.\w]+)([^`\n]*)", text):
            script = SOURCES / f"{module.replace('.', '/')}.py"
            assert script.exists(), (page, module)
            source, found = script.read_text(), found + 1
            for option in re.findall(r"--[a-z-]+", options):
                assert option in source, (page, module, option)
    assert found > 10


@pytest.mark.parametrize(("page", "block"), TOML, ids=[page for page, _ in TOML])
def test_a_run_file_is_taken(page: str, block: str, tmp_path: Path) -> None:
    if "[project" in block:
        assert re.search(r'entry-points\."fastweights\.mixers"', block)
        return
    file = tmp_path / "run.toml"
    file.write_text(block)
    if "task =" in block:
        assert load_recall_file(file).parts
    elif "objective =" in block or "[selection]" in block:
        assert load_run(file, kind=DistillRun).stage_runs()
    else:
        assert load_run(file).models()
