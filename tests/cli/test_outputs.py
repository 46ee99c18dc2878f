"""Nothing of a user's is replaced: what every command does with what stands where it writes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from fastweights.cli import main

from . import writing
from .writing import QUICK, SMALL, folder, refused, run_twice, writing_tests

whole, place = writing.whole, writing.place  # fixtures

# Commands by name: without the place of --output, and where the work begins.
COMMANDS = {
    "recall": (f"recall {SMALL} --learning-rates 0.01 --test-examples 2", "fastweights.training.recall.run:train_jobs"),
    "train": ("train run.toml", "fastweights.training.language.train:LanguageTrainer"),
    "evaluate": (f"evaluate model {QUICK}", "fastweights.models.loading:load_language_model"),
    "convert": ("convert model --to pgdn", "fastweights.conversion.folder:load_model"),
}

TestWriting = writing_tests(COMMANDS, [("evaluate", "new.json", "new-perplexity.png")], files=["evaluate"])


@pytest.mark.slow
def test_what_an_evaluation_wrote_is_replaced_and_all_else_stays(place):
    """Also what an earlier version wrote, plots that name Matplotlib alone."""
    (place / ".movie.partial").mkdir()
    line = f"{COMMANDS['evaluate'][0]} --output new.json"
    run_twice(line)
    plot = place / "new-perplexity.png"
    plot.write_bytes(as_earlier(plot.read_bytes()))
    assert main(line.split()) == 0
    assert b"fastweights" in plot.read_bytes()[:400] and (place / ".movie.partial").exists()


def as_earlier(png: bytes) -> bytes:
    """A PNG file with Matplotlib's name in the place of ours."""
    import io

    from PIL import Image, PngImagePlugin

    info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text("Software", "Matplotlib version3.9.2, https://matplotlib.org/")
    Image.open(io.BytesIO(png)).save(buffer, format="png", pnginfo=info)
    return buffer.getvalue()


def test_a_plot_of_a_persons_own_is_no_plot_of_an_evaluation(place, capsys):
    from matplotlib.figure import Figure

    Figure().savefig(place / "new-perplexity.png")
    refused(place, capsys, f"{COMMANDS['evaluate'][0]} --output new.json", "new-perplexity.png")


def test_a_conversion_is_replaced_on_demand_alone(place, capsys):
    line = f"{COMMANDS['convert'][0]} --output new"
    assert main(line.split()) == 0
    refused(place, capsys, line, "overwrite")
    (place / "new" / "notes.txt").write_text("mine")
    assert main(f"{line} --overwrite --steps 7".split()) == 0
    assert (place / "new" / "notes.txt").read_text() == "mine"
    assert "max_steps = 7" in (place / "new" / "train.toml").read_text()
    refused(place, capsys, "convert new --to pgdn --output new --overwrite", "source")
    with (place / "new" / "train.toml").open("a") as settings:
        settings.write("# my own change\n")
    refused(place, capsys, f"{line} --overwrite", "train.toml")


def test_a_conversion_whose_place_is_taken_meanwhile_is_not_saved(place, capsys, monkeypatch):
    """As by a process on another machine, which no lock tells of."""
    from fastweights.conversion import folder as module

    load = module.load_model

    def load_while_another_writes(*arguments: Any) -> Any:
        folder(place / "new")
        return load(*arguments)

    monkeypatch.setattr(module, "load_model", load_while_another_writes)
    assert main(f"{COMMANDS['convert'][0]} --output new".split()) == 1
    printed = capsys.readouterr()
    assert "Saved" not in printed.out and "new could not be written" in printed.err
    assert os.listdir(place / "new") == ["cat.jpg"] and not list(place.glob(".*"))


# What is at a name in the folder of a recall experiment or a training, and whether a link there leads to a folder.
INSIDE = [
    *[("recall", name) for name in ("runs", "results.json", "experiment.json", ".lock", "loss-curves.png")],
    *[
        ("train", name)
        for name in ("run.json", "checkpoints", "model", "log.jsonl", "result.json", ".lock", "loss.png")
    ],
    ("train", "checkpoints/checkpoint-7"),
]


@pytest.mark.parametrize(("command", "name"), INSIDE)
def test_links_in_an_output_folder_are_not_followed(place, capsys, command, name):
    """The folder is as one of an earlier command, whose description is there, but for what a person has put in it."""
    out = place / "out"
    description = earlier(out, command)
    (out / name).parent.mkdir(exist_ok=True)
    if (out / name) == description:
        (place / "mine" / name).write_text(description.read_text())
        description.unlink()
    target = "mine" if "." not in name.lstrip(".") else f"mine/{name}" if description.name == name else "mine/file"
    (place / "mine" / "linear-pairs2-lr0.01-seed0.json").write_text("precious")
    (out / name).symlink_to(place / target)
    for options in ("", " --overwrite"):
        refused(place, capsys, f"{COMMANDS[command][0]} --output out{options}", name)


def earlier(out: Path, command: str) -> Path:
    out.mkdir()
    recall = {"task": "copy", "mixers": ["gdn"], "pairs": [2], "learning_rates": [1.0], "seeds": [0], "steps": 3}
    train = {"model": {}, "tokenizer": {}, "length": 8, "max_steps": 3}
    path = out / {"recall": "experiment.json", "train": "run.json"}[command]
    path.write_text(json.dumps(recall if command == "recall" else train))
    return path


@pytest.mark.parametrize("command", ["recall", "train"])
@pytest.mark.parametrize("content", ['{"name": "an experiment of mine"}', "not JSON", "[]"])
def test_a_description_of_another_program_is_no_earlier_output(place, capsys, command, content):
    earlier(place / "out", command).write_text(content)
    for name in ("results.json", "loss.png", "loss-curves.png"):
        (place / "out" / name).write_text("years of work")
    for options in ("", " --overwrite"):
        refused(place, capsys, f"{COMMANDS[command][0]} --output out{options}", "out")


def test_checkpoints_of_another_program_are_no_earlier_output(place, capsys):
    checkpoint = place / "out" / "checkpoints" / "checkpoint-5"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    for options in ("", " --overwrite"):
        refused(place, capsys, f"train run.toml --output out{options}", "checkpoints")


@pytest.mark.slow
def test_overwrite_leaves_what_a_person_put_in_a_training(place):
    assert main(["train", "run.toml", "--output", "out"]) == 0
    (place / "mine" / "linked").symlink_to(place / "mine" / "file")
    mine = ("notes.txt", "model/notes.txt", "model/README.md", "checkpoints/checkpoint-2/evaluation.json")
    links = ("checkpoints/best",)
    partials = (".movie.partial", "model/.movie.partial", "checkpoints/.movie.12345678.partial")
    for name in (*mine, *partials):
        (place / "out" / name).write_text("mine")
    for name in links:
        (place / "out" / name).symlink_to(place / "mine")
    left = place / "out" / "checkpoints" / ".checkpoint-3.0badcafe.partial"
    left.mkdir()
    assert main(["train", "run.toml", "--max-steps", "1", "--output", "out", "--overwrite"]) == 0
    for name in (*mine, *partials):
        assert (place / "out" / name).read_text() == "mine", name
    assert (place / "mine" / "file").read_text() == "precious" and (place / "out" / "checkpoints" / "best").is_symlink()
    assert json.loads((place / "out" / "result.json").read_text())["steps"] == 1 and not left.exists()
    assert (place / "out" / "model" / "model.safetensors").is_file()


def test_a_model_that_is_named_by_a_link_has_its_results_in_its_own_folder(place, capsys):
    (place / "latest").symlink_to("model")
    assert main(f"evaluate latest {QUICK}".split()) == 0
    assert f"Results: {place / 'model' / 'evaluation.json'}" in capsys.readouterr().out


def test_a_text_is_no_output_even_where_it_is_an_evaluation(place, capsys):
    assert main(f"{COMMANDS['evaluate'][0]} --output new.json".split()) == 0
    (place / "text.json").symlink_to("new.json")
    for text in ("new.json", "mine/../new.json", "text.json"):
        line = COMMANDS["evaluate"][0].replace("text.txt", text)
        for options in ("", " --overwrite"):
            refused(place, capsys, f"{line} --output new.json{options}", "text that is read")


@pytest.mark.slow
def test_hard_links_to_an_output_keep_the_earlier_content(place):
    line = f"{COMMANDS['evaluate'][0]} --output new.json"
    assert main(line.split()) == 0
    os.link(place / "new.json", place / "kept.json")
    before = (place / "kept.json").read_bytes()
    assert main(f"{line} --texts 2".split()) == 0
    assert (place / "kept.json").read_bytes() == before != (place / "new.json").read_bytes()
