"""`fastweights generate` from outside: what it prints and when."""

from __future__ import annotations

import io
import json
import re
from types import SimpleNamespace

import pytest
import torch

from fastweights.cli import main
from fastweights.evaluation import continue_text
from tests.evaluation.small import model, save, tokenizer

WANTED = continue_text(model(), tokenizer(), "The import", max_new_tokens=12, greedy=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    save(folder / "model")
    return folder


def generate(run, *options):
    return main(["generate", str(run), "--device", "cpu", *options])


@pytest.mark.parametrize("folder", ["", "model"])
def test_the_continuation_alone_is_printed_and_its_speed_beside(run, folder, capsys):
    assert generate(run / folder, "The import", "--max-new-tokens", "12", "--greedy") == 0
    printed = capsys.readouterr()
    assert printed.out == f"{WANTED}\n"
    assert re.fullmatch(r"12 tokens, the first after [\d,]+ ms, then [\d,]+\.\d per second\n", printed.err)


@pytest.mark.parametrize(
    "has_gpu, options, wanted",
    [
        (True, [], "cuda"),
        (False, [], "cpu"),
        (True, ["--device", "cpu"], "cpu"),
        (False, ["--device", "cuda:1"], "cuda:1"),
    ],
)
def test_the_device_is_the_gpu_where_there_is_one(run, monkeypatch, has_gpu, options, wanted):
    devices = []

    def load(*given, device, **others):
        devices.append(device)
        return model(), tokenizer()

    monkeypatch.setattr("fastweights.models.loading.load_language_model", load)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert main(["generate", str(run), "The import", "--max-new-tokens", "2", *options]) == 0
    assert devices == [wanted]


def test_a_single_token_has_no_rate(run, capsys):
    assert generate(run, "The import", "--max-new-tokens", "1", "--greedy") == 0
    assert re.fullmatch(r"1 token, the first after [\d,]+ ms\n", capsys.readouterr().err)


def test_the_prompt_may_come_from_standard_input(run, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("The import"))
    assert generate(run, "-", "--max-new-tokens", "12", "--greedy") == 0
    assert capsys.readouterr().out == f"{WANTED}\n"


def test_a_block_changes_no_word(run, capsys):
    assert generate(run, "The import", "--max-new-tokens", "12", "--greedy", "--block", "1") == 0
    assert capsys.readouterr().out == f"{WANTED}\n"


def test_drafts_change_no_word(run, capsys):
    for options in (["--prompt-lookup", "3"], ["--draft", str(run)]):
        assert generate(run, "The import", "--max-new-tokens", "12", "--greedy", *options) == 0
        printed = capsys.readouterr()
        assert printed.out == f"{WANTED}\n" and printed.err.startswith("12 tokens")


def test_a_draft_of_another_tokenizer(run, capsys, monkeypatch):
    monkeypatch.setattr(
        "fastweights.models.loading.load_language_model", lambda path, **given: (model(), tokenizers.pop())
    )
    tokenizers = [SimpleNamespace(get_vocab=dict), tokenizer()]
    assert generate(run, "The", "--draft", str(run)) == 2
    assert "--draft must have the tokenizer of MODEL" in capsys.readouterr().err


def test_text_is_printed_while_it_is_written(run, capsys, monkeypatch):
    pieces = []
    monkeypatch.setattr("transformers.TextStreamer.on_finalized_text", lambda self, text, **_: pieces.append(text))
    assert generate(run, "The import", "--max-new-tokens", "12", "--greedy") == 0
    assert "".join(pieces) == WANTED and len(pieces) > 3


def test_a_seed_gives_the_same_sample(run, capsys):
    texts = []
    for seed in ("3", "3", "4"):
        assert generate(run, "The", "--max-new-tokens", "12", "--seed", seed, "--temperature", "1.2") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    "options, words",
    [
        (["The", "--top-p", "0"], ["top_p must be a finite number, more than 0"]),
        (["The", "--temperature", "-1"], ["temperature must be positive"]),
        (["The", "--max-new-tokens", "0"], ["max_new_tokens"]),
        (["The", "--block", "0"], ["block must be"]),
        (["The", "--prompt-lookup", "0"], ["prompt_lookup must be"]),
        (["The", "--draft", "none"], ["none"]),
        (["The", "--device", "abacus"], ["device", "abacus"]),
        (["The", "--device", "meta"], ["device", "meta"]),
        ([], ["PROMPT"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, capsys, options, words):
    assert generate(run, *options) == 2
    error = capsys.readouterr().err
    assert error.startswith("fastweights: error: ") and error.count("\n") == 1
    assert all(word in error for word in words), error


def test_a_folder_that_holds_another_model_or_none(tmp_path, capsys):
    assert generate(tmp_path / "none", "The") == 2
    assert "MODEL must be a folder" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert generate(tmp_path, "The") == 2
    assert "of type 'fastweights', got 'gpt2'" in capsys.readouterr().err


def test_a_full_device_is_one_line(run, capsys, monkeypatch):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. More")

    monkeypatch.setattr("fastweights.evaluation.continue_text", full)
    assert generate(run, "The") == 1
    assert capsys.readouterr().err.count("\n") == 1
