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
from transformers import LlamaConfig, LlamaForCausalLM

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


def write(lm: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """A greedy answer in float64, read as a whole for each token."""
    lm, text, found = copy.deepcopy(lm).double(), list(prompt), []
    with torch.no_grad():
        for _ in range(tokens):
            best = lm(torch.tensor([text])).logits[0, -1].log_softmax(-1).max(0)
            text.append(int(best.indices))
            found.append(float(best.values))
    return text[len(prompt) :], found


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
        if isinstance(prompt[0], list):
            written = [write(self.server.lm, one, asked["max_tokens"]) for one in prompt]
            told = [{"tokens": [f"token_id:{x}" for x in ids], "token_logprobs": numbers} for ids, numbers in written]
            choices = [{"index": n, "text": "", "logprobs": one} for n, one in enumerate(told)]
            return self.reply({"choices": choices[::-1] if form == "echo" else [{"text": ""}]})
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


def test_answers_of_a_server(serve):
    lm = model(["gdn", "softmax"], initializer_range=0.5)
    server = serve("echo", lm)
    found = check_agreement(lm, server.address, PROMPTS, answers=7)
    assert 0 < found.largest < 1e-5 and found.compared == 14 and server.asked[-1]["prompt"] == PROMPTS
    server.form = "nothing"
    with pytest.raises(ValueError, match="serve with a program that knows return_tokens_as_token_ids"):
        check_agreement(lm, server.address, PROMPTS, answers=7)


@pytest.mark.parametrize("mixer", [["gdn", "softmax"], ["lattice"]], ids=str)
def test_answers_of_generate(mixer):
    """In the same batch they are the same numbers, bit for bit. By itself a prompt may round in another way."""
    lm = model(mixer, initializer_range=0.5)

    def generate(asked: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        width = max(map(len, asked))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in asked])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in asked])
        options = {"do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        result = lm.generate(ids, attention_mask=mask, max_new_tokens=tokens, eos_token_id=None, **options)
        written = result.sequences[:, width:]
        numbers = torch.stack(result.logits, 1).log_softmax(-1).gather(2, written[..., None])[..., 0]
        return list(zip(written.tolist(), numbers.tolist(), strict=True))

    found = check_agreement(lm, generate, PROMPTS, answers=6)
    assert found.largest == 0 and found.compared == 12
    wrong = [(ids, [*numbers[:3], numbers[3] - 0.5, *numbers[4:]]) for ids, numbers in generate(PROMPTS, 6)]
    found = check_agreement(lm, lambda *given: wrong, PROMPTS, answers=6)
    assert found.differences == pytest.approx((0.5, 0.5)) and found.tokens == (8, 6)


def test_answers_for_a_model_of_transformers():
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    lm = LlamaForCausalLM(LlamaConfig(vocab_size=32, **sizes)).eval()
    found = check_agreement(lm, lambda asked, tokens: [write(lm, prompt, tokens) for prompt in asked], answers=3)
    assert found.largest < 1e-5 and found.compared == 12


@pytest.mark.parametrize(
    "answer, message",
    [
        ([5, 6], "must write 3 tokens behind prompt 0"),
        (([5, 6], [0.0, 0.0]), "must write 3 tokens behind prompt 0"),
        (([5, 6, 32], [0.0] * 3), "token of answer 0 must be"),
        (([5, 6, 7], [0.0] * 2), "each of the 3 tokens of answer 0"),
    ],
    ids=["no pairs", "short", "no token", "few numbers"],
)
def test_wrong_answers_refused(answer, message):
    with pytest.raises((ValueError, TypeError), match=message):
        check_agreement(model("gdn"), lambda asked, tokens: [answer] * 2, PROMPTS, answers=3)
