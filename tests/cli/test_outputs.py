"""Nothing of a user's is replaced: what every command does with what stands where it writes."""

from __future__ import annotations

import importlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fastweights.cli import main
from tests.evaluation.small import TEXT, save

RUN = """
length = 32
batch_size = 2
max_steps = 2
evaluation_rows = 2
context_lengths = [16]
cache = "cache"
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 300
[corpus]
paths = ["text.txt"]
"""
SMALL = "--task mqar-shuffled --mixers linear --pairs 2 --vocab-size 16 --width 8 --layers 1 --steps 2 --batch-size 2"
QUICK = "--lengths 40 --texts 1 --stretch 8 --text text.txt"
# Commands by name: without the place of --output, that place, and where the work begins.
COMMANDS = {
    "recall": (f"recall {SMALL} --learning-rates 0.01 --test-examples 2", "training.recall.run:train_jobs"),
    "train": ("train run.toml", "training.language.train:LanguageTrainer"),
    "evaluate": (f"evaluate model {QUICK}", "models.loading:load_language_model"),
    "convert": ("convert model --to pgdn", "conversion.folder:load_model"),
    "inspect": ("inspect model --tokens 20 --measures norms --text text.txt", "models.loading:load_language_model"),
    "reproduce": ("reproduce C2", "experiments:run_claim"),
    "leaderboard": ("leaderboard rules --mixers gdn", "leaderboard:run_part"),
}
OUTPUTS = {name: "new.json" if name == "evaluate" else "new" for name in COMMANDS}
# What they write there: a place by the output that leads to it.
PLACES = [
    *[(name, OUTPUTS[name], OUTPUTS[name]) for name in COMMANDS],
    ("evaluate", "new.json", "new-perplexity.png"),
    ("reproduce", "new", "new/C2.json"),
    ("leaderboard", "new", "new/rules-cpu.json"),
]
FOREIGN_FOLDERS = ("reproduce", "leaderboard")  # one file per claim or part, beside whatever else is there


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
FOREIGN = [  # in the fast set: one thing at every place, and every thing at the places of one command
    pytest.param(thing, *place, marks=() if thing is file or place[0] == "evaluate" else pytest.mark.slow)
    for thing in THINGS
    for place in PLACES
]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("whole")
    save(place / "model", mixer="gdn")
    (place / "text.txt").write_text(TEXT * 8)
    (place / "run.toml").write_text(RUN)
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


@pytest.mark.parametrize("overwrite", ["", " --overwrite"])
@pytest.mark.parametrize(("thing", "command", "output", "at"), FOREIGN)
def test_other_things_at_the_output_stay(place, capsys, command, output, at, thing, overwrite):
    if thing is folder and command in FOREIGN_FOLDERS and at == output:
        pytest.skip("its files go beside others")
    (place / at).parent.mkdir(exist_ok=True)
    thing(place / at)
    refused(place, capsys, f"{COMMANDS[command][0]} --output {output}{overwrite}", "output", Path(at).name)


@pytest.mark.parametrize("command", COMMANDS)
def test_links_on_the_way_are_not_followed(place, capsys, command):
    (place / "link").symlink_to("mine")
    line = f"{COMMANDS[command][0]} --output link/{OUTPUTS[command]}"
    for options in ("", " --overwrite"):
        refused(place, capsys, line + options, "link", str(place / "mine" / OUTPUTS[command]))


@pytest.mark.parametrize("output", ["", " ", "~", "~/new", "/", "..", "."])
@pytest.mark.parametrize("command", COMMANDS)
def test_outputs_that_are_no_place_of_their_own(place, capsys, command, output):
    if command in FOREIGN_FOLDERS and output in ("/", "..", "."):
        pytest.skip("its files go beside others")
    before = contents(place)
    assert main([*COMMANDS[command][0].split(), "--output", output]) == 2
    assert contents(place) == before and capsys.readouterr().err.count("\n") == 1


INPUTS = ("model/model.safetensors", "model/config.json", "run.toml", "text.txt", "model")


@pytest.mark.parametrize("at", INPUTS)
@pytest.mark.parametrize("command", COMMANDS)
def test_inputs_are_no_outputs(place, capsys, command, at):
    if command in FOREIGN_FOLDERS and at == "model":
        pytest.skip("its files go beside others")
    for options in ("", " --overwrite"):
        refused(place, capsys, f"{COMMANDS[command][0]} --output {at}{options}", "output")


@pytest.mark.parametrize("command", COMMANDS)
def test_one_process_at_a_time(place, capsys, monkeypatch, command):
    """While a command works, the same command is refused, under another name of the place too."""
    line, work = COMMANDS[command]
    module, _, function = work.partition(":")
    codes = []

    def work_of_the_first(*_: Any, **__: Any) -> None:
        for output in (OUTPUTS[command], f"../place/{OUTPUTS[command]}"):
            codes.append((main([*line.split(), "--output", output]), capsys.readouterr().err))
        raise ValueError("the end")

    monkeypatch.setattr(importlib.import_module(f"fastweights.{module}"), function, work_of_the_first)
    assert main([*line.split(), "--output", OUTPUTS[command]]) == 2
    assert [code for code, _ in codes] == [2, 2]
    assert all("in use by another process" in error for _, error in codes), codes
    assert "the end" in capsys.readouterr().err


def run_twice(line: str) -> None:
    for options in ("", "", " --overwrite"):
        assert main([*line.split(), *options.split()]) == 0, options


@pytest.mark.slow
def test_what_a_command_wrote_is_replaced_and_all_else_stays(place):
    """Also what an earlier version wrote, without lists of files, and plots that name Matplotlib alone."""
    (place / "seen").mkdir()
    (place / ".seen.0badcafe.partial").mkdir()
    (place / ".movie.partial").mkdir()
    for line in (f"{COMMANDS['evaluate'][0]} --output new.json", f"{COMMANDS['inspect'][0]} --output seen"):
        run_twice(line)
    assert not (place / ".seen.0badcafe.partial").exists() and (place / ".movie.partial").exists()
    described = json.loads((place / "seen" / "inspection.json").read_text())
    described.pop("files")
    (place / "seen" / "inspection.json").write_text(json.dumps(described))
    (place / "seen" / "notes.txt").write_text("mine")
    plot = place / "new-perplexity.png"
    plot.write_bytes(as_earlier(plot.read_bytes()))
    for line in (f"{COMMANDS['evaluate'][0]} --output new.json", f"{COMMANDS['inspect'][0]} --output seen"):
        assert main(line.split()) == 0
    assert (place / "seen" / "notes.txt").read_text() == "mine" and b"fastweights" in plot.read_bytes()[:400]


def as_earlier(png: bytes) -> bytes:
    """A PNG file with Matplotlib's name in the place of ours."""
    import io

    from PIL import Image, PngImagePlugin

    info, buffer = PngImagePlugin.PngInfo(), io.BytesIO()
    info.add_text("Software", "Matplotlib version3.9.2, https://matplotlib.org/")
    Image.open(io.BytesIO(png)).save(buffer, format="png", pnginfo=info)
    return buffer.getvalue()


def test_what_an_inspection_wrote_is_replaced(place):
    line = f"{COMMANDS['inspect'][0]} --output seen"
    assert main(line.split()) == 0
    before = (place / "seen" / "inspection.json").stat()
    (place / "seen" / "notes.txt").write_text("mine")
    assert main(line.split()) == 0
    assert (place / "seen" / "inspection.json").stat().st_mtime_ns > before.st_mtime_ns
    assert (place / "seen" / "notes.txt").read_text() == "mine"


def test_a_plot_of_a_persons_own_is_no_plot_of_an_evaluation(place, capsys):
    from matplotlib.figure import Figure

    Figure().savefig(place / "new-perplexity.png")
    refused(place, capsys, f"{COMMANDS['evaluate'][0]} --output new.json", "new-perplexity.png")


def test_files_of_an_inspection_that_were_edited_stay(place, capsys):
    line = f"{COMMANDS['inspect'][0]} --output seen"
    assert main(line.split()) == 0
    with (place / "seen" / "index.html").open("a") as page:
        page.write("<p>what I think of it</p>")
    refused(place, capsys, line, "index.html")
    refused(place, capsys, f"{line} --overwrite", "index.html")


def test_a_list_of_files_deletes_nothing_else(place):
    """inspection.json may be a stranger's."""
    (place / "seen").mkdir()
    (place / "seen" / "notes.txt").write_text("mine")
    described = {"layers": {}, "panels": {}, "files": {"*": "", "../mine/file": "", "notes": ""}}
    (place / "seen" / "inspection.json").write_text(json.dumps(described))
    assert main(f"{COMMANDS['inspect'][0]} --output seen --overwrite".split()) == 0
    assert (place / "seen" / "notes.txt").read_text() == "mine" and (place / "mine" / "file").exists()


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


def test_records_are_replaced_by_those_of_the_same_claim_alone(place, capsys):
    line = f"{COMMANDS['reproduce'][0]} --output new"
    run_twice(line)
    record = json.loads((place / "new" / "C2.json").read_text())
    (place / "new" / "C2.json").write_text(json.dumps({**record, "claim": "C3"}))
    refused(place, capsys, line, "C2.json")


@pytest.mark.slow
def test_a_training_that_is_measured_anew_leaves_other_files(place):
    """reproduce and leaderboard delete the trainings that they made, with --overwrite."""
    from fastweights.training.recall.folder import remove_trainings

    recall = f"{COMMANDS['recall'][0]} --workers 1 --output new/trained/C2/all"
    assert main(recall.split()) == 0
    (place / "new" / "trained" / "C2" / "notes.txt").write_text("mine")
    runs = place / "new" / "trained" / "C2" / "all" / "runs"
    (runs / "notes.json").write_text("mine")
    assert main(f"{COMMANDS['reproduce'][0]} --output new --overwrite".split()) == 0
    left = {path.name for path in (place / "new" / "trained").rglob("*") if path.is_file()}
    assert left == {"notes.txt", "notes.json", "experiment.json", ".lock"}  # the folder may be used again
    assert main(recall.replace("--steps 2", "--steps 3").split()) == 0
    remove_trainings(place / "nowhere")


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


def test_hard_links_to_an_output_keep_the_earlier_content(place):
    line = f"{COMMANDS['evaluate'][0]} --output new.json"
    assert main(line.split()) == 0
    os.link(place / "new.json", place / "kept.json")
    before = (place / "kept.json").read_bytes()
    assert main(f"{line} --texts 2".split()) == 0
    assert (place / "kept.json").read_bytes() == before != (place / "new.json").read_bytes()
