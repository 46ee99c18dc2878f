"""Trainings on text that is streamed or mixed, that begins where another training stopped, and that is read so often at most."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fastweights.data.text import TextCorpus, TextSource, TextTokenizer, prepare_text
from fastweights.results.language import load_result
from fastweights.training.language import load_run, rows, train_language

from .launching import MODEL, TRAINING, torchrun
from .small import SHARD, WORDS, log, losses

pytest.importorskip("datasets")


@pytest.fixture
def sources(prepared, tmp_path):
    """Two sources of JSON lines, of the sentences of the prepared texts."""
    texts = [file.read_text() for file in sorted((prepared / "texts").iterdir())]
    made = []
    for number, field in enumerate(("text", "body")):
        file = tmp_path / f"{field}.jsonl"
        file.write_text("".join(json.dumps({field: f"{WORDS[number]} {text}"}) + "\n" for text in texts * 2))
        made.append(TextSource(paths=(str(file),), text_field=field, weight=number + 1.0, held_out_fraction=0.2))
    return tuple(made)


@pytest.fixture
def tokenizer(prepared, tmp_path):
    texts = [file.read_text() for file in sorted((prepared / "texts").iterdir())]
    TextTokenizer(vocab_size=300).train(texts).save_pretrained(tmp_path / "tokenizer")
    return TextTokenizer(path=str(tmp_path / "tokenizer"))


def read(run, count, start=None):
    """The tokens of rows that a run reads first."""
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    start = rows.find_start(run, text) if start is None else start
    made = rows.training_rows(run, text, start, count=count)
    return [made[number][0].tolist() for number in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True])
def test_a_mixture_continues_with_the_same_losses(make_run, sources, tokenizer, streaming):
    corpus = TextCorpus(sources=sources, streaming=streaming, **({"shuffle_megabytes": 0.004} if streaming else {}))
    whole, cut = (make_run(name, corpus=corpus, tokenizer=tokenizer) for name in ("whole", "cut"))
    train_language(whole)
    for step in (1, 4, 5):
        assert train_language(cut, stop_at=step) is None
    train_language(cut)
    assert log(cut) == log(whole) and len(losses(cut)) == 8
    optimizers = [Path(run.output, "checkpoints/checkpoint-8", SHARD).read_bytes() for run in (whole, cut)]
    assert optimizers[0] == optimizers[1]


RUN = (
    f"{TRAINING}{MODEL}"
    + """
[tokenizer]
path = {tokenizer}
[corpus]
streaming = true
parts = 2
shuffle_megabytes = 0.004
[[corpus.sources]]
paths = [{text}]
[[corpus.sources]]
paths = [{body}]
text_field = "body"
weight = 2
held_out_fraction = 0.2
"""
)


@pytest.fixture
def run_file(sources, tokenizer, tmp_path):
    places = {"output": tmp_path / "out", "cache": tmp_path / "cache", "tokenizer": tokenizer.path}
    places |= {source.text_field: source.paths[0] for source in sources}
    file = tmp_path / "run.toml"
    file.write_text(RUN.format(**{name: json.dumps(str(path)) for name, path in places.items()}))
    return file


@pytest.mark.slow
def test_two_processes_stream_and_continue_with_the_same_losses(run_file, tmp_path):
    """Bit for bit as two processes without an interruption; and as one that reads both parts, to what sums of two differ by."""
    cut, whole = load_run(run_file), load_run(run_file, output=str(tmp_path / "whole"))
    whole_file = tmp_path / "whole.toml"
    whole_file.write_text(run_file.read_text().replace(json.dumps(cut.output), json.dumps(whole.output)))
    torchrun("-m", "fastweights", "train", whole_file)
    errors = torchrun("-m", "fastweights", "train", run_file, "--stop-at", 3)
    assert "stopped after step 3" in errors
    saved = json.loads(Path(cut.output, "checkpoints/checkpoint-3/data.json").read_text())
    assert saved["rows"] == 12 and sorted((entry["part"], entry["source"]) for entry in saved["states"]) == [
        (0, 0), (0, 1), (1, 0), (1, 1)
    ]  # fmt: skip
    one = dataclasses.replace(cut, output=str(tmp_path / "one"), batch_size=2)
    shutil.copytree(cut.output, one.output)
    torchrun("-m", "fastweights", "train", run_file)
    assert log(cut) == log(whole)
    (result,) = train_language(one)
    assert result.losses == pytest.approx(load_result(Path(whole.output, "result.json")).losses, rel=1e-5)


def test_sources_in_a_run_file(run_file):
    run = load_run(run_file, overrides=["corpus.sources.0.min_tokens=7", "corpus.epochs=3"])
    first, second = run.corpus.sources
    assert (first.weight, first.min_tokens, second.weight, second.text_field, run.corpus.epochs) == (1, 7, 2, "body", 3)
    run_file.write_text(run_file.read_text() + "weights = 2\n")
    with pytest.raises(ValueError, match=r"\[\[corpus.sources\]\] has no key 'weights' \(did you mean 'weight'\?\)"):
        load_run(run_file)


def test_the_rest_of_a_text_is_read_once(make_run):
    """The next training reads what the first left, in the same order: cached rows, by number or by the name of the folder."""
    first = make_run("first", max_steps=3)
    train_language(first)
    whole = read(make_run("whole"), 16)
    corpus = dataclasses.replace(first.corpus, continue_from=first.output)
    second = make_run("second", corpus=corpus, seed=5, max_steps=2)
    assert read(second, 10) == whole[6:]
    train_language(second)
    third = make_run("third", corpus=dataclasses.replace(first.corpus, continue_from=second.output), seed=9)
    assert read(third, 6) == whole[10:]
    by_tokens = make_run("tokens", corpus=dataclasses.replace(first.corpus, skip_tokens=6 * 32 + 5))
    assert read(by_tokens, 10) == whole[6:]
    assert json.loads(Path(second.output, "run.json").read_text())["data_start"] == "row 6 of seed 0"
    Path(first.output, "checkpoints/checkpoint-3/data.json").unlink()  # as earlier versions left it
    assert read(second, 10) == whole[6:]


def test_a_stream_is_read_on_with_another_length(make_run, sources, tokenizer):
    settings = {"sources": sources, "streaming": True, "shuffle_megabytes": 0.004}
    first = make_run("first", corpus=TextCorpus(**settings), tokenizer=tokenizer, max_steps=4)
    train_language(first)
    tokens = [sum(read(dataclasses.replace(first, length=length), count), []) for length, count in ((32, 16), (48, 1))]
    continued = TextCorpus(**settings, continue_from=first.output)
    assert (
        read(make_run("same", corpus=continued, tokenizer=tokenizer, seed=3), 8)
        == np.reshape(tokens[0], (16, 32))[8:].tolist()
    )
    (longer,) = read(make_run("longer", corpus=continued, tokenizer=tokenizer, length=48), 1)
    assert longer[:32] == tokens[0][8 * 32 : 9 * 32] and longer != tokens[1]


def test_text_that_was_not_the_same_is_not_continued(make_run, sources, tokenizer, tmp_path):
    first = make_run("first", max_steps=2)
    train_language(first, stop_at=1)

    def refused(words, **changes):
        corpus = dataclasses.replace(
            changes.pop("corpus", first.corpus), continue_from=changes.pop("place", first.output)
        )
        with pytest.raises(ValueError, match=words):
            train_language(make_run("second", corpus=corpus, **changes))

    refused("length must be that of the training in .*first.*: 32, got 16; change it", length=16)
    refused("continue_from must be the folder of one training with its checkpoints", place=str(tmp_path / "none"))
    refused(
        "same text with the same tokenizer, but corpus_text and tokenizer_content of .*first are others",
        corpus=TextCorpus(sources=sources),
    )
    with pytest.raises(ValueError, match="skip_tokens must be 0 with continue_from"):
        TextCorpus(continue_from="runs/a", skip_tokens=5)


def test_epochs_are_counted_before_the_training(make_run):
    run = make_run(max_steps=500)
    with pytest.raises(
        ValueError, match=r"epochs = 2 lets a training read \d+ rows of the train text, but it would read 1,000"
    ):
        train_language(dataclasses.replace(run, corpus=dataclasses.replace(run.corpus, epochs=2)))
    assert (
        train_language(dataclasses.replace(run, corpus=dataclasses.replace(run.corpus, epochs=200)), stop_at=1) is None
    )


@pytest.mark.slow
def test_a_stream_that_is_used_up_goes_on_with_more_epochs(make_run, sources, tokenizer):
    corpus = TextCorpus(paths=sources[0].paths, streaming=True, epochs=1, held_out_fraction=0.2)
    settings = {"tokenizer": tokenizer, "max_steps": 16, "batch_size": 16, "checkpoint_every": 4, "evaluate_every": 0}
    whole = make_run("whole", corpus=dataclasses.replace(corpus, epochs=None), **settings)
    train_language(whole)
    cut = make_run("cut", corpus=corpus, **settings)
    with pytest.raises(
        ValueError, match="the text is used up: epochs = 1 lets it be read 1 times.*the same command continues"
    ):
        train_language(cut)
    assert 4 <= len(losses(cut)) < 16
    console = Console(file=io.StringIO(), width=150)
    train_language(dataclasses.replace(cut, corpus=dataclasses.replace(corpus, epochs=20)), console=console)
    assert "continues after step" in console.file.getvalue() and losses(cut) == losses(whole)


def test_parts_that_processes_cannot_share(make_run, sources, tokenizer, monkeypatch):
    run = make_run(corpus=TextCorpus(sources=sources, streaming=True, parts=3), tokenizer=tokenizer)
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="parts must be a multiple of the number of processes, 2, got 3"):
        rows.find_start(run, text)
