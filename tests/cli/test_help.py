"""The help of every command, as its source has it: nothing is read as markup, and paragraphs are broken by the width alone."""

import inspect
import re

import pytest
import typer

from fastweights.cli import app, load_app, main

COMMANDS = list(typer.main.get_command(load_app()).commands)


def sources(name):
    """The paragraphs of a command's docstring, and the help of its options, as they are written."""
    callback = next(info.callback for info in app.registered_commands if info.callback.__name__ == name)
    paragraphs = [" ".join(text.split()) for text in inspect.getdoc(callback).split("\n\n")]
    annotations = inspect.signature(callback, eval_str=True).parameters.values()
    options = [
        item.help
        for parameter in annotations
        for item in getattr(parameter.annotation, "__metadata__", ())
        if getattr(item, "help", None)
    ]
    return paragraphs, options


def shown(name, width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERMINAL_WIDTH", str(width))
    assert main([name, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", COMMANDS)
def test_all_of_it_is_shown(name, monkeypatch, capsys):
    paragraphs, options = sources(name)
    text = " ".join(shown(name, 1000, monkeypatch, capsys).split())
    for part in [*paragraphs, *options]:
        assert " ".join(part.split()) in text


@pytest.mark.parametrize("width", [80, 60])
@pytest.mark.parametrize("name", COMMANDS)
def test_paragraphs_fill_their_lines(name, width, monkeypatch, capsys):
    """No line ends where the first word of the next one has room."""
    head = shown(name, width, monkeypatch, capsys).partition("╭")[0].partition("Usage:")[2].partition("\n")[2]
    blocks = [block.split("\n") for block in re.split(r"\n *\n", head.strip())]
    paragraphs, _ = sources(name)
    assert [" ".join(" ".join(block).split()) for block in blocks] == paragraphs
    for block in blocks:
        for line, following in zip(block, block[1:], strict=False):
            assert len(f" {line.strip()} {following.split()[0]}") > width - 2, line


@pytest.mark.parametrize(("name", "extra"), [("serve", "vllm"), ("evaluate", "eval")])
def test_what_to_install_is_shown(name, extra, monkeypatch, capsys):
    assert f"'fastweights[{extra}]'" in shown(name, 80, monkeypatch, capsys)
