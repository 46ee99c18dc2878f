"""Text that is streamed: every document once per pass, held-out ones never, and the same rows after an interruption."""

import json
import random

import numpy as np
import pytest

from fastweights.data.text import TextCorpus, TextSource, TextTokenizer, prepare_text
from fastweights.data.text.streamed import StreamedRows, TextUsedUp

datasets = pytest.importorskip("datasets")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "while", "rain", "fell", "over", "old", "hills"]
DRAW = random.Random(0)
TEXTS = [f"{number}: " + " ".join(DRAW.choices(WORDS, k=DRAW.randint(3, 60))) for number in range(160)]


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(vocab_size=300).train(TEXTS)


def write_rows(file, texts, field="text"):
    file.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
    return str(file)


@pytest.fixture
def corpus(tmp_path):
    """Two files of JSON lines, shuffled in windows of a few documents."""
    paths = tuple(write_rows(tmp_path / f"{n}.jsonl", TEXTS[n * 80 : (n + 1) * 80]) for n in range(2))
    return TextCorpus(paths=paths, streaming=True, shuffle_megabytes=0.002, epochs=1, held_out_fraction=0.1)


def streamed(corpus, tokenizer, **changes):
    settings = {"length": 32, "seed": 0, "count": 10**6, "parts": 1, "ahead": 1000}
    return StreamedRows(corpus, tokenizer, **{**settings, **changes})


def read_all(rows):
    """All rows up to the end of the text."""
    found = []
    with pytest.raises(TextUsedUp, match=r"epochs = 1 .*raise epochs in \[corpus\], and the same command continues"):
        while True:
            found.append(rows[len(found)])
    return found


def documents_of(rows, tokenizer):
    """The documents that rows hold, the last of which may be cut."""
    end = tokenizer.decode([tokenizer.eos_token_id])
    text = tokenizer.decode(np.concatenate([tokens for tokens, _ in rows]))
    return text.split(end)


def same(first, second):
    return all(np.array_equal(a, b) for x, y in zip(first, second, strict=True) for a, b in zip(x, y, strict=True))


def trained_on(corpus):
    return {text for text in TEXTS if not corpus.holds_out(text)}


def test_a_pass_has_every_document_once(corpus, tokenizer):
    rows = read_all(streamed(corpus, tokenizer))
    *documents, last = documents_of(rows, tokenizer)
    missing = trained_on(corpus) - set(documents)
    assert len(documents) == len(set(documents)) and set(documents) < trained_on(corpus)
    # What is left does not fill a row, and may be several short documents.
    assert sum(len(tokenizer(text)["input_ids"]) + 1 for text in missing) < 32 + len(tokenizer(last)["input_ids"])
    assert documents[:20] != [text for text in TEXTS if text in trained_on(corpus)][:20]  # shuffled
    for tokens, starts in rows:
        ends = np.flatnonzero(tokens[:-1] == tokenizer.eos_token_id) + 1
        assert starts.tolist() == [0, *ends.tolist()] and len(tokens) == 32


def test_held_out_documents_are_held_out_wherever_they_stand(corpus, tokenizer, tmp_path):
    held_out = [document.text for document in corpus.held_out_documents()]
    assert sorted(held_out) == sorted(set(TEXTS) - trained_on(corpus)) and 5 < len(held_out) < 40
    other = TextCorpus(paths=(write_rows(tmp_path / "all.jsonl", TEXTS[::-1]),), streaming=True, held_out_fraction=0.1)
    assert [document.text for document in other.held_out_documents()] == sorted(held_out, key=TEXTS.index, reverse=True)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    prepared = prepare_text(corpus, TextTokenizer(path=str(tmp_path / "tokenizer")), tmp_path / "cache")
    shards = prepared.held_out
    assert [tokenizer.decode(shards.document(n)[:-1]) for n in range(len(shards.starts))] == held_out
    assert len(prepared.train) == 0
    few = TextCorpus(
        paths=corpus.paths, streaming=True, held_out_fraction=0.1, held_out_megabytes=len(held_out[0]) / 1e6
    )
    assert (
        len(prepare_text(few, TextTokenizer(path=str(tmp_path / "tokenizer")), tmp_path / "cache").held_out.starts) == 1
    )


def test_files_of_held_out_text(corpus, tokenizer, tmp_path):
    named = write_rows(tmp_path / "held-out.jsonl", ["one text", "another text"])
    corpus = TextCorpus(paths=corpus.paths, held_out=(named,), streaming=True, epochs=1)
    assert [document.text for document in corpus.held_out_documents()] == ["one text", "another text"]
    *documents, _ = documents_of(read_all(streamed(corpus, tokenizer)), tokenizer)
    assert len(documents) > 155 and set(documents) <= set(TEXTS)


def mixed(corpus, tmp_path, **changes):
    rows = write_rows(tmp_path / "other.jsonl", [f"other {text}" for text in TEXTS[:60]], field="body")
    sources = (
        TextSource(paths=corpus.paths, weight=3.0, min_tokens=20),
        TextSource(paths=(rows,), text_field="body", held_out_fraction=0.3),
    )
    return TextCorpus(sources=sources, streaming=True, shuffle_megabytes=0.002, **changes)


@pytest.mark.parametrize("several", [False, True])
def test_every_row_can_be_continued_from(corpus, tokenizer, tmp_path, several):
    corpus = mixed(corpus, tmp_path) if several else TextCorpus(**{**vars_of(corpus), "epochs": None})
    rows = streamed(corpus, tokenizer)
    whole = [rows[number] for number in range(300)]  # several passes
    assert any(entry["at"]["epoch"] > 0 for entry in rows.state(300))
    for place in (0, 1, 2, 17, 100, 101, 255):
        again = streamed(corpus, tokenizer)
        again.load(place, json.loads(json.dumps(rows.state(place))))
        assert same([again[number] for number in range(place, place + 40)], whole[place : place + 40])


def vars_of(corpus):
    return {name: getattr(corpus, name) for name in ("paths", "streaming", "shuffle_megabytes", "held_out_fraction")}


def test_rows_of_a_mixture_have_one_source_each(corpus, tokenizer, tmp_path):
    rows = streamed(mixed(corpus, tmp_path), tokenizer, length=16)
    of_other = [documents_of([rows[number]], tokenizer) for number in range(400)]
    shares = [rows.mixture.place(number)[0] for number in range(400)]
    for texts, source in zip(of_other, shares, strict=True):
        if len(texts) > 2:  # a whole document, of which the first and last may be parts
            assert texts[1].startswith("other ") == (source == 1)
    assert 0.18 < sum(shares) / 400 < 0.32


@pytest.mark.parametrize("files", [1, 2, 3])
def test_processes_read_parts_of_their_own(tokenizer, tmp_path, files):
    """Every second row, where the number of files cannot be halved; and the same rows as one process that reads both parts."""
    paths = tuple(write_rows(tmp_path / f"{n}.jsonl", TEXTS[n::files]) for n in range(files))
    corpus = TextCorpus(paths=paths, streaming=True, shuffle_megabytes=0.002, epochs=1, held_out_fraction=0.1)
    parts = [streamed(corpus, tokenizer, parts=2, process=process, processes=2) for process in range(2)]
    found = [read_all(rows) for rows in parts]
    documents = [set(documents_of(rows, tokenizer)[:-1]) for rows in found]
    assert not documents[0] & documents[1] and len(documents[0] | documents[1]) > len(trained_on(corpus)) - 12
    alone = streamed(corpus, tokenizer, parts=2)
    both = [row for pair in zip(*found) for row in pair]
    assert same([alone[number] for number in range(len(both))], both)


def test_two_processes_continue_from_the_states_of_both(corpus, tokenizer, tmp_path):
    corpus = mixed(corpus, tmp_path)
    running = [streamed(corpus, tokenizer, parts=2, process=process, processes=2) for process in range(2)]
    for rows in running:
        for number in range(30):
            rows[number]
    states = [entry for rows in running for entry in rows.state(40)]
    later = [[rows[number] for number in range(10)] for rows in running]
    for process, expected in enumerate(later):
        again = streamed(corpus, tokenizer, parts=2, process=process, processes=2)
        again.load(40, states)
        assert same([again[number] for number in range(20)][10:], expected)


def test_what_was_read_too_long_ago_is_not_known(corpus, tokenizer):
    rows = streamed(corpus, tokenizer, ahead=2)
    for number in range(5):
        rows[number]
    assert rows.state(3) and rows.state(5)
    with pytest.raises(RuntimeError, match="at most 3 ahead of a checkpoint, got 3"):
        rows.state(2)


def test_rows_before_the_first_are_left_out(corpus, tokenizer):
    rows = streamed(corpus, tokenizer)
    assert same([streamed(corpus, tokenizer, first=12)[0]], [[rows[number] for number in range(13)][12]])


@pytest.mark.parametrize("kind", ["json", "parquet", "saved"])
def test_datasets_are_streamed(tokenizer, tmp_path, kind):
    made = datasets.Dataset.from_dict({"body": TEXTS, "number": list(range(len(TEXTS)))})
    if kind == "saved":
        made.save_to_disk(str(tmp_path / "saved"))
        asked = {"dataset": str(tmp_path / "saved")}
    else:
        getattr(made, f"to_{kind}")(str(tmp_path / f"rows.{kind}"))
        asked = {"dataset": kind, "data_files": (str(tmp_path / f"rows.{kind}"),)}
    corpus = TextCorpus(**asked, text_field="body", streaming=True, shuffle_megabytes=0.002)
    assert list(corpus.texts()) == TEXTS
    rows = streamed(corpus, tokenizer, parts=2)
    whole = [rows[number] for number in range(60)]
    again = streamed(corpus, tokenizer, parts=2)
    again.load(23, json.loads(json.dumps(rows.state(23))))
    assert same([again[number] for number in range(23, 60)], whole[23:])
    with pytest.raises(ValueError, match="dataset: a row must be an object with text in 'text', got the keys body"):
        next(TextCorpus(**asked, streaming=True).texts())


def test_text_that_cannot_be_trained_on(corpus, tokenizer, tmp_path):
    changes = {**vars_of(corpus), "min_tokens": 10_000}
    with pytest.raises(ValueError, match="all its documents are held out, or shorter than min_tokens"):
        streamed(TextCorpus(**changes), tokenizer)[0]
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(
        ValueError, match="none of its documents is held out and as long as it must be; raise held_out_fraction"
    ):
        prepare_text(TextCorpus(**changes), TextTokenizer(path=str(tmp_path / "tokenizer")), tmp_path / "cache")
