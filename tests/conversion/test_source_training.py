"""The run file of a converted model keeps the text, tokenizer and rows of the source's own training."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fastweights.cli import main
from fastweights.conversion import convert_folder
from fastweights.data.text import TextCorpus
from fastweights.training.language import load_run, train_language

RUN = """
output = "runs/source"
cache = "runs/tokens"
length = 24
batch_size = 2
accumulation = 3
max_steps = 2
learning_rate = 0.002
weight_decay = 0.05
beta2 = 0.9
precision = "bf16"
evaluation_rows = 4
checkpoint_every = 1
context_lengths = [16]
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
[tokenizer]
vocab_size = 280
[corpus]
paths = ["texts", "more.txt"]
held_out = ["texts/held"]
max_megabytes = 0.5
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder in which a model was trained by a run file with relative paths."""
    folder = tmp_path_factory.mktemp("work")
    for name in ("texts/a.txt", "texts/held/b.txt", "more.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("".join(f"A line of text, number {line}, of {name}.\n" for line in range(200)))
    (folder / "run.toml").write_text(RUN)
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["train", "run.toml"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture
def work(trained, tmp_path, monkeypatch) -> Path:
    """A copy of it, which tests may change, as the current folder."""
    shutil.copytree(trained, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path / "work"


@pytest.mark.parametrize("source", ["runs/source", "runs/source/model", "runs/source/checkpoints/checkpoint-2"])
def test_text_tokenizer_rows_and_precision_are_kept(work, tmp_path, monkeypatch, source):
    if "checkpoints" in source:
        (work / "runs/source/result.json").unlink()  # interrupted: only run.json is there
    convert_folder(source, Path("new"), to="pgdn")
    monkeypatch.chdir("/")  # paths hold from everywhere
    run = load_run(tmp_path / "work/new/train.toml")
    assert run.length == 24 and run.batch_size * run.accumulation == 6
    assert (run.batch_size, run.accumulation) == ((6, 1) if "checkpoints" in source else (2, 3))
    assert (run.weight_decay, run.beta2, run.precision, run.learning_rate) == (0.05, 0.9, "bf16", pytest.approx(0.0002))
    assert run.corpus == TextCorpus(
        paths=(f"{work}/texts", f"{work}/more.txt"), held_out=(f"{work}/texts/held",), max_megabytes=0.5
    )


@pytest.mark.slow
def test_the_converted_model_trains_on_the_same_tokens(work, tmp_path, monkeypatch, capsys):
    assert main(["convert", "runs/source", "--to", "pgdn", "--output", "new", "--steps", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"as in {work}/runs/source/run.json" in printed
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert main(["train", str(work / "new/train.toml")]) == 0
    before, after = (json.loads((work / name / "run.json").read_text()) for name in ("runs/source", "new-trained"))
    for name in ("corpus_text", "tokenizer_content", "length", "rows_a_step", "weight_decay", "precision"):
        assert after[name] == before[name]


def test_a_conversion_from_another_folder_finds_the_text(work, tmp_path, monkeypatch):
    """result.json says where the training was started."""
    monkeypatch.chdir(tmp_path)
    convert_folder("work/runs/source", Path("new"), to="pgdn")
    assert load_run("new/train.toml").corpus.paths == (f"{work}/texts", f"{work}/more.txt")


@pytest.mark.slow
def test_a_conversion_of_a_conversion_keeps_them_too(work, tmp_path, monkeypatch):
    run = Path("run.toml").read_text().replace("[model]", '[model]\nmixer = "mamba2"').replace("runs/source", "runs/m")
    Path("run.toml").write_text(run)
    assert main(["train", "run.toml"]) == 0
    convert_folder("runs/m", Path("first"), to="mamba2")
    monkeypatch.chdir(tmp_path)
    convert_folder("work/first", Path("second"), to="palimpsa-m")
    first, second = (load_run(path) for path in ("work/first/train.toml", "second/train.toml"))
    assert first.corpus == second.corpus and first.corpus.paths == (f"{work}/texts", f"{work}/more.txt")
    for name in ("length", "batch_size", "accumulation", "weight_decay", "precision", "learning_rate"):
        assert getattr(first, name) == pytest.approx(getattr(second, name)), name


def test_folders_of_models_inside_the_text_are_left_out(work):
    record = json.loads(Path("runs/source/run.json").read_text())
    record["corpus"] = {**record["corpus"], "paths": ["."], "held_out": []}
    Path("runs/source/run.json").write_text(json.dumps(record))
    convert_folder("runs/source", Path("new"), to="pgdn")
    corpus = load_run("new/train.toml").corpus
    assert corpus.paths == (str(work),)
    assert corpus.excluded == (f"{work}/runs/source", f"{work}/runs/source/model", f"{work}/new")
    assert all("new" not in str(file.path.relative_to(work)) for file in corpus._files)


def test_text_that_is_not_there_is_named(work):
    shutil.rmtree("texts")
    convert_folder("runs/source", Path("new"), to="pgdn")
    written = Path("new/train.toml").read_text()
    assert f'# Not found on this machine: "{work}/texts"' in written
    with pytest.raises(ValueError, match="texts/held does not exist"):
        train_language(load_run("new/train.toml"))


def test_a_named_tokenizer_is_kept_where_the_model_has_none(work):
    shutil.move("runs/source/model/tokenizer.json", "tokenizer.json")
    Path("runs/source/model/tokenizer_config.json").unlink()
    record = json.loads(Path("runs/source/run.json").read_text())
    record["tokenizer"]["path"] = "tokenizer.json"
    Path("runs/source/run.json").write_text(json.dumps(record))
    convert_folder("runs/source", Path("new"), to="pgdn")
    assert load_run("new/train.toml").tokenizer.path == f"{work}/tokenizer.json"


def test_the_default_text_stays_the_default(work):
    record = json.loads(Path("runs/source/run.json").read_text())
    record["corpus"] = {}
    Path("runs/source/run.json").write_text(json.dumps(record))
    convert_folder("runs/source", Path("new"), to="pgdn")
    assert load_run("new/train.toml").corpus == TextCorpus()
    assert "Python installation, as it was for the source" in Path("new/train.toml").read_text()


@pytest.mark.parametrize(
    "damage", ["[]", "{", '{"corpus": {"pahts": []}}', '{"rows_a_step": 0}', '{"learning_rate": -1}']
)
def test_a_damaged_record_is_refused_by_name(work, damage):
    Path("runs/source/run.json").write_text(damage)
    with pytest.raises(ValueError, match=r"run\.json must say how the source was trained.*delete it"):
        convert_folder("runs/source", Path("new"), to="pgdn")
    assert not Path("new").exists()


def test_sources_stay_tables_with_absolute_paths(work, tmp_path):
    """As a training on several sources records them; one of their paths is nowhere on this machine."""
    file = work / "runs/source/run.json"
    sources = [{"paths": ["texts"], "weight": 3.0}, {"paths": ["nowhere"], "text_field": "body", "min_tokens": 4}]
    corpus = {"streaming": True, "sources": sources}
    file.write_text(json.dumps({**json.loads(file.read_text()), "corpus": corpus}))
    convert_folder("runs/source", Path("new"), to="pgdn")
    found = load_run("new/train.toml").corpus
    first, second = found.sources
    assert found.streaming and (first.paths, first.weight) == ((f"{work}/texts",), 3.0)
    assert (second.paths, second.text_field, second.min_tokens) == ((f"{work}/nowhere",), "body", 4)
    assert f'# Not found on this machine: "{work}/nowhere"' in Path("new/train.toml").read_text()
