"""check_agreement against a server that computes log probabilities in a way of its own: token by token, in float64."""

from __future__ import annotations

import copy
import json
import math
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from fastweights.testing import check_agreement
from tests.models.small import model

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6]]


def by_hand(lm: Any, prompt: list[int]) -> list[float]:
    """Log probabilities from a cache that reads one token at a time."""
    lm, cache, found = copy.deepcopy(lm).double(), None, []
    with torch.no_grad():
        for token, following in zip(prompt, prompt[1:], strict=False):
            out = lm(torch.tensor([[token]]), past_key_values=cache)
            cache, p = out.past_key_values, out.logits[0, -1].softmax(-1)
            found.append(math.log(p[following]))
    return found


class Server(ThreadingHTTPServer):
    """An OpenAI-compatible server of completions, whose number for the last token of the second prompt is off by 0.25."""

    def __init__(self, lm: Any, form: str) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.lm, self.form, self.asked = lm, form, []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Any

    def log_message(self, *given: Any) -> None: ...

    def reply(self, content: Any, code: int = 200) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def do_GET(self) -> None:
        self.reply({"data": [{"id": "served"}]} if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        if asked["model"] != "served" or self.path != "/v1/completions":
            return self.reply({"error": {"message": "no such model"}}, 404)
        prompt, form = asked["prompt"], self.server.form
        numbers = by_hand(self.server.lm, prompt)
        if prompt == PROMPTS[1]:
            numbers[1] += 0.25
        choice: dict[str, Any] = {"text": ""}
        if form == "echo":
            choice["logprobs"] = {"token_logprobs": [None, *numbers, -1.0]}
        elif form == "prompt_logprobs":
            entries = [{str(t): {"logprob": x, "rank": 3}} for t, x in zip(prompt[1:], numbers, strict=True)]
            choice["prompt_logprobs"] = [None, *entries]
        elif form == "answer alone":
            choice["logprobs"] = {"token_logprobs": [-1.0]}
        return self.reply({"choices": [choice]})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("no_proxy", "*")
    servers = []

    def start(form: str, lm: Any) -> Server:
        server = Server(lm, form)
        servers.append(server)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("form", ["echo", "prompt_logprobs"])
def test_a_server(serve, form):
    lm = model(["gdn", "softmax"], initializer_range=0.5).train()
    server = serve(form, copy.deepcopy(lm).eval())
    found = check_agreement(lm, server.address + "/v1/", PROMPTS)
    assert found.differences[0] < 1e-5 and found.differences[1] == pytest.approx(0.25, abs=1e-5)
    assert found.largest == found.differences[1] and found.tokens[1] == 2 and found.compared == 6
    assert "of 6 tokens differ by at most 0.25, at token 2 of prompt 1" in str(found) and lm.training
    with pytest.raises(AssertionError, match="at token 2 of prompt 1, more than tolerance, 0.01"):
        check_agreement(lm, server.address, PROMPTS, tolerance=0.01)
    assert check_agreement(lm, server.address, tolerance=1e-4).compared == 2 + 17 + 64 + 100 - 4
    assert server.asked[-1]["echo"] is True and server.asked[-1]["prompt_logprobs"] == 0


def test_a_function():
    lm = model("gdn", initializer_range=0.5)
    assert check_agreement(lm, lambda asked: [by_hand(lm, prompt) for prompt in asked], PROMPTS).largest < 1e-5


@pytest.mark.parametrize(
    "server, message",
    [
        (lambda asked: [[0.0]], "must answer each of 2 prompts, got 1"),
        (lambda asked: [[0.0] * 5, [0.0] * 2], "each of the 4 tokens after the first of prompt 0"),
        (lambda asked: [[0.0] * 4, [0.0, float("nan")]], "finite .* prompt 1"),
    ],
)
def test_answers_refused(server, message):
    with pytest.raises(ValueError, match=message):
        check_agreement(model("gdn"), server, PROMPTS)


@pytest.mark.parametrize(
    "prompts, message",
    [([], "at least one prompt"), ([[1]], r"prompts\[0\] must hold at least two tokens"), ([[1, 32]], r"prompts\[0\]")],
)
def test_prompts_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        check_agreement(model("gdn"), by_hand, prompts)


def test_servers_refused(serve):
    lm = model("gdn")
    server = serve("answer alone", lm)
    with pytest.raises(ValueError, match="each of the 4 tokens after the first of prompt 0"):
        check_agreement(lm, server.address, PROMPTS)
    server.form = "nothing"
    with pytest.raises(ValueError, match="serve with a program that knows echo or prompt_logprobs"):
        check_agreement(lm, server.address, PROMPTS)
    with pytest.raises(ConnectionError, match="refused the request .404.: .*no such model"):
        check_agreement(lm, server.address, PROMPTS, name="other")
    with pytest.raises(ConnectionError, match="cannot be reached"):
        check_agreement(lm, "http://127.0.0.1:9", PROMPTS)
