"""`--set KEY=VALUE`: every field of a run file of `train` and `recall` from the command line."""

import dataclasses
import json
import sys

import pytest

from fastweights.cli import main
from fastweights.training import load_recall_file
from fastweights.training.language import load_run

RUN = """
output = "out"
mixers = ["linear", "gdn"]
[model]
hidden_size = 16
num_heads = 2
[corpus]
paths = ["text.txt"]
"""
RECALL = """
output = "recall"
width = 16
mixers = ["gdn", { name = "gdn", options = { conv_size = 2 }, label = "small" }]
[task_options]
random_non_queries = false
[[curriculum]]
pairs = 2
steps = 3
[parts.narrow]
width = 8
[parts.wide]
width = 32
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "run.py").write_text(
        "from fastweights.training.language import LanguageRun\nrun = LanguageRun(model={'num_heads': 2}, output='out')\n"
    )
    (tmp_path / "recall.toml").write_text(RECALL)
    return tmp_path


@pytest.mark.parametrize("file", ["run.toml", "run.py"])
def test_fields_of_a_training(folder, file):
    run = load_run(
        file,
        overrides=[
            *(
                "model.num_heads=8",
                'model.mixer={name = "gdn", expand_v = 2.0}',
                "mixers=[]",
                "length = 64",
                "fsdp=true",
            ),
            *(
                "forward_prefetch=1",
                "precision=bf16",
                'prompt="a = b"',
                "corpus.held_out_fraction=0.5",
                "model.mixer.conv_size=3",
            ),
            *(
                "context_lengths=[16, 32]",
                "tokenizer.vocab_size=300",
                "report_to=[]",
                "cache=/tmp/a.b",
                "learning_rate=1e-4",
            ),
        ],
        length=32,
    )
    assert run.model["num_heads"] == 8 and run.model["mixer"] == {"name": "gdn", "expand_v": 2.0, "conv_size": 3}
    assert (run.mixers, run.length, run.fsdp, run.forward_prefetch) == ((), 64, True, 1)
    assert (run.precision, run.prompt, run.corpus.held_out_fraction) == ("bf16", "a = b", 0.5)
    assert run.context_lengths == (16, 32) and run.tokenizer.vocab_size == 300 and run.learning_rate == 1e-4
    assert run.cache == "/tmp/a.b" and run.output == "out"
    assert run.corpus.paths == (("text.txt",) if file == "run.toml" else ())


def test_every_field_can_be_set(folder):
    """Its own value, of every field that has one without tables, changes nothing."""
    (folder / "mixers.toml").write_text('mixers = ["gdn"]')
    (experiment,) = load_recall_file("mixers.toml").parts.values()
    checked = []
    for before, load in (
        (load_run("run.toml"), lambda text: load_run("run.toml", overrides=[text])),
        (experiment, lambda text: load_recall_file("mixers.toml", overrides=[text]).parts[""]),
    ):
        for field in dataclasses.fields(before):
            value = getattr(before, field.name)
            if isinstance(value, (int, float, str, bool, tuple)):
                checked.append(field.name)
                assert load(f"{field.name}={json.dumps(value)}") == before, field.name
    assert len(checked) > 55


def test_fields_of_a_recall_experiment(folder):
    study = load_recall_file(
        "recall.toml",
        overrides=[
            *(
                "width=64",
                "task_options.padding=start",
                "mixers.1.options.conv_size=3",
                "curriculum.0.steps=5",
                "workers=1",
            ),
            *("parts.wide.heads=4", "output=elsewhere", "learning_rates=[0.01]"),
        ],
    )
    narrow, wide = study.parts["narrow"], study.parts["wide"]
    assert (narrow.width, wide.width, narrow.heads, wide.heads) == (64, 64, 2, 4)  # as an option, in every part
    assert narrow.task_options == {"random_non_queries": False, "padding": "start"}
    assert narrow.mixers[1].options == {"conv_size": 3} and narrow.steps == 5 and narrow.learning_rates == (0.01,)
    assert study.workers == 1 and study.output == "elsewhere"


@pytest.mark.parametrize(
    ("command", "setting", "words"),
    [
        ("train run.toml", "lenght=3", ["'lenght'", "did you mean 'length'"]),
        ("train run.toml", "model.num_head=3", ["num_head", "did you mean 'num_heads'"]),
        ("train run.toml", "corpus.path=x", ["[corpus]", "did you mean 'paths'"]),
        ("train run.toml", "optimiser.rate=3", ["'optimiser'", "did you mean 'optimizer'"]),
        ("train run.toml", "length", ["KEY=VALUE", "'length'"]),
        ("train run.toml", "=3", ["KEY=VALUE"]),
        ("train run.toml", "length=", ["length must be a positive whole number"]),
        ("train run.toml", "length.x=3", ["length.x", "1024"]),
        ("train run.toml", "mixers=[gdn,pgdn]", ["TOML"]),
        ("train run.toml", "max_steps=ten", ["max_steps must be", "'ten'"]),
        ("train run.toml", "max_steps=3\nlength=4", ["max_steps must be"]),
        ("train run.toml", "report_to=wandbb", ["report_to", "did you mean 'wandb'"]),
        ("train run.toml", "report_to=wandb", ["report_to 'wandb' needs", "pip install wandb"]),
        ("train run.toml", 'report_to=["tensorboard", "trackio"]', ["pip install trackio"]),
        ("recall", "widht=3", ["'widht'", "did you mean 'width'"]),
        ("recall recall.toml", "widht=3", ["'widht'", "did you mean 'width'"]),
        ("recall recall.toml", "parts.narow.width=3", ["did you mean 'narrow'"]),
        ("recall", "parts.narrow.width=3", ["the parts are none"]),
        ("recall recall.toml", "parts=3", ["must name a part"]),
        ("recall recall.toml", "parts.narrow.widht=3", ["part narrow", "did you mean 'width'"]),
        ("recall recall.toml", "mixers.2.label=a", ["mixers.2.label", "0, 1", "'2'"]),
        ("recall recall.toml", "mixers.0.label=a", ["mixers.0.label", "'gdn'"]),
        ("recall recall.toml", "task_options.paddding=end", ["paddding", "did you mean 'padding'"]),
        ("recall", "workers=0", ["workers must be"]),
    ],
)
def test_what_does_not_fit_is_one_line(folder, capsys, monkeypatch, command, setting, words):
    for tracker in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, tracker, None)  # cannot be imported
    before = sorted(folder.rglob("*"))
    assert main([*command.split(), "--set", setting]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1 and all(word in printed.err for word in words), (
        printed.err
    )
    assert sorted(folder.rglob("*")) == before
