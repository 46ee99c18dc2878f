"""Tokenizers, shards on disk, and rows packed from them."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from fastweights.data.text import PackedRows, TextCorpus, TextTokenizer, TokenShards, pack_rows, prepare_text, shards
from fastweights.data.text.packing import ShuffledRows
from fastweights.data.text.tokenizer import fingerprint, vocabulary_size
from fastweights.files import WriteError

from ...full_disk import largest_file

TEXTS = [f"The {word} says: naïve café ✓ {number}\n" * 3 for number, word in enumerate(["cat", "dog", "cow"] * 8)]


@pytest.fixture(scope="module")
def tokenizer():
    return TextTokenizer(vocab_size=300).train(TEXTS)


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, "utf-8")
    return TextCorpus(paths=(str(tmp_path / "texts"),), held_out_fraction=0.25)


def stream(folder, documents, dtype="uint16", shard_tokens=7):
    """Shards of the documents given, all of one split."""
    folder.mkdir()
    writer = shards.ShardWriter(folder, "train", dtype, shard_tokens)
    for document in documents:
        writer.append(document)
    shards.write_manifest(folder, dtype=dtype, splits={"train": writer.finished()}, text="")
    return TokenShards(folder, "train")


def test_a_trained_tokenizer_writes_every_string(tokenizer, tmp_path):
    for text in (*TEXTS, "日本\t\0\x7f 🙂 <b>  two  spaces\r\n"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert len(tokenizer) == 300 and tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    assert fingerprint(TextTokenizer(vocab_size=300).train(TEXTS)) == fingerprint(tokenizer)
    assert fingerprint(TextTokenizer(vocab_size=299).train(TEXTS)) != fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = TextTokenizer(path=str(path)).load()
        assert fingerprint(loaded) == fingerprint(tokenizer)


def test_a_tokenizer_learns_from_a_word_without_end():
    assert len(TextTokenizer(vocab_size=260).train(["x" * 300_000])) == 260


def test_the_special_tokens_are_those_beside_the_file(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token": "A", "bos_token": "B"}))
    loaded = TextTokenizer(path=str(tmp_path / "tokenizer.json")).load()
    assert (loaded.eos_token, loaded.bos_token, loaded.pad_token) == ("A", "B", "<|endoftext|>")


def test_ids_may_have_holes(corpus, tmp_path):
    from tokenizers import Tokenizer, models

    words = {"[UNK]": 0, "The": 70_000}
    Tokenizer(models.WordLevel(words, unk_token="[UNK]")).save(str(tmp_path / "holes.json"))
    prepared = prepare_text(corpus, TextTokenizer(path=str(tmp_path / "holes.json")), tmp_path / "cache")
    assert vocabulary_size(prepared.tokenizer) == 70_001 > len(prepared.tokenizer)
    assert prepared.train._dtype == "uint32"


def test_tokenizers_that_cannot_be_used(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        TextTokenizer(path=str(tmp_path / "none")).load()
    (tmp_path / "tokenizer.json").write_text("{}")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        with pytest.raises(ValueError, match="holds no Hugging Face tokenizer"):
            TextTokenizer(path=str(path)).load()
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        TextTokenizer(vocab_size=256)


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_shards_give_back_the_stream(tmp_path, dtype):
    documents = [[65535, 2, 3], [], [4], [5] * 20, [6, 7, 8, 9], [10]]
    tokens = stream(tmp_path / "tokens", documents, dtype)
    joined = np.concatenate([np.array(d, dtype=np.int64) for d in documents])
    assert len(list((tmp_path / "tokens").glob("*.bin"))) == 2
    assert len(tokens) == len(joined) == 29
    for start in range(29):
        for end in range(start, 30):
            assert tokens.tokens(start, end).tolist() == joined[start:end].tolist()
    assert [tokens.document(n).tolist() for n in range(len(tokens.starts))] == [d for d in documents if d]


def test_the_smallest_type_is_taken():
    assert [shards.token_dtype(size) for size in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]


def test_rows_know_where_documents_start(tmp_path):
    rows = PackedRows(stream(tmp_path / "tokens", [[1, 2, 3], [4, 5, 6, 7, 8], [9, 10], [11, 12]]), length=4)
    assert len(rows) == 3
    assert [row[0].tolist() for row in map(rows.__getitem__, range(3))] == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    assert [row[1].tolist() for row in map(rows.__getitem__, range(3))] == [[0, 3], [0], [0, 2]]
    packed = pack_rows([rows[0], rows[2]])
    assert packed["input_ids"].tolist() == [[1, 2, 3, 4, 9, 10, 11, 12]]
    assert packed["labels"].tolist() == [[-100, 2, 3, -100, -100, 10, -100, 12]]
    assert packed["cu_seqlens"].tolist() == [0, 3, 4, 6, 8] and packed["cu_seqlens"].dtype == torch.int32
    with pytest.raises(ValueError, match="at least one row of length 13, got 12 tokens"):
        PackedRows(rows.shards, 13)


def test_the_packed_loss_is_that_of_the_documents_by_themselves(tmp_path):
    from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

    torch.manual_seed(0)
    config = FastWeightsConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2, num_heads=2, mixer="pgdn")
    model = FastWeightsForCausalLM(config)
    documents = [torch.randint(32, (n,)).tolist() for n in (9, 5, 12, 6)]
    rows = PackedRows(stream(tmp_path / "tokens", documents), length=16)
    loss = model(**pack_rows([rows[0], rows[1]])).loss
    pieces = [documents[0], documents[1], documents[2][:2], documents[2][2:], documents[3]]
    ids = [torch.tensor([piece]) for piece in pieces]
    alone = sum(model(input_ids=i, labels=i).loss * (i.shape[1] - 1) for i in ids)
    torch.testing.assert_close(loss, alone / sum(i.shape[1] - 1 for i in ids))


def test_the_order_is_a_function_of_seed_and_index(tmp_path):
    rows = PackedRows(stream(tmp_path / "tokens", [list(range(100, 140))]), length=4)
    order = [int(row[0][0]) for row in map(ShuffledRows(rows, seed=3, count=25).__getitem__, range(25))]
    assert sorted(order[:10]) == sorted(order[10:20]) == list(range(100, 140, 4))
    assert order[:10] != order[10:20]
    again = ShuffledRows(rows, seed=3, count=25)
    assert [int(again[index][0][0]) for index in reversed(range(25))] == order[::-1]
    assert [int(row[0][0]) for row in map(ShuffledRows(rows, seed=4, count=10).__getitem__, range(10))] != order[:10]


def test_prepared_once_and_found_again(corpus, tmp_path):
    reported = []
    (tmp_path / "texts" / "latin.txt").write_bytes("naïve".encode("latin-1"))
    first = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append)
    assert len(reported) == 3 and reported[1] == "left out 1 files of the corpus: binary, or not UTF-8"
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").rglob("*") if path.is_file()}
    again = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append)
    assert len(reported) == 3
    assert {path: path.stat().st_mtime_ns for path in files} == files
    for prepared in (first, again):
        written = [prepared.tokenizer.decode(prepared.train.document(n)) for n in range(len(prepared.train.starts))]
        wanted = [d.text + "<|endoftext|>" for d in corpus.documents() if not d.held_out]
        assert written == wanted
        assert len(prepared.held_out.starts) == len(TEXTS) - len(wanted) > 0
    prepare_text(corpus, TextTokenizer(vocab_size=301), tmp_path / "cache", reported.append)
    assert len(reported) == 6


def test_the_name_of_a_special_token_is_text(tmp_path):
    (tmp_path / "a.txt").write_text("one <|endoftext|> two\n" * 50)
    prepared = prepare_text(
        TextCorpus(paths=(str(tmp_path / "a.txt"),)), TextTokenizer(vocab_size=300), tmp_path / "cache"
    )
    ids = prepared.train.document(0).tolist()
    assert ids.count(prepared.tokenizer.eos_token_id) == 1 and ids[-1] == prepared.tokenizer.eos_token_id
    assert prepared.tokenizer.decode(ids[:-1]).startswith("one <|endoftext|> two\n")


def test_fingerprints_follow_the_content(corpus, tmp_path):
    def fingerprints(size=300):
        return prepare_text(TextCorpus(paths=corpus.paths), TextTokenizer(vocab_size=size), tmp_path / "c").fingerprints

    first, file = fingerprints(), tmp_path / "texts" / "0.txt"
    file.touch()
    assert fingerprints() == first
    assert fingerprints(301) == {**first, "tokenizer_content": fingerprints(301)["tokenizer_content"]} != first
    file.write_text(file.read_text()[::-1])
    assert fingerprints()["corpus_text"] != first["corpus_text"]


def test_what_a_killed_tokenization_left_is_removed(corpus, tmp_path):
    tokens = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache").train.folder
    left, other = (tmp_path / "cache" / f".{name}.0badcafe.partial" for name in (tokens.name, "tokens-of-another"))
    for folder in (left, other):
        folder.mkdir()
    prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache")
    assert other.exists() and not left.exists()


def test_a_cache_that_cannot_be_a_folder(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="cache must be a folder that can be written to.*choose another"):
        prepare_text(corpus, TextTokenizer(), tmp_path / "file")


def overwritten(file):
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(bytes(100))


def cut(file):
    file.write_bytes(file.read_bytes()[:-2])


@pytest.mark.parametrize(
    ("name", "harm", "words"),
    [
        ("train-00000.bin", overwritten, "train-00000.bin has changed since it was written"),
        ("held_out-00000.bin", overwritten, "held_out-00000.bin has changed since it was written"),
        ("train-00000.bin", cut, r"train-00000.bin has [\d,]+ bytes, where [\d,]+ were written"),
        ("train-starts.npy", cut, r"train-starts.npy has [\d,]+ bytes, where [\d,]+ were written"),
        ("train-starts.npy", Path.unlink, "train-starts.npy is missing"),
        ("manifest.json", cut, "manifest.json has"),
        ("checksums.json", Path.unlink, "it has no checksums.json"),
    ],
)
def test_damaged_tokens_are_reported_and_made_again(corpus, tmp_path, name, harm, words):
    first = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache")
    file = first.train.folder / name
    whole, reported = file.read_bytes(), []
    harm(file)
    again = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append)
    assert re.fullmatch(
        f"the tokens in {file.parent} cannot be used, as {words}.*; the corpus is tokenized again", reported[0]
    )
    assert reported[1].startswith("tokenized the corpus")
    assert file.read_bytes() == whole and again.fingerprints == first.fingerprints
    assert again.train.tokens(0, len(again.train)).tolist() == first.train.tokens(0, len(first.train)).tolist()


def test_without_reading_all_only_sizes_are_compared(corpus, tmp_path):
    """One process of a training reads all, the others need not."""
    file = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache").train.folder / "train-00000.bin"
    reported = []
    overwritten(file)
    prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append, read_all=False)
    assert not reported
    cut(file)
    prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append, read_all=False)
    assert "train-00000.bin has" in reported[0]


def test_a_damaged_tokenizer_is_reported_and_trained_again(corpus, tmp_path):
    first = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache")
    (file,) = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    whole, reported = file.read_bytes(), []
    file.write_bytes(whole.replace(b'"the"', b'"teh"').replace(b'"a"', b'"b"', 1)[:-1])
    again = prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache", reported.append)
    assert f"the tokenizer in {file.parent} cannot be used, as tokenizer.json has" in reported[0]
    assert "trained a tokenizer" in reported[1] and len(reported) == 2
    assert file.read_bytes() == whole and again.fingerprints == first.fingerprints


@pytest.mark.parametrize("size", [1000, 20_000])
def test_a_full_disk_leaves_no_part_of_a_cache(corpus, tmp_path, size):
    """At the smaller size the tokenizer cannot be written, at the larger one the tokens."""
    (tmp_path / "texts" / "long.txt").write_text("a b c d\n" * 20_000)
    with largest_file(size), pytest.raises(WriteError, match=r"could not be written to .*cache.*: .*File too large"):
        prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache")
    left = [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")]
    assert [path.name.split("-")[0] for path in left] == ["tokenizer"] * (size > 1000)
    prepare_text(corpus, TextTokenizer(vocab_size=300), tmp_path / "cache")


def test_a_tokenizer_of_the_hub(tokenizer, tmp_path, monkeypatch):
    """From the cache of the hub, as without a network; of two revisions."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, commits = tmp_path / "models--some--tokenizer", {"main": "a" * 40, "v2": "b" * 40}
    (repository / "refs").mkdir(parents=True)
    for name, commit in commits.items():
        (repository / "refs" / name).write_text(commit)
        made = tokenizer if name == "main" else TextTokenizer(vocab_size=290).train(TEXTS)
        made.save_pretrained(repository / "snapshots" / commit)
    for revision, size in ((None, 300), ("v2", 290), (commits["main"], 300)):
        loaded = TextTokenizer(name="some/tokenizer", revision=revision).load()
        assert len(loaded) == size and loaded.padding_side == "left"
    with pytest.raises(
        ValueError, match=r"tokenizer name 'some/other' \(revision None\) cannot be fetched: .*set path to a"
    ):
        TextTokenizer(name="some/other").load()
    settings = repository / "snapshots" / commits["main"] / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "auto_map": {"AutoTokenizer": ["a.b", None]}}))
    with pytest.raises(ValueError, match="trust_remote_code = true"):
        TextTokenizer(name="some/tokenizer").load()
