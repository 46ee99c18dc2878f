"""A gigabyte of JSON lines is streamed within 300 MB, and a training on it begins within 20 seconds."""

import json
import os
import random
import subprocess
import sys

import pytest

from fastweights.data.text import TextTokenizer

pytest.importorskip("datasets")
pytestmark = pytest.mark.slow

# What torch takes is not counted; all else is, with transformers and datasets. The tokenizer knows no word: it is fast.
READ = """
import sys, psutil, torch
rss = lambda: psutil.Process().memory_info().rss
before = peak = rss()
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from fastweights.data.text import TextCorpus
from fastweights.data.text.streamed import StreamedRows, TextUsedUp
made = Tokenizer(models.WordLevel({"?": 0, "end": 1}, unk_token="?"))
made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="end")
corpus = TextCorpus(paths=(sys.argv[1],), streaming=True, epochs=1)
rows, number = StreamedRows(corpus, tokenizer, length=1024, seed=0, count=10**9, parts=1), 0
try:
    while True:
        rows[number]
        number += 1
        if number % 100 == 0:
            peak = max(peak, rss())
except TextUsedUp:
    print(number * 1024, max(peak, rss()) - before)
"""

RUN = """
output = "out"
cache = "cache"
length = 256
batch_size = 2
max_steps = 10
log_every = 1
[model]
hidden_size = 16
num_hidden_layers = 1
num_heads = 2
mixer = "gdn"
[tokenizer]
path = "tokenizer"
[corpus]
paths = ["rows.jsonl"]
streaming = true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("gigabyte")
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(30, 90))) for _ in range(5000)]
    texts = [" ".join(draw.choices(words, k=draw.randint(5, 300))) for _ in range(500)]
    TextTokenizer(vocab_size=512).train(texts[:20]).save_pretrained(made / "tokenizer")
    size = number = 0
    with (made / "rows.jsonl").open("w") as file:
        while size < 10**9:
            size += file.write(json.dumps({"text": f"{number} {texts[number % 500]}"}) + "\n")
            number += 1
    yield made
    (made / "rows.jsonl").unlink()


def run(folder, *arguments):
    return subprocess.run([sys.executable, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_gigabyte_takes_little_memory(folder):
    tokens, grown = map(int, run(folder, "-c", READ, str(folder / "rows.jsonl")).split())
    assert tokens > 0.9 * 10**9 / 62  # of words of 61 letters on average, 5% of them held out
    assert grown < 300 * 10**6


def test_a_training_begins_soon(folder):
    """In seconds of one core: other processes do not count."""
    (folder / "run.toml").write_text(RUN)
    before = sum(os.times()[2:4])
    run(folder, "-m", "fastweights", "train", "run.toml", "--stop-at", "1")
    assert (folder / "out/checkpoints/checkpoint-1").exists() and sum(os.times()[2:4]) - before < 20
