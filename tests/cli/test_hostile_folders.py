"""Folders of models that a stranger made: every command ends with one line, runs nothing of them and writes nothing."""

from __future__ import annotations

import json

import pytest
import torch

from fastweights.cli import main

from ..conversion.small import mamba2
from . import hostile_folders
from .hostile import listing, set_keys
from .hostile_folders import (
    COMMANDS,
    EVIL,
    MODEL,
    RUN,
    TOKENIZER,
    cases,
    check_one_line,
    index,
    pickled,
    weights,
)  # fmt: skip

whole, place, within_limits = hostile_folders.whole, hostile_folders.place, hostile_folders.within_limits  # fixtures


@pytest.mark.parametrize(
    ("command", "harm"),
    [
        *cases("generate evaluate", TOKENIZER, MODEL, every="generate"),
        *cases("convert train", MODEL, {name: harm for name, harm in TOKENIZER.items() if "code" in name}),
        *cases("evaluate", RUN, every="evaluate"),
    ],
)
def test_one_line_and_nothing_else(place, capfd, command, harm):
    check_one_line(place, capfd, command, harm, COMMANDS.get(command, ()))


def test_what_is_never_run_does_no_harm(place, capfd):
    """A template is text that the commands do not render; files of code are not looked at."""
    folder = place / "stranger"
    (folder / "chat_template.jinja").write_text(
        "{{ ''.__class__.__mro__[1].__subclasses__() }}{% for i in range(10**9) %}"
    )
    (folder / "custom_generate").mkdir()
    for path in (folder / "custom_generate" / "generate.py", folder / "modeling.py", folder / "sitecustomize.py"):
        path.write_text(EVIL)
    (folder / "generation_config.json").write_text(json.dumps({"num_beams": 10**9, "num_return_sequences": 10**9}))
    before = listing(place)
    assert main(["generate", "stranger", *COMMANDS["generate"], "--seed", "0"]) == 0
    printed = capfd.readouterr().err.splitlines()
    assert len(printed) == 1 and "tokens, " in printed[0] and listing(place) == before


@pytest.mark.parametrize("name", ["evaluation.json", "evaluation-perplexity.png"])
def test_results_do_not_follow_links_out_of_the_folder(place, capfd, name):
    (place / "mine").write_text("years of work")
    (place / "stranger" / name).symlink_to(place / "mine")
    options = ["--lengths", "40", "--stretch", "8", "--texts", "1", "--text", "text.txt"]
    before = listing(place)
    assert main(["evaluate", "stranger", *options]) == 2
    assert f"{name} is one" in capfd.readouterr().err and listing(place) == before
    (place / "stranger" / name).unlink()
    assert main(["evaluate", "stranger", *options]) == 0
    assert json.loads((place / "stranger" / "evaluation.json").read_text())["results"]


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (
            set_keys("config.json", num_hidden_layers=10**9),
            "num_hidden_layers must be a positive whole number of at most 10,000",
        ),
        (set_keys("config.json", auto_map={"AutoConfig": "evil.Evil"}), "asks for code to be run"),
        (set_keys("config.json", vocab_size=10**9), "and must be [1000000000, 32]"),
        (pickled("pytorch_model.bin", torch.save), "pickle"),
        (index("../outside.safetensors"), "in its own folder"),
        (weights(lambda found: found.update({"backbone.norm_f.weight": torch.zeros(3)})), "is [3] and must be [32]"),
    ],
)
def test_a_mamba2_of_transformers(place, capfd, harm, message):
    mamba2().save_pretrained(place / "other")
    harm(place / "other")
    capfd.readouterr()
    assert main(["convert", "other", "--to", "mamba2", "--output", "new"]) == 2
    printed = capfd.readouterr()
    assert printed.err.count("\n") == 1 and "other" in printed.err and message in printed.err, printed
    assert not (place / "new").exists() and not (place / "ran").exists()
