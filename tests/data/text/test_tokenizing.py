"""Tokenizing that is killed and continued, in several processes, and of documents of some lengths alone."""

import shutil
from functools import partial

import pytest

from fastweights.data.text import TextCorpus, TextTokenizer, TokenShards, prepare_text, tokenizing

WORDS = ["cat", "dog", "cow", "hen"]


class Killed(BaseException):
    """Not an error that anything may handle."""


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "BATCH_CHARACTERS", 1000)
    (tmp_path / "texts").mkdir()
    for number in range(60):
        (tmp_path / "texts" / f"{number}.txt").write_text(
            f"The {WORDS[number % 4]} says {number}.\n" * (number % 7 + 1)
        )
    return TextCorpus(paths=(str(tmp_path / "texts"),), held_out_fraction=0.2)


@pytest.fixture
def settings(corpus, tmp_path):
    TextTokenizer(vocab_size=300).train(corpus.texts()).save_pretrained(tmp_path / "tokenizer")
    return TextTokenizer(path=str(tmp_path / "tokenizer"))


def contents(folder):
    (tokens,) = folder.glob("tokens-*")
    return {file.name: file.read_bytes() for file in tokens.iterdir()}


def killed_after(calls, seen, work, read, total):
    seen.append(read)
    if len(seen) == calls:
        raise Killed


def test_a_killed_tokenization_is_continued(corpus, settings, tmp_path, monkeypatch):
    prepare_text(corpus, settings, tmp_path / "whole")
    monkeypatch.setattr(tokenizing, "NOTE_SECONDS", 0.0)
    for calls in (3, 4):
        with pytest.raises(Killed):
            prepare_text(corpus, settings, tmp_path / "cut", progress=partial(killed_after, calls, []))
    (begun,) = (tmp_path / "cut").glob(".tokens-*.unfinished")
    with (begun / "train-00000.bin").open("ab") as file:
        file.write(b"written after the last note")
    encoded, encode = [], tokenizing.Encoder.__call__
    monkeypatch.setattr(
        tokenizing.Encoder, "__call__", lambda self, texts: encoded.extend(texts) or encode(self, texts)
    )
    prepare_text(corpus, settings, tmp_path / "cut")
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")
    assert 0 < len(encoded) < 60 - 10 and not list((tmp_path / "cut").glob(".tokens-*unfinished*[!k]"))


def test_text_that_changed_meanwhile_is_tokenized_anew(corpus, settings, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizing, "NOTE_SECONDS", 0.0)
    with pytest.raises(Killed):
        prepare_text(corpus, settings, tmp_path / "cut", progress=partial(killed_after, 3, []))
    (begun,) = (tmp_path / "cut").glob(".tokens-*.unfinished")
    (noted,) = (tmp_path / "cut").glob(".tokens-*.json")
    (tmp_path / "texts" / "0.txt").write_text("Other words.\n")
    changed = TextCorpus(paths=corpus.paths, held_out_fraction=0.2)
    kept = begun.with_name(f".tokens-{tokens_key(changed, settings, tmp_path)}.unfinished")
    shutil.move(noted, f"{kept}.json")
    shutil.move(begun, kept)  # as where the time and size of the file had stayed
    with pytest.raises(ValueError, match="text has changed since its tokenization was begun; start again"):
        prepare_text(changed, settings, tmp_path / "cut")
    assert len(prepare_text(changed, settings, tmp_path / "cut").train)


def tokens_key(corpus, settings, tmp_path):
    return prepare_text(corpus, settings, tmp_path / "key").train.folder.name.removeprefix("tokens-")


@pytest.mark.slow
def test_several_processes_write_the_same(corpus, settings, tmp_path):
    prepare_text(corpus, settings, tmp_path / "one")
    prepare_text(corpus, TextTokenizer(path=settings.path, processes=2), tmp_path / "two")
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


@pytest.mark.parametrize(("least", "most"), [(20, None), (0, 40), (20, 40)])
def test_documents_of_other_lengths_are_left_out(corpus, settings, tmp_path, least, most):
    chosen = TextCorpus(paths=corpus.paths, held_out_fraction=0.2, min_tokens=least, max_tokens=most)
    prepared = prepare_text(chosen, settings, tmp_path / "cache")
    tokens = {"train": [], "held_out": []}
    for document in corpus.documents():
        length = len(prepared.tokenizer(document.text)["input_ids"])
        if length >= least and (most is None or length <= most):
            tokens["held_out" if document.held_out else "train"].append(document.text)
    for split, shards in (("train", prepared.train), ("held_out", prepared.held_out)):
        documents = [prepared.tokenizer.decode(shards.document(n)[:-1]) for n in range(len(shards.starts))]
        assert documents == tokens[split] and len(documents) > 0


def test_no_document_is_as_long_as_it_must_be(corpus, settings, tmp_path):
    with pytest.raises(ValueError, match="documents are empty, or shorter than min_tokens or longer than max_tokens"):
        prepare_text(TextCorpus(paths=corpus.paths, min_tokens=10_000), settings, tmp_path / "cache")


def test_several_sources_are_one_text(corpus, settings, tmp_path):
    (tmp_path / "rows.jsonl").write_text("".join(f'{{"body": "row {number} and more"}}\n' for number in range(40)))
    rows = {"paths": (str(tmp_path / "rows.jsonl"),), "text_field": "body", "held_out_fraction": 0.2}
    both = TextCorpus(sources=({"paths": corpus.paths, "held_out_fraction": 0.2}, {**rows, "weight": 3.0}))
    prepared = prepare_text(both, settings, tmp_path / "cache")
    alone = [prepare_text(single, settings, tmp_path / "cache") for single in (corpus, TextCorpus(**rows))]
    for split in ("train", "held_out"):
        joined, parts = getattr(prepared, split), [getattr(one, split) for one in alone]
        tokens = [token for part in parts for token in part.tokens(0, len(part)).tolist()]
        assert joined.tokens(0, len(joined)).tolist() == tokens
        documents = [part.document(n).tolist() for part in parts for n in range(len(part.starts))]
        assert [joined.document(n).tolist() for n in range(len(joined.starts))] == documents
    assert all(isinstance(source, TokenShards) for source in prepared.sources) and len(prepared.sources) == 2
    assert prepared.fingerprints["corpus_text"] not in [one.fingerprints["corpus_text"] for one in alone]
