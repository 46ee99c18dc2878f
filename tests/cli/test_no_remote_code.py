"""Code that a folder holds or names is never run, and nobody is asked whether to: not by any command, not on a terminal."""

from __future__ import annotations

import ast
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

import fastweights
from fastweights.cli import main

from ..evaluation.small import TEXT, save, tokenizer

EVIL = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast

Path("ran").touch()


class EvilTokenizerFast(PreTrainedTokenizerFast):
    pass
"""
RUN = """
output = "out"
cache = "cache"
length = 32
batch_size = 2
max_steps = 1
evaluation_rows = 2
context_lengths = []
[corpus]
paths = ["text.txt"]
"""
SIZES = "\n[model]\nhidden_size = 16\nnum_hidden_layers = 1\nnum_heads = 2\n"


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """A folder with a model and one with a tokenizer, whose tokenizers ask for code that leaves the file `ran`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # whoever is asked agrees
    save(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "tokenizer")
    for folder in (tmp_path / "model", tmp_path / "tokenizer"):
        (folder / "evil.py").write_text(EVIL)
        path = folder / "tokenizer_config.json"
        settings = {"auto_map": {"AutoTokenizer": [None, "evil.EvilTokenizerFast"]}, "tokenizer_class": "EvilTokenizer"}
        path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def refused(place: Path, capfd, *arguments: str, names: str = "tokenizer_config.json asks for code to be run") -> str:
    capfd.readouterr()
    assert main(list(arguments)) == 2
    printed = capfd.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and names in printed.err, printed
    assert not (place / "ran").exists()
    return printed.err


def test_no_command_runs_code(place, capfd):
    refused(place, capfd, "generate", "model", "The")
    refused(place, capfd, "evaluate", "model", "--on", "copy", "--lengths", "40")
    refused(place, capfd, "convert", "model", "--to", "pgdn", "--output", "new", "--prompt", "The")
    (place / "run.toml").write_text(RUN + '[model]\npath = "model"\n')
    refused(place, capfd, "train", "run.toml")
    for path in ("tokenizer", "tokenizer/tokenizer.json"):
        (place / "run.toml").write_text(RUN + SIZES + f'[tokenizer]\npath = "{path}"\n')
        said = refused(place, capfd, "train", "run.toml")
        assert "evil.EvilTokenizerFast" in said and "set trust_remote_code = true in [tokenizer]" in said
    assert not (place / "new").exists() and not (place / "out").exists()


def test_a_run_file_may_ask_for_it(place, capfd):
    trusted = "trust_remote_code = true\n"
    (place / "run.toml").write_text(RUN + SIZES + '[tokenizer]\npath = "tokenizer"\n' + trusted)
    assert main(["train", "run.toml"]) == 0
    assert (place / "ran").exists()
    (place / "ran").unlink()
    refused(place, capfd, "generate", "out", "The")  # the model that was trained has that tokenizer
    (place / "run.toml").write_text(RUN.replace('"out"', '"more"') + '[model]\npath = "out"\n[tokenizer]\n' + trusted)
    assert main(["train", "run.toml"]) == 0
    (place / "run.toml").write_text(RUN + SIZES + '[tokenizer]\npath = "tokenizer"\ntrust_remote_code = "yes"\n')
    refused(place, capfd, "train", "run.toml", names="trust_remote_code must be True or False")


def test_other_classes_of_transformers_run_no_code_either(place, capfd):
    """transformers would load any of its classes as the tokenizer, and these would ask whether to run code."""
    for name in ("AutoImageProcessor", "RagTokenizer"):
        (place / "model" / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        refused(
            place, capfd, "generate", "model", "The", names=f"must name a tokenizer as tokenizer_class, got '{name}'"
        )
    images = {"auto_map": {"AutoImageProcessor": "evil.Evil"}}
    (place / "model" / "preprocessor_config.json").write_text(json.dumps(images))
    refused(place, capfd, "generate", "model", "The", names="preprocessor_config.json asks for code to be run")


@pytest.mark.slow
def test_nobody_is_asked_on_a_terminal(place):
    """`y` waits on the terminal."""
    controller, terminal = pty.openpty()
    os.write(controller, b"y\ny\ny\n")
    environment = {**os.environ, "PYTHONPATH": str(Path(fastweights.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", "fastweights", "generate", "model", "The"],
        stdin=terminal,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    os.close(terminal)
    os.close(controller)
    assert ended.returncode == 2 and ended.stdout == "", ended
    assert ended.stderr.count("\n") == 1 and "config.json asks for code to be run (auto_map: " in ended.stderr
    assert not (place / "ran").exists()


def test_every_auto_class_is_called_without_code():
    """Everywhere in the package, so that a new call cannot forget it."""
    calls = 0
    for path in Path(fastweights.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            owner = ast.unparse(node.func.value)
            if node.func.attr in ("from_pretrained", "from_config") and owner.startswith("Auto"):
                given = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert given.get("trust_remote_code") in ("False", "trust_remote_code"), f"{path}:{node.lineno}"
                calls += 1
    assert calls >= 3
