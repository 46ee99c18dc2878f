"""What every command that writes does with what stands where it writes: a folder to try it in, and the tests."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fastweights.cli import main
from tests.evaluation.small import TEXT, save
from tests.fast_set import fast_where

from .run_file import RUN

__all__ = ["QUICK", "SMALL", "folder", "place", "refused", "run_twice", "whole", "writing_tests"]

SMALL = "--task mqar-shuffled --mixers linear --pairs 2 --vocab-size 16 --width 8 --layers 1 --steps 2 --batch-size 2"
QUICK = "--lengths 40 --texts 1 --stretch 8 --text text.txt"
INPUTS = ("model/model.safetensors", "model/config.json", "run.toml", "text.txt", "model")


def file(path: Path) -> None:
    path.write_text("years of work")


def other_json(path: Path) -> None:
    path.write_text(json.dumps({"format": 1, "results": {}, "claim": "C2"}))


def folder(path: Path) -> None:
    path.mkdir()
    (path / "cat.jpg").write_text("precious")


def link_to_file(path: Path) -> None:
    path.symlink_to("mine/file")


def link_to_folder(path: Path) -> None:
    path.symlink_to("mine")


def dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


def circle(path: Path) -> None:
    path.symlink_to(path.name)


def pipe(path: Path) -> None:
    os.mkfifo(path)


THINGS = (file, other_json, folder, link_to_file, link_to_folder, dangling_link, circle, pipe)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    save(place / "model", mixer="gdn")
    (place / "text.txt").write_text(TEXT * 8)
    (place / "run.toml").write_text(RUN.replace('output = "trained"\n', ""))
    (place / "mine").mkdir()
    (place / "mine" / "file").write_text("precious")
    return place


@pytest.fixture
def place(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder: a model, a text, a run file, and a folder of a person's."""
    shutil.copytree(whole, tmp_path / "place")
    monkeypatch.chdir(tmp_path / "place")
    return tmp_path / "place"


def contents(folder: Path) -> dict[str, Any]:
    """Everything below a folder: what kind it is, when it changed, what is in it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.lstat()
        content = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None
        found[str(path)] = (state.st_mode, state.st_ino, state.st_mtime_ns, content)
    return found


def refused(place: Path, capsys: pytest.CaptureFixture[str], command: str, *words: str) -> None:
    """The command ends with one line, and changes nothing."""
    before = contents(place)
    capsys.readouterr()
    code = main(command.split(" "))
    printed = capsys.readouterr()
    assert contents(place) == before, command
    assert code == 2 and printed.out == "", (command, printed)
    (line,) = printed.err.splitlines()
    assert line.startswith("fastweights: error: ") and line.isprintable()
    for word in words:
        assert word in line, line


def run_twice(line: str) -> None:
    for options in ("", "", " --overwrite"):
        assert main([*line.split(), *options.split()]) == 0, options


def writing_tests(
    commands: Mapping[str, tuple[str, str]], places: Sequence[tuple[str, str, str]] = (), beside: Collection[str] = (),
    files: Collection[str] = (),
) -> type:  # fmt: skip
    """The tests of commands that write.

    Args:
        commands: by name, the line without --output, and the function where the work begins, as module:name.
        places: what they write beside their output: the command, its output, and the place that is tried.
        beside: commands that write files beside whatever else is in their folder.
        files: commands whose output is a file.
    """
    outputs = {name: "new.json" if name in files else "new" for name in commands}
    every = [*((name, outputs[name], outputs[name]) for name in commands), *places]
    first = next(iter(files), next(iter(commands)))
    foreign = [  # in the fast set: one thing at every place, and every thing at the places of one command
        pytest.param(thing, *at, marks=() if thing is file or at[0] == first else pytest.mark.slow)
        for thing in THINGS
        for at in every
    ]

    class Writing:
        @pytest.mark.parametrize("overwrite", ["", " --overwrite"])
        @pytest.mark.parametrize(("thing", "command", "output", "at"), foreign)
        def test_other_things_at_the_output_stay(self, place, capsys, command, output, at, thing, overwrite):
            if thing is folder and command in beside and at == output:
                pytest.skip("its files go beside others")
            (place / at).parent.mkdir(exist_ok=True)
            thing(place / at)
            refused(place, capsys, f"{commands[command][0]} --output {output}{overwrite}", "output", Path(at).name)

        @pytest.mark.parametrize("command", commands)
        def test_links_on_the_way_are_not_followed(self, place, capsys, command):
            (place / "link").symlink_to("mine")
            line = f"{commands[command][0]} --output link/{outputs[command]}"
            for options in ("", " --overwrite"):
                refused(place, capsys, line + options, "link", str(place / "mine" / outputs[command]))

        @pytest.mark.parametrize("output", ["", " ", "~", "~/new", "/", "..", "."])
        @pytest.mark.parametrize("command", commands)
        def test_outputs_that_are_no_place_of_their_own(self, place, capsys, command, output):
            if command in beside and output in ("/", "..", "."):
                pytest.skip("its files go beside others")
            before = contents(place)
            assert main([*commands[command][0].split(), "--output", output]) == 2
            assert contents(place) == before and capsys.readouterr().err.count("\n") == 1

        @pytest.mark.parametrize("at", INPUTS)
        @pytest.mark.parametrize("command", commands)
        def test_inputs_are_no_outputs(self, place, capsys, command, at):
            if command in beside and at == "model":
                pytest.skip("its files go beside others")
            for options in ("", " --overwrite"):
                refused(place, capsys, f"{commands[command][0]} --output {at}{options}", "output")

        @fast_where(lambda given: given["command"] != "train")  # which takes seconds
        @pytest.mark.parametrize("command", commands)
        def test_one_process_at_a_time(self, place, capsys, monkeypatch, command):
            """While a command works, the same command is refused, under another name of the place too."""
            line, work = commands[command]
            module, _, function = work.partition(":")
            codes = []

            def work_of_the_first(*_: Any, **__: Any) -> None:
                for output in (outputs[command], f"../place/{outputs[command]}"):
                    codes.append((main([*line.split(), "--output", output]), capsys.readouterr().err))
                raise ValueError("the end")

            monkeypatch.setattr(importlib.import_module(module), function, work_of_the_first)
            assert main([*line.split(), "--output", outputs[command]]) == 2
            assert [code for code, _ in codes] == [2, 2]
            assert all("in use by another process" in error for _, error in codes), codes
            assert "the end" in capsys.readouterr().err

    return Writing
