"""Where text comes from: files of every kind, folders, datasets, Python itself; and how it is split."""

import gzip
import hashlib
import json
import shutil
import sys
import types

import pytest

from fastweights.data.text import TextCorpus


def texts(corpus, held_out=None):
    return [d.text for d in corpus.documents() if held_out is None or d.held_out == held_out]


def test_every_kind_of_file(tmp_path):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "a.txt").write_text("plain\r\nnaïve ✓", "utf-8")
    (tmp_path / "b.md.gz").write_bytes(gzip.compress(b"# packed"))
    (tmp_path / "c.jsonl").write_text('{"text": "one"}\n\n{"text": null}\n{"text": "two", "id": 3}\n')
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(b'{"text": "three"}\n'))
    parquet.write_table(pa.table({"text": ["four", None, "five"], "n": [1, 2, 3]}), tmp_path / "e.parquet")
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "g.py").write_text("print(1)")
    for name, content in (("h.bin", b"x"), (".i.txt", b"hidden"), ("j.txt", b"\xff\xfe binary"), ("k.txt", b"")):
        (tmp_path / name).write_bytes(content)
    corpus = TextCorpus(paths=[str(tmp_path)], held_out_fraction=1e-9)
    assert texts(corpus) == [
        "plain\nnaïve ✓", "# packed", "one", "two", "three", "four", "five", "print(1)"
    ]  # fmt: skip


def test_a_file_that_is_named_may_have_any_suffix(tmp_path):
    (tmp_path / "notes.xyz").write_text("some\nlines\n" * 50)
    corpus = TextCorpus(paths=(str(tmp_path / "notes.xyz"),), held_out_fraction=0.2)
    assert "".join(texts(corpus)) == "some\nlines\n" * 50


def test_files_are_split_by_the_hash_of_their_name(tmp_path):
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"text {number}")
    corpus = TextCorpus(paths=(str(tmp_path),), held_out_fraction=0.3)
    expected = {
        f"text {n}"
        for n in range(40)
        if int.from_bytes(hashlib.sha256(f"{n}.txt".encode()).digest()[:8], "big") < 0.3 * 2**64
    }
    assert set(texts(corpus, held_out=True)) == expected and 4 < len(expected) < 20
    assert len(texts(corpus, held_out=False)) == 40 - len(expected)
    elsewhere = tmp_path / "copy"
    elsewhere.mkdir()
    for file in tmp_path.glob("*.txt"):
        (elsewhere / file.name).write_bytes(file.read_bytes())
    moved = TextCorpus(paths=(str(elsewhere),), held_out_fraction=0.3)
    assert set(texts(moved, held_out=True)) == expected


def test_rows_are_split_one_by_one(tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"text": f"row {n}"}) + "\n" for n in range(60)))
    corpus = TextCorpus(paths=(str(tmp_path / "rows.jsonl"),), held_out_fraction=0.3)
    assert len(texts(corpus)) == 60 and 8 < len(texts(corpus, held_out=True)) < 30


def test_the_only_plain_file_is_cut_at_a_line(tmp_path):
    lines = [f"line {number}\n" for number in range(1000)]
    (tmp_path / "only.txt.gz").write_bytes(gzip.compress("".join(lines).encode()))
    corpus = TextCorpus(paths=(str(tmp_path / "only.txt.gz"),), held_out_fraction=0.1)
    (train,), (held_out,) = texts(corpus, held_out=False), texts(corpus, held_out=True)
    assert train + held_out == "".join(lines)
    assert train.endswith("\n") and held_out.startswith("line") and 850 < len(train.splitlines()) < 950


@pytest.mark.parametrize(
    ("text", "limit", "train"),
    [("word " * 200, None, 900), ("word " * 200 + "\n", 0.0005, 450), ("word\n" * 200, 0.0005, 450)],
)
def test_the_only_plain_file_is_cut_within_what_is_read_of_it(tmp_path, text, limit, train):
    (tmp_path / "only.txt").write_text(text)
    corpus = TextCorpus(paths=(str(tmp_path / "only.txt"),), held_out_fraction=0.1, max_megabytes=limit)
    (first,), (second,) = texts(corpus, held_out=False), texts(corpus, held_out=True)
    assert first + second == text[: 500 if limit else None] and abs(len(first) - train) <= 5


def test_a_long_line_or_row_becomes_several_documents(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.data.text.files.PIECE_CHARACTERS", 50)
    monkeypatch.setattr("fastweights.data.text.files.LONGEST_DOCUMENT", 100)
    (tmp_path / "a.txt").write_text("x" * 950)
    (tmp_path / "b.jsonl").write_text(json.dumps({"text": "y" * 950}))
    found = texts(TextCorpus(paths=(str(tmp_path),)))
    assert "".join(found) == "x" * 950 + "y" * 950 and max(map(len, found)) == 100


def test_a_long_file_becomes_documents_of_one_side(tmp_path, monkeypatch):
    monkeypatch.setattr("fastweights.data.text.files.PIECE_CHARACTERS", 100)
    long = "".join(f"word {number}\n" for number in range(100))
    for name in "abcdefgh":
        (tmp_path / f"{name}.txt").write_text(name + long)
    corpus = TextCorpus(paths=(str(tmp_path),), held_out_fraction=0.4)
    held_out = "".join(texts(corpus, held_out=True))
    assert 0 < held_out.count("word 99") == held_out.count("word 0\n") < 8
    assert all(len(text) <= 109 and text.endswith("\n") for text in texts(corpus))


def test_held_out_files_of_their_own_and_a_limit(tmp_path):
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text("x" * 1000)
    (tmp_path / "test.md").write_text("the test")
    paths = tuple(str(tmp_path / f"{number}.txt") for number in range(10))
    corpus = TextCorpus(paths=paths, held_out=(str(tmp_path / "test.md"),), max_megabytes=0.0035)
    assert texts(corpus, held_out=True) == ["the test"]
    assert len(texts(corpus, held_out=False)) == 4


def test_held_out_files_are_not_trained_on_and_no_file_is_read_twice(tmp_path):
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name)
    paths = (str(tmp_path), str(tmp_path / "a.txt"), f"{tmp_path}/../{tmp_path.name}")
    corpus = TextCorpus(paths=paths, held_out=(str(tmp_path / "b.txt"),))
    assert texts(corpus, held_out=True) == ["b"] and texts(corpus, held_out=False) == ["a", "c"]


def test_folders_that_are_excluded(tmp_path):
    for name in ("a.txt", "out/log.jsonl", "out/deep/b.txt", "kept/out/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    corpus = TextCorpus(paths=(str(tmp_path),), excluded=(f"{tmp_path}/kept/../out",))
    assert texts(corpus) == ["a.txt", "kept/out/c.txt"]


def test_by_default_it_is_python_itself():
    corpus, again = TextCorpus(max_megabytes=0.2), TextCorpus(max_megabytes=0.2)
    found = texts(corpus)
    assert any("Record of phased-in incompatible language changes" in text for text in found)  # __future__.py
    assert found == texts(again)
    assert corpus.fingerprint == again.fingerprint


def test_the_fingerprint_follows_the_files(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = TextCorpus(paths=(str(file),)).fingerprint
    (tmp_path / "copy").mkdir()
    copy = shutil.copy2(file, tmp_path / "copy")  # of the same name, size and time
    assert TextCorpus(paths=(str(copy),)).fingerprint != before
    file.write_text("other")
    assert TextCorpus(paths=(str(file),)).fingerprint != before


def test_a_dataset_where_the_library_is(monkeypatch):
    class Rows(list):
        _fingerprint = "abc"

    asked = []
    library = types.ModuleType("datasets")
    library.load_dataset = lambda *args, **options: (
        asked.append((args, options)) or Rows({"body": f"row {n}"} for n in range(50))
    )
    monkeypatch.setitem(sys.modules, "datasets", library)
    corpus = TextCorpus(dataset="some/set", dataset_split="validation", text_field="body", held_out_fraction=0.3)
    assert len(texts(corpus)) == 50 and 5 < len(texts(corpus, held_out=True)) < 28
    assert asked == [(("some/set", None), {"split": "validation"})]
    assert len(corpus.fingerprint) == 64
    with pytest.raises(ValueError, match="dataset: a row must be an object with text in 'text', got the keys body"):
        texts(TextCorpus(dataset="some/set"))

    def offline(*args, **options):
        raise ConnectionError("no network")

    library.load_dataset = offline
    with pytest.raises(ValueError, match="'some/set'.*cannot be loaded: no network"):
        texts(TextCorpus(dataset="some/set"))


def test_a_dataset_needs_the_library(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the `datasets` library"):
        texts(TextCorpus(dataset="some/set"))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "missing.txt does not exist"),
        ("data.txt", b"a\0b", "data.txt must be text"),
        ("latin.txt", "naïve".encode("latin-1"), "binary, or not UTF-8"),
        ("broken.txt.gz", gzip.compress(b"text" * 99, mtime=0)[:-12], "damaged gzip"),
        ("not.txt.gz", b"plain", "damaged gzip"),
        ("broken.jsonl", b'{"text": "a"}\n{"text"\n', "broken.jsonl, line 2"),
        ("list.jsonl", b"[1]\n", "line 1: a row must be an object with text in 'text', got list"),
        ("other.jsonl", b'{"body": "a"}\n', "line 1: .*got the keys body; set text_field"),
        ("number.jsonl", b'{"text": 3}\n', "line 1: 'text' must be text, got int; set text_field"),
        ("array.json", b'[{"text": "a"}]', "array.json must have one row per line, as JSON lines"),
        ("deep.jsonl", b"[" * 100_000, "deep.jsonl, line 1: "),
        (
            "half.jsonl",
            b'{"text": "a"}\n{"text": "\\ud800"}',
            "half.jsonl, line 2: 'text' must be text that UTF-8 can write",
        ),
        ("broken.parquet", b"PAR1 no", "broken.parquet"),
    ],
)
def test_bad_files(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        texts(TextCorpus(paths=(str(tmp_path / name),)))


@pytest.mark.parametrize("column", [[1, 2], [b"a", b"b"]])
def test_columns_that_are_not_text(tmp_path, column):
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="a.parquet: 'text' must be text, got (int|bytes); set text_field"):
        texts(TextCorpus(paths=(str(tmp_path),)))


def test_a_folder_without_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\0\1")
    (tmp_path / "b.png").write_bytes(b"\0\1")
    with pytest.raises(ValueError, match="holds no text: 1 files are binary"):
        texts(TextCorpus(paths=(str(tmp_path),)))


@pytest.mark.parametrize(
    ("error", "settings", "words"),
    [
        (TypeError, {"paths": 3}, "paths must be a list of paths"),
        (ValueError, {"paths": [""]}, "paths must be a list of paths, none of them empty"),
        (
            ValueError,
            {"held_out_fraction": 1},
            "held_out_fraction must be a finite number, more than 0 and less than 1",
        ),
        (ValueError, {"dataset": "a", "paths": ("b",)}, "choose one of them"),
        (ValueError, {"max_megabytes": 0}, "max_megabytes must be positive"),
        (TypeError, {"text_field": None}, "text_field must be a string"),
        (
            ValueError,
            {"paths": "a", "revision": "main"},
            "data_files and revision must be left out without the dataset",
        ),
        (ValueError, {"min_tokens": 9, "max_tokens": 8}, "max_tokens must be a whole number of at least 9, got 8"),
        (ValueError, {"weight": 2.0}, "weight must be that of an entry of sources, got 2"),
        (ValueError, {"parts": 2}, "parts must be None without streaming, got 2"),
        (ValueError, {"streaming": True, "max_megabytes": 1}, "max_megabytes must be None with streaming"),
        (ValueError, {"epochs": 0}, "epochs must be a positive whole number"),
        (ValueError, {"paths": "a", "sources": [{"paths": "b"}]}, "paths must be left out beside sources"),
        (ValueError, {"sources": [{"paths": "b", "weight": 0}]}, "weight must be positive"),
        (TypeError, {"sources": ["b"]}, "sources must be TextSource, tables in a run file"),
    ],
)
def test_settings_that_do_not_fit(error, settings, words):
    with pytest.raises(error, match=words):
        TextCorpus(**settings)
