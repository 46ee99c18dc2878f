"""`fastweights serve` where vLLM is missing, of another version, or there: what it says and what it would start."""

from __future__ import annotations

import ast
import importlib
import os
import re
import sys
from pathlib import Path

import pytest

from fastweights.cli import main
from fastweights.serving import server, vllm
from fastweights.serving.server import server_command
from fastweights.serving.vllm import versions

from ..evaluation.small import save

PACKAGE = Path(server.__file__).parents[1]


def pretend(monkeypatch, found):
    monkeypatch.setattr(vllm, "find_installed", lambda: found)
    monkeypatch.setattr(versions, "find_installed", lambda: found)


@pytest.fixture
def with_vllm(monkeypatch):
    pretend(monkeypatch, "0.32.0")


@pytest.mark.parametrize("found", [None, "0.23.1", "0.34.0"])
def test_without_a_vllm_that_fits_it_says_what_to_install(found, tmp_path, monkeypatch, capsys):
    save(tmp_path)
    capsys.readouterr()
    pretend(monkeypatch, found)
    says = f"must be of version 0.24 to 0.33, got {found}" if found else "vLLM is not installed"
    assert main(["serve", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line and "with Python 3.11 or later: pip install 'fastweights[vllm]'" in line


@pytest.mark.parametrize(
    ("found", "module"),
    [("0.24.0", "vllm.entrypoints.openai.api_server"), ("0.33.1", "vllm.entrypoints.launchers.api_server.entry")],
)
def test_the_command_of_the_server(found, module, tmp_path, monkeypatch):
    pretend(monkeypatch, found)
    started = []
    monkeypatch.setattr("os.execv", lambda program, command: started.append((program, command, dict(os.environ))))
    save(tmp_path / "run" / "model")
    assert (
        main(["serve", str(tmp_path / "run"), "--port", "8123", "--memory", "0.5", "--name", "own", "--enforce-eager"])
        == 0
    )
    ((program, command, environment),) = started
    assert (
        environment["PYTHONSAFEPATH"] == "1"
    )  # python -m leaves the current folder off its path, and so do its children
    assert program == command[0] == sys.executable
    assert command[1:5] == ["-m", module, "--model", str(tmp_path / "run" / "model")]
    options = command[5:]
    wanted = {"--port": "8123", "--host": "127.0.0.1", "--served-model-name": "own", "--dtype": "float32"}
    for name, value in {**wanted, "--kv-cache-memory-bytes": str(2**29)}.items():
        assert options[options.index(name) + 1] == value
    assert options[-1] == "--enforce-eager"


def test_a_pool_may_be_so_small_that_sequences_give_way(tmp_path, with_vllm):
    """As that of `serving_soak`."""
    save(tmp_path)
    command = server_command(tmp_path, memory=0.0007)
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(int(0.0007 * 2**30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 0}, "port"),
        ({"port": 70_000}, "port"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_model_len": 10**12}, "max_model_len"),
        ({"memory": 0.0}, "memory"),
        ({"memory": -1.0}, "memory"),
        ({"memory": 1e300}, "memory"),
        ({"memory": 1e-300}, "memory"),
        ({"memory": float("nan")}, "memory"),
        ({"memory": float("inf")}, "memory"),
        ({"host": ""}, "host"),
        ({"host": " "}, "host"),
        ({"host": "127.0.0.1\x1b[2J"}, "host"),
        ({"name": ""}, "name"),
        ({"dtype": "int8"}, "dtype"),
        ({"others": ["another-model"]}, "others"),
        ({"others": ["--model", "another"]}, "others"),
        ({"others": ["--enforce-eager", "--model=another"]}, "others"),
        ({"others": ["--model_tag=another"]}, "others"),
        ({"others": ["--tokenizer", "another"]}, "others"),
        ({"others": ["--hf_config_path", "another"]}, "others"),
        ({"others": ["--enforce-eager", "--hf-config=another"]}, "others"),
    ],
)
def test_bad_options_are_refused(options, message, tmp_path, with_vllm, monkeypatch, capsys):
    """By the function and by the command."""
    save(tmp_path)
    with pytest.raises(ValueError, match=rf"^{message} must"):
        server_command(tmp_path, **options)
    monkeypatch.setattr("os.execv", lambda program, command: pytest.fail("it was started"))
    named = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if name != "others"]
    capsys.readouterr()
    assert main(["serve", str(tmp_path), *named, *options.get("others", [])]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_folder_without_a_model_or_its_tokenizer_is_refused(tmp_path, with_vllm, capsys):
    assert main(["serve", str(tmp_path)]) == 2
    assert "holds no model" in capsys.readouterr().err
    save(tmp_path, vocabulary=300)
    with pytest.raises(ValueError, match="must have at most the model's 300 tokens, got 400"):
        server_command(tmp_path)
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="holds no tokenizer"):
        server_command(tmp_path)


def test_vllm_finds_the_package():
    project = (PACKAGE.parent / "pyproject.toml").read_text()
    first, last = (part.partition(".")[2] for part in versions.TESTED.split(" to "))
    assert f'vllm = ["vllm>=0.{first},<0.{int(last) + 1}; ' in project
    (line,) = re.findall(r'entry-points."vllm.general_plugins"\]\nfastweights = "(.*)"', project)
    module, name = line.split(":")
    assert callable(getattr(importlib.import_module(module), name))


@pytest.mark.slow
def test_nothing_of_vllm_is_imported_outside_its_folder():
    for path in PACKAGE.rglob("*.py"):
        if PACKAGE / "serving" / "vllm" in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [name for name in names if name.split(".")[0] == "vllm"], path
