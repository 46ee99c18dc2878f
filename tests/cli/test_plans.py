"""`--dry-run`, `--quiet`, `--json`, `-h` and shell completion."""

import json
import os

import pytest

from fastweights.cli import main
from fastweights.layers import registry
from fastweights.training.language import load_run
from fastweights.training.language.trainer import training_arguments

from ..evaluation.small import TEXT, save
from .planning import check_plan, check_refused_plan
from .run_file import RUN

RECALL = (
    "recall --pairs 2,4 --vocab-size 16 --width 8 --layers 1 --steps 2 --batch-size 2 --test-examples 2 --mixers linear "
    "--learning-rates 0.01,0.02 --output out"
)
COMMANDS = [
    "recall",
    "train",
    "convert",
    "evaluate",
    "generate",
    "mixers",
    "serve",
]
EVALUATE = "evaluate model --text text.txt --lengths 16,32 --texts 1 --stretch 8"


def fill(folder):
    save(folder / "model")
    (folder / "text.txt").write_text(TEXT)
    (folder / "run.toml").write_text(RUN)


@pytest.fixture
def folder(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    fill(tmp_path)
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("train run.toml --set length=64", ["length: 64", 'prompt: ""', "parameters: ", "tokens: 256", "output: trained"]),
        ("train run.toml --set mixers=[\"gdn\",\"pgdn\"]", ["output: trained/gdn", "output: trained/pgdn"]),
        (f"{RECALL} --validation-examples 8", ["validation_examples: 8"]),
        (RECALL, ["validation_examples: 256", "mixer: linear", "pairs: 4", "runs: 2", "ended: 0", "output: out", "parameters: "]),
        (EVALUATE, ["lengths: [16, 32]", "parameters: ", "text: text.txt", "output: model/evaluation.json"]),
        ("convert model --to pgdn --output new", ["output: new", "new parameters: ", 'mixers after: ["pgdn"']),
    ],
)  # fmt: skip
def test_a_dry_run_says_what_and_writes_nothing(folder, capsys, command, words):
    for output in (".new",):  # what a killed command leaves
        (folder / f"{output}.0badcafe.partial").mkdir()
    check_plan(folder, capsys, command, words)


@pytest.mark.parametrize(
    "command",
    [
        "train run.toml --set model.num_heads=3",
        "train run.toml --set corpus.paths=nowhere.txt",
        "train run.toml --output model",
        f"{RECALL} --mixers gdn:backend=triton",
        f"{RECALL} --output model",
        "evaluate text.txt",
        "train run.toml --stop-at 0",
        "convert model --to pgdn --output new --tokens 0",
        "convert model --to gdn --output model",
    ],
)
def test_a_dry_run_refuses_what_the_command_would(folder, capsys, command):
    check_refused_plan(folder, capsys, command)


def test_a_dry_run_knows_what_is_there(folder, capsys):
    """Steps and runs that earlier commands have left."""

    def planned(*options):
        assert main(["train", "run.toml", *options]) == 0
        return capsys.readouterr()

    assert "begins: from the start" in planned("--dry-run").out
    stopped = planned("--stop-at", "1", "--quiet")
    assert stopped.out == stopped.err == ""
    assert "begins: after step 1" in planned("--dry-run").out
    ended = planned("--quiet")
    assert "Models: trained/model" in ended.out and ended.err == ""
    assert "begins: has ended" in planned("--dry-run").out
    assert "begins: from the start" in planned("--dry-run", "--overwrite").out
    assert (folder / "trained" / "result.json").exists()


@pytest.mark.parametrize(
    "command",
    [
        "generate model Once --max-new-tokens 2",
        "convert model --to pgdn --output new",
        *(pytest.param(command, marks=pytest.mark.slow) for command in (EVALUATE,)),
    ],
)
def test_quiet_commands_leave_standard_error_alone(folder, capsys, command):
    for option in ("-q", "--quiet"):
        assert main([*command.replace("--output new", f"--output new{option}").split(), option]) == 0
        printed = capsys.readouterr()
        assert printed.err == "" and printed.out


@pytest.mark.slow
def test_an_evaluation_as_one_document(folder, capsys):
    assert main([*EVALUATE.split(), "--json", "-q"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert document == json.loads((folder / "model" / "evaluation.json").read_text())
    assert [row["length"] for row in document["results"]["perplexity"]] == [16, 32]
    assert "Results: model/evaluation.json" in printed.err and "Plot: " in printed.err
    assert main([*EVALUATE.split(), "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["output"] == "model/evaluation.json"
    assert main(["evaluate", "model", "--json", "--text", "text.txt", "--lengths", "100000"]) == 2
    assert capsys.readouterr().out == ""


LOUD = """
import os
from fastweights.layers import register_mixer
from fastweights.layers.linear_attention import LinearAttention
print("registering")
os.system("echo a process")
register_mixer("loud", layer=LinearAttention, summary="x", equation="x", source="x", state="H K V")
"""


@pytest.mark.parametrize(
    ("command", "code"),
    [
        pytest.param(EVALUATE, 0, marks=pytest.mark.slow),
        (f"{EVALUATE} --dry-run", 0),
        (f"{RECALL} --dry-run", 0),
        (f"{RECALL} --width 7", 2),
    ],
)
def test_what_a_module_and_its_processes_print_is_no_part_of_the_document(tmp_path, capfd, monkeypatch, command, code):
    fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    (tmp_path / "loud.py").write_text(LOUD)
    capfd.readouterr()
    assert main([*command.split(), "--json", "--import", "loud.py"]) == code
    printed = capfd.readouterr()
    assert printed.out == "" if code else json.loads(printed.out)
    assert "registering\n" in printed.err and "a process\n" in printed.err
    os.system("echo later")
    assert capfd.readouterr().out == "later\n"


@pytest.mark.parametrize(
    "options", [pytest.param("", marks=pytest.mark.slow), "--json", "--dry-run", "--json --dry-run"]
)
def test_a_closed_standard_output_is_no_error(folder, capsys, monkeypatch, options):
    """As with `>&-` in a shell."""
    monkeypatch.setattr("sys.stdout", None)
    assert main([*EVALUATE.split(), *options.split(), "-q"]) == 0
    assert "error" not in capsys.readouterr().err


@pytest.mark.slow
def test_recall_as_one_document(folder, capsys):
    """Without parts that of results.json, else one per part."""
    assert main([*RECALL.split(), "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == json.loads((folder / "out" / "results.json").read_text())
    assert "Results: out/results.json" in printed.err and "4 of 4 runs to train" in printed.err
    (folder / "parts.toml").write_text("[parts.a]\nwidth = 8\n[parts.b]\nwidth = 16\n")
    options = RECALL.replace("--width 8", "").replace("--output out", "--output parts")
    assert main(["recall", "parts.toml", *options.split()[1:], "--json", "--quiet"]) == 0
    printed = capsys.readouterr()
    document = json.loads(printed.out)
    assert [document[part]["experiment"]["width"] for part in "ab"] == [8, 16] and "runs to train" not in printed.err


def test_the_plan_of_recall_as_a_document(folder, capsys):
    assert main([*RECALL.split(), "--json", "--dry-run"]) == 0
    (part,) = json.loads(capsys.readouterr().out)["parts"]
    assert [(model["pairs"], model["runs"]) for model in part["models"]] == [(2, 2), (4, 2)]
    assert part["settings"]["block"] == "matched"
    assert main([*RECALL.split(), "--block", "published", "--json", "--dry-run"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"][0]["settings"]["block"] == "published"


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_the_short_name_of_help(capsys, command):
    assert main([*command, "-h"]) == 0
    short = capsys.readouterr().out
    assert main([*command, "--help"]) == 0
    assert capsys.readouterr().out == short and "Usage: fastweights" in short


def test_completion_in_a_shell(capsys, monkeypatch):
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    assert main(["--show-completion"]) == 0
    assert "complete -o default -F _fastweights_completion fastweights" in capsys.readouterr().out
    monkeypatch.setenv("_FASTWEIGHTS_COMPLETE", "complete_bash")
    for words, number, found in (("fastweights rec", 1, "recall"), ("fastweights recall --dry", 2, "--dry-run")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(number))
        assert main([]) == 0 and capsys.readouterr().out.split() == [found]


def test_trackers_go_to_the_trainer(folder):
    """TensorBoard has a log of its own, whose points a continued training takes back."""
    run = load_run("run.toml", overrides=['report_to=["wandb", "tensorboard", "trackio"]'])
    arguments = training_arguments(run, folder / "checkpoints", [], bucket=25)
    assert arguments.report_to == ["wandb", "trackio"] and arguments.run_name == "trained"
    assert run.writes_tensorboard and not load_run("run.toml").writes_tensorboard
    assert load_run("run.toml", report_to="trackio").report_to == ("trackio",)


@pytest.mark.slow
def test_tensorboard_by_name(folder, capsys):
    assert main(["train", "run.toml", "--set", "report_to=tensorboard", "-q"]) == 0
    assert list((folder / "trained" / "tensorboard").glob("events*")) and capsys.readouterr().err == ""
