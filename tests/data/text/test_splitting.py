"""Text of one's own, however little: a part of it is held out, and the rest is trained on."""

import gzip
import hashlib
import io
import json
import random
import re
import sys
import types

import pytest
from rich.console import Console

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights.evaluation.text import HeldOutText
from fastweights.training.language import train_language

from ...training.language.small import WORDS, small_run

FRACTION = 0.05


def draw(name):
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def sentences(seed, lines=40):
    words = random.Random(seed)
    return "".join(" ".join(words.choices(WORDS, k=8)) + f" {seed}.\n" for _ in range(lines))


def none_held_out(count, kind):
    """Names of files of which the hash of the name holds out none (or rows, of a file of such a name)."""
    for attempt in range(1000):
        names = [f"{attempt}-{number}.txt" for number in range(count)] if kind == "files" else [f"{attempt}.{kind}"]
        drawn = names if kind == "files" else [f"{names[0]}#{number}" for number in range(count)]
        if all(draw(name) >= FRACTION for name in drawn):
            return names
    raise AssertionError("no such names")


def files(folder, count):
    for seed, name in enumerate(none_held_out(count, "files")):
        (folder / name).write_text(sentences(seed))


def json_lines(folder, count):
    (name,) = none_held_out(count, "jsonl.gz")
    rows = "".join(json.dumps({"text": sentences(seed)}) + "\n" for seed in range(count))
    (folder / name).write_bytes(gzip.compress(rows.encode()))


def parquet(folder, count):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (name,) = none_held_out(count, "parquet")
    parquet.write_table(pa.table({"text": [sentences(seed) for seed in range(count)]}), folder / name)


def sides(corpus):
    """The numbers of the sentences on each side, and all characters."""
    found = {True: set(), False: set()}
    characters = 0
    for document in corpus.documents():
        found[document.held_out] |= {line.split()[-1] for line in document.text.splitlines()}
        characters += len(document.text)
    return found[True], found[False], characters


@pytest.mark.parametrize("count", [1, 2, 3, 8, 10, 27])
@pytest.mark.parametrize("write", [files, json_lines, parquet])
def test_some_text_is_held_out_where_the_hash_holds_out_none(tmp_path, write, count):
    write(tmp_path, count)
    corpus = TextCorpus(paths=(str(tmp_path),))
    held_out, trained, characters = sides(corpus)
    assert characters == sum(len(sentences(seed)) for seed in range(count))
    if count == 1:  # its end
        parts = [len(d.text) for d in corpus.documents()]
        assert len(parts) == 2 and 0.02 < parts[1] / sum(parts) <= 0.05 and held_out == trained
    else:
        assert len(held_out) == 1 and len(trained) == count - 1 and not held_out & trained
    assert sides(TextCorpus(paths=(str(tmp_path),))) == (held_out, trained, characters)


@pytest.mark.parametrize("count", [1, 8])
def test_some_rows_of_a_dataset_are_held_out(monkeypatch, count):
    class Rows(list):
        _fingerprint = "abc"

    library = types.ModuleType("datasets")
    library.load_dataset = lambda *args, **options: Rows({"text": sentences(seed)} for seed in range(count))
    monkeypatch.setitem(sys.modules, "datasets", library)
    assert all(draw(f"row {number}") >= FRACTION for number in range(count))
    held_out, trained, _ = sides(TextCorpus(dataset="some/set"))
    assert len(held_out) == 1 and len(trained | held_out) == count


def test_some_text_is_trained_on_where_the_hash_holds_out_all(tmp_path):
    names = [name for name in (f"{number}.txt" for number in range(200)) if draw(name) < 0.2][:4]
    for seed, name in enumerate(names):
        (tmp_path / name).write_text(sentences(seed))
    held_out, trained, _ = sides(TextCorpus(paths=(str(tmp_path),), held_out_fraction=0.2))
    assert trained == {f"{names.index(max(names, key=draw))}."} and len(held_out) == 3


def test_one_more_file_moves_no_other_one(tmp_path):
    """Its own hash may hold it out, and one that was held out before may then be trained on."""
    seen = []
    for seed in range(60):
        (tmp_path / f"{seed}.txt").write_text(sentences(seed))
        held_out, trained, _ = sides(TextCorpus(paths=(str(tmp_path),)))
        assert held_out and (seed == 0 or trained)
        if seed > 1:
            assert held_out <= seen[-1] | {f"{seed}."}
        seen.append(held_out)
    assert seen[-1] == {f"{seed}." for seed in range(60) if draw(f"{seed}.txt") < FRACTION}


def test_files_of_one_name_in_two_folders(tmp_path):
    for seed, folder in enumerate(("a", "b")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "text.txt").write_text(sentences(seed))
    held_out, trained, _ = sides(TextCorpus(paths=(str(tmp_path / "a"), str(tmp_path / "b"))))
    assert len(held_out) == len(trained) == 1 and held_out != trained


@pytest.mark.parametrize("others", [1, 3])
def test_neither_most_of_the_text_nor_almost_none_is_held_out(tmp_path, others):
    """A book beside short notes is cut as a single file is."""
    (tmp_path / "book.txt").write_text(sentences(0, 2000))
    for seed in range(1, 1 + others):
        (tmp_path / f"note{seed}.txt").write_text(sentences(seed, 1))
    assert all(draw(path.name) >= FRACTION for path in tmp_path.iterdir())
    corpus = TextCorpus(paths=(str(tmp_path),))
    held_out, trained, characters = sides(corpus)
    size = sum(len(document.text) for document in corpus.documents() if document.held_out)
    assert held_out == {"0."} and len(trained) == 1 + others and 0.02 < size / characters <= 0.05


def test_a_short_note_is_not_all_that_is_held_out(tmp_path):
    chapters = none_held_out(8, "files")
    lowest = min(chapters, key=draw)
    for seed, name in enumerate(chapters):
        (tmp_path / name).write_text(sentences(seed, 1 if name == lowest else 40))
    (held_out,), _, _ = sides(TextCorpus(paths=(str(tmp_path),)))
    assert held_out == f"{chapters.index(sorted(chapters, key=draw)[1])}."


@pytest.mark.parametrize("text", ["ab", "a b\n\n\n\n\n\n\n\n", "word\n" * 30 + " " * 90 + "\n" * 90])
@pytest.mark.parametrize("name", ["text.txt", "rows.jsonl"])
def test_the_end_that_is_held_out_has_letters(tmp_path, name, text):
    (tmp_path / name).write_text(text if name == "text.txt" else json.dumps({"text": text}))
    documents = list(TextCorpus(paths=(str(tmp_path / name),)).documents())
    assert [document.held_out for document in documents] == [False, True]
    assert "".join(document.text for document in documents) == text


def test_held_out_files_that_are_named_are_the_only_ones(tmp_path):
    files(tmp_path, 8)
    named = sorted(tmp_path.iterdir())[3]
    corpus = TextCorpus(paths=(str(tmp_path),), held_out=(str(named),))
    assert [d.text for d in corpus.documents() if d.held_out] == [named.read_text()]


def test_text_to_evaluate_on_is_not_cut(tmp_path):
    (tmp_path / "one.txt").write_text(sentences(0))
    assert HeldOutText([tmp_path / "one.txt"]).haystack() == sentences(0)


@pytest.mark.parametrize("count", [8, 27])
def test_a_few_files_train(tmp_path, count):
    texts = tmp_path / "chapters"
    texts.mkdir()
    files(texts, count)
    run = small_run(tmp_path, corpus=TextCorpus(paths=(str(texts),)), max_steps=2, context_lengths=(), evaluate_every=0)
    (result,) = train_language(run)
    assert result.held_out_loss > 0


def test_tokens_of_an_earlier_version_without_held_out_text_are_made_again(tmp_path, monkeypatch):
    texts, reported = tmp_path / "texts", []
    texts.mkdir()
    files(texts, 8)
    corpus, tokenizer = TextCorpus(paths=(str(texts),)), TextTokenizer(vocab_size=300)
    with monkeypatch.context() as earlier:
        earlier.setattr("fastweights.data.text.corpus.split", all_trained_on)
        assert len(prepare_text(corpus, tokenizer, tmp_path / "cache").held_out) == 0
    prepared = prepare_text(corpus, tokenizer, tmp_path / "cache", reported.append)
    assert len(prepared.held_out) > 0 and "an earlier version of fastweights held no text out" in reported[0]
    prepare_text(corpus, tokenizer, tmp_path / "cache", reported.append)
    assert len(reported) == 2


def all_trained_on(pieces, fraction):
    from fastweights.data.text.splitting import Document

    return (Document(piece.text, False) for piece in pieces())


def test_progress_begins_before_the_work_and_reaches_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.data.text.tokenizing.BATCH_CHARACTERS", 3000)
    texts, seen = tmp_path / "texts", []
    texts.mkdir()
    files(texts, 8)
    corpus = TextCorpus(paths=(str(texts),))
    reader = TextCorpus._named_texts
    monkeypatch.setattr(TextCorpus, "_named_texts", lambda self: (seen.append(("read", 0, 0)), reader(self))[1])
    prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", progress=lambda *where: seen.append(where))
    total = sum(len(sentences(seed)) for seed in range(8))
    works = ("training a tokenizer", "tokenizing the text")
    reads = [number for number, (work, *_) in enumerate(seen) if work == "read"]
    for work in works:
        points = [(number, done, of) for number, (name, done, of) in enumerate(seen) if name == work]
        assert points[0][1] == 0 and points[0][0] + 1 in reads  # before anything is read for it
        done = [point[1] for point in points]
        assert done == sorted(set(done)) and len(done) > 4 and all(point[2] == total for point in points)
    assert seen[-1] == ("tokenizing the text", total, total)


def test_how_much_text_there_is(tmp_path):
    files(tmp_path, 3)
    size = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert TextCorpus(paths=(str(tmp_path),)).size == size
    assert TextCorpus(paths=(str(tmp_path),), max_megabytes=0.001).size == 1000
    json_lines(tmp_path, 2)
    assert TextCorpus(paths=(str(tmp_path),)).size is None


def test_held_out_text_shorter_than_a_row_is_measured_whole(tmp_path):
    texts, console = tmp_path / "texts", Console(file=io.StringIO(), width=200)
    texts.mkdir()
    files(texts, 8)
    run = small_run(
        tmp_path, corpus=TextCorpus(paths=(str(texts),)), length=1000, batch_size=1, max_steps=2, evaluate_every=0
    )
    (result,) = train_language(run, console=console)
    tokens = int(
        re.search(r"held-out text of ([\d,]+) tokens is shorter than a row", console.file.getvalue())[1].replace(
            ",", ""
        )
    )
    assert 2 < tokens < 1000 and result.held_out_loss > 0
