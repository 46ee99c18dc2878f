"""The server of `fastweights serve` in a process of its own: answers at once and piece by piece, requests that are given up, and
an end at Ctrl-C."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from ..evaluation.small import TEXT, model, save, tokenizer
from .engine import generated

MIXER = ["gdn", {"name": "softmax", "window": 7}, "lattice"]
SIZES = {"mixer": MIXER, "hidden_size": 64}
START = 300  # seconds at most
REQUESTS = int(os.environ.get("REQUESTS", "60"))  # REQUESTS=2000 make test-vllm ARGS="-k given_up" runs for minutes
CHECKED = 200  # answers at most


def address(port: int, path: str) -> str:
    return f"http://127.0.0.1:{port}/{path}"


def ask(port: int, prompt: str | list[int], tokens: int, **more: object) -> Request:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    return Request(address(port, "v1/completions"), json.dumps(body).encode(), {"Content-Type": "application/json"})


def answer(port: int, prompt: str | list[int], tokens: int) -> list[int]:
    with urlopen(ask(port, prompt, tokens, return_token_ids=True), timeout=120) as reply:
        return json.load(reply)["choices"][0]["token_ids"]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    folder = save(tmp_path_factory.mktemp("served"), **SIZES)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--name", "tiny", "--max-model-len", "256", "--memory", "0.01"]
    options += ["--enforce-eager", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    command = [sys.executable, "-m", "fastweights", "serve", str(folder), *options]
    log = folder / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    try:
        for _ in range(START):
            assert server.poll() is None, log.read_text()[-4000:]
            try:
                urlopen(address(port, "health"), timeout=1).close()
                break
            except (URLError, OSError):
                time.sleep(1)
        else:
            raise AssertionError(f"no server after {START} s: {log.read_text()[-4000:]}")
        yield port
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0
    finally:
        server.kill()


def test_answers_are_those_of_generate(port: int) -> None:
    ids = tokenizer()("The import statement")["input_ids"]
    assert answer(port, "The import statement", 12) == generated(model(**SIZES), [ids], 12)[0]


def test_an_answer_comes_piece_by_piece(port: int) -> None:
    pieces = []
    with urlopen(ask(port, "The import", 8, stream=True, return_token_ids=True), timeout=120) as reply:
        for line in reply:
            if line.startswith(b"data: {"):
                pieces.append(json.loads(line[6:])["choices"][0]["token_ids"])
    assert len(pieces) > 3
    ids = tokenizer()("The import")["input_ids"]
    assert [token for piece in pieces for token in piece or []] == generated(model(**SIZES), [ids], 8)[0]


def test_requests_that_are_given_up_leave_nothing_behind(port: int) -> None:
    """Many at once, of any length, a third of them given up after the first piece: the others are answered as if alone, and the
    pool is empty at the end."""
    draw, own = random.Random(0), model(**SIZES)
    prompts = [tokenizer()(TEXT[start : start + draw.randrange(4, 200)])["input_ids"] for start in range(REQUESTS)]
    lengths = [draw.randrange(1, 24) for _ in prompts]

    def run(number: int) -> list[int] | None:
        if number % 3:
            return answer(port, prompts[number], lengths[number])
        with urlopen(ask(port, prompts[number], 40, stream=True), timeout=120) as reply:
            reply.readline()
        return None

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(run, range(REQUESTS)))
    answered = [number for number in range(REQUESTS) if number % 3]
    for number in draw.sample(answered, min(CHECKED, len(answered))):
        assert answers[number] == generated(own, [prompts[number]], lengths[number])[0]
    for _ in range(60):
        if usage(port) == {"running": 0, "waiting": 0, "held": 0}:
            return
        time.sleep(0.5)
    raise AssertionError(f"after all requests have ended: {usage(port)}")


def usage(port: int) -> dict[str, float]:
    """Requests that run and wait, and the part of the pool that is held."""
    with urlopen(address(port, "metrics"), timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    names = {
        "running": "vllm:num_requests_running{",
        "waiting": "vllm:num_requests_waiting{",
        "held": "vllm:kv_cache_usage_perc{",
    }
    return {
        what: sum(float(line.split()[-1]) for line in lines if line.startswith(name)) for what, name in names.items()
    }
