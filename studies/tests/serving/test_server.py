"""The server of `fastweights serve` in a process of its own: answers at once and piece by piece, requests that are given up, and
an end at Ctrl-C."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from fastweights_studies.measure.serving_soak import LEFT, answer, send, server, soak

from tests.evaluation.small import model, save, tokenizer
from tests.serving.engine import generated

# One server for all of them, which takes long to start.
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("server")]
MIXER = ["gdn", {"name": "softmax", "window": 7}, "lattice"]
SIZES = {"mixer": MIXER, "hidden_size": 64}
OPTIONS = [
    "--max-model-len", "256", "--memory", "0.01", "--enforce-eager", "--max-num-seqs", "4",
    "--max-num-batched-tokens", "32", "--block-size", "32",
]  # fmt: skip


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = save(tmp_path_factory.mktemp("served"), **SIZES)
    with server(folder, folder / "log", OPTIONS) as port:
        yield port


def test_answers_are_those_of_generate(port: int) -> None:
    ids = tokenizer()("The import statement")["input_ids"]
    assert answer(port, "The import statement", 12) == generated(model(**SIZES), [ids], 12)[0]


def test_an_answer_comes_piece_by_piece(port: int) -> None:
    pieces = []
    with closing(send(port, "The import", 8, stream=True, return_token_ids=True)) as connection:
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["token_ids"])
    assert len(pieces) > 1  # a busy server sends several tokens at a time
    ids = tokenizer()("The import")["input_ids"]
    assert [token for piece in pieces for token in piece or []] == generated(model(**SIZES), [ids], 8)[0]


def check_soak(port: int, requests: int, checked: int) -> dict[str, Any]:
    report = soak(port, model(**SIZES), requests=requests, at_once=8, checked=checked, seed=0)
    assert report["given_up"] == requests // 3 and report["checked"] == checked
    assert report["wrong"] == report["answers_of_wrong_length"] == 0
    assert not any(report[f"left_{name}"] for name in LEFT)
    return report


def test_requests_that_are_given_up_leave_nothing_behind(port: int) -> None:
    """Many at once, of any length, a third of them given up: the others are answered as if alone, and the pool is empty at the
    end. The module itself does it with thousands."""
    assert check_soak(port, 60, 15)["cached_prompt_tokens"] > 0


def test_two_engines_share_the_requests(tmp_path: Path) -> None:
    """Each has the whole model and a pool of its own."""
    with server(save(tmp_path, **SIZES), tmp_path / "log", [*OPTIONS, "--data-parallel-size", "2"]) as port:
        check_soak(port, 24, 12)
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
            tokens = re.findall(r'vllm:generation_tokens_total\{engine="(\d)".*\} ([\d.]+)', reply.read().decode())
    assert [engine for engine, _ in tokens] == ["0", "1"] and all(float(count) > 0 for _, count in tokens)
