"""generate() of whole models: milliseconds per token with everything that it does, and the captured step alone.

    python -m fastweights_studies.measure.generate
    python -m fastweights_studies.measure.generate --mixers gdn,softmax --batches 1,64 --prompt 2048

24 layers of width 1024, 8 heads of 128, bfloat16, random weights; greedy. A token's time is that of NEW tokens less that of one,
so that the prompt is not in it; "all" has the whole call over its tokens. "step" is the replayed graph by itself. A short call
reads 512 tokens and writes 16: the first of its kind, which captures the graph, and later ones. Prefill: forward passes of one
long prompt, and the share of the matrix products' rate that two operations per parameter and token come to. Writes
studies/results/generate-<device>.json, which keeps the mixers that are not run again.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.models.decoding import DecodeSteps
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Row

TASK = "generate"
LAYERS = 24
NEW = 128
RATE = 790e12  # of bfloat16 products on an H200, measured back to back (operations per second)
LONG = 16384
SHORT, FEW = 512, 16  # tokens of the prompt and of the answer of a short call


def seconds(work: Any) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def middle(work: Callable[[], float], repeats: int) -> float:
    """The median of what `work` measures."""
    return sorted(work() for _ in range(repeats))[repeats // 2]


def per_token(model: FastWeightsForCausalLM, ids: torch.Tensor, replayed: bool, repeats: int) -> tuple[float, float]:
    """Seconds per token after the first, and of the whole call over its tokens."""
    options: dict[str, Any] = {"do_sample": False, "disable_compile": not replayed, "eos_token_id": None}

    def call(new: int) -> float:
        return seconds(lambda: model.generate(ids, max_new_tokens=new, min_new_tokens=new, **options))

    call(NEW if replayed else 2)
    many = NEW if replayed else 16
    whole = middle(partial(call, many), repeats)
    first = middle(partial(call, 1), repeats)
    return (whole - first) / (many - 1), whole / many


def short_calls(model: FastWeightsForCausalLM, ids: torch.Tensor, repeats: int) -> dict[str, Value]:
    """Milliseconds of the first short call with as many sequences, of later ones, and of one that writes one token."""

    def call(new: int) -> float:
        options: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "min_new_tokens": new}
        return seconds(lambda: model.generate(ids, max_new_tokens=new, **options)) * 1e3

    call(2)  # compiles the kernels
    first = call(FEW)
    later, token = (middle(partial(call, new), repeats) for new in (FEW, 1))
    return {"first_short_call_ms": first, "short_call_ms": later, "first_token_ms": token}


def step_alone(model: FastWeightsForCausalLM, ids: torch.Tensor) -> float:
    """Seconds of a replay."""
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    steps = DecodeSteps(model, ids.shape[1] + NEW)
    if not steps.serve(ids[:, -1:], cache.layers, ids.shape[1]) or steps.graph is None:
        return float("nan")
    steps.graph.replay()
    graph = steps.graph

    def replay() -> None:
        for _ in range(50):
            graph.replay()

    return seconds(replay) / 50


@torch.no_grad()
def measure(mixer: str, batches: list[int], prompt: int, repeats: int) -> list[tuple[int, int, dict[str, Value]]]:
    """Batches, tokens of the prompt, and what was measured with them."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer)).bfloat16().eval()
    parameters = sum(p.numel() for p in model.parameters())
    found: list[tuple[int, int, dict[str, Value]]] = []
    for batch in batches:
        ids = torch.randint(model.config.vocab_size, (batch, prompt), device="cuda")
        short = short_calls(model, ids[:, :SHORT], repeats)
        token, whole = per_token(model, ids, True, repeats)
        called, _ = per_token(model, ids, False, 1)
        values: dict[str, Value] = {
            **short,
            "token_ms": token * 1e3,
            "token_of_whole_call_ms": whole * 1e3,
            "step_ms": step_alone(model, ids) * 1e3,
            "token_without_graph_ms": called * 1e3,
            "tokens_per_second": batch / token,
            "parameters": parameters,
            "state_size": model.state_size(prompt),
        }
        found.append((batch, prompt, values))
    ids = torch.randint(model.config.vocab_size, (1, LONG), device="cuda")
    times = [seconds(lambda: model(ids, use_cache=True, logits_to_keep=1)) for _ in range(4)]
    body = parameters - 2 * model.lm_head.weight.numel()
    share = 2 * body * LONG / min(times) / RATE
    return [*found, (1, LONG, {"prefill_ms": min(times) * 1e3, "prefill_share_of_rate": share})]


def make_generate_rows(mixer: str, batch: int, prompt: int, values: dict[str, Value], origin: Origin) -> list[Row]:
    column = {"batch": batch, "prompt": prompt, "layers": LAYERS, "new": 0 if "prefill_ms" in values else NEW}
    return make_rows(TASK, origin, values, mixer=mixer, column=column)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="gdn,softmax")
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    device, batches = find_gpu(), [int(batch) for batch in arguments.batches.split(",")]
    path = name_file(arguments.results, "generate", device)
    for mixer in arguments.mixers.split(","):
        found, origin = measure(mixer, batches, arguments.prompt, arguments.repeats), describe(device)
        for batch, prompt, values in found:
            print(f"{mixer}, batch {batch}, prompt {prompt}: {values}", flush=True)
            replace_rows(path, make_generate_rows(mixer, batch, prompt, values, origin))
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
