"""Models in vLLM in this process, and what our own model says of the same tokens."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.serving.vllm.versions import has_copies_on_cpus

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; make test-vllm installs it", allow_module_level=True)
# Before vLLM is imported: in one process, on the cores that there are. Without it, other tests see nothing of this.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
# vLLM's softmax layers multiply float32 in TF32 on a GPU, where Triton's setting does not say otherwise.
os.environ.setdefault("TRITON_F32_DEFAULT", "ieee")
# After this question a forked process cannot use the GPU, and vLLM forks where nothing says otherwise.
if torch.cuda.is_available():
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")

vllm = pytest.importorskip("vllm")
needs_copies = pytest.mark.skipif(
    not (torch.cuda.is_available() or has_copies_on_cpus()), reason="vLLM before 0.31 copies no states on a CPU"
)
verifies_drafts = pytest.mark.skipif(
    vllm.__version__.startswith("0.24.") and not torch.cuda.is_available(),
    reason="vLLM 0.24 cannot verify drafts on a CPU",
)
needs_two = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU does not hold two processes")

VOCABULARY = 64
LENGTHS = (1, 3, 17, 64, 200)
WRITTEN = 12  # tokens
CLOSE = 1e-4
# Its own reading of these prompts in float32 is 4e-4 from that in float64.
CLOSE_OF = {"gka": 1e-3}
QUICK = ("gdn", "lattice")  # make test has these where vLLM is installed; make test-vllm has all
WINDOW = {"name": "softmax", "window": 8}
HYBRIDS: dict[str, Any] = {
    "memory and windows": ["gdn", WINDOW],
    "states of different sizes": ["softmax", "lattice", "pgdn", "mesa"],
    "grouped heads without positions": [
        "vla",
        {"name": "softmax", "num_kv_heads": 1, "qk_norm": True, "rope_theta": None},
    ],
    "full attention and two windows": ["palimpsa-m", WINDOW, "softmax", "rls", {"name": "softmax", "window": 20}],
}


def model(mixer: Any, **options: Any) -> FastWeightsForCausalLM:
    """With weights so large that its tokens differ."""
    torch.manual_seed(0)
    layers = len(mixer) if isinstance(mixer, list) else 2
    sizes = {"hidden_size": 64, "num_hidden_layers": layers, "num_heads": 2, "initializer_range": 0.3}
    sizes["vocab_size"] = VOCABULARY
    return FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, **{**sizes, **options})).eval()


def of_mixer(name: str) -> Any:
    """The mixer with memories that stay finite. vla-deltanet's need keys of length 1: others let them grow without bound."""
    return {"name": name, "normalize_qk": True} if name == "vla-deltanet" else name


def prompts(lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def engine(folder: Path, **settings: Any) -> Iterator[Any]:
    """vLLM with a saved model, stopped afterwards."""
    from vllm.distributed import cleanup_dist_env_and_memory

    _replace_kernels_once()
    plain = {
        "dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 32 << 20, "enforce_eager": True,
        "max_num_seqs": 4, "max_num_batched_tokens": 32, "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
    }  # fmt: skip
    if torch.cuda.is_available():
        plain["gpu_memory_utilization"] = 0.1  # several tests at a time
    if torch.cuda.is_available() and "enforce_eager" not in settings:
        drafted = settings.get("speculative_config", {}).get("num_speculative_tokens", 0)
        sizes = [count * (1 + drafted) for count in (1, 2, 4)]
        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
        plain |= {"enforce_eager": False, "compilation_config": graphs}
    with pytest.MonkeyPatch.context() as patch:
        if "speculative_config" in settings:  # on a GPU vLLM 0.32 would choose the second runner, which is refused
            patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        llm = vllm.LLM(str(folder), **{**plain, **settings})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


@cache
def _replace_kernels_once() -> None:
    """Since 0.31 vLLM replaces Triton's kernels at each start. It fails where a module is there that n-gram drafts import, and
    Kimi-Linear."""
    from vllm.platforms import current_platform

    platform: Any = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):
        platform.register_triton_kernel_overrides = staticmethod(cache(platform.register_triton_kernel_overrides))
        current_platform.register_triton_kernel_overrides()


@contextmanager
def in_pieces(llm: Any, tokens: int) -> Iterator[None]:
    """A running engine reads at most so many tokens in a step, which saves the start of another one."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    most, scheduler.max_num_scheduled_tokens = scheduler.max_num_scheduled_tokens, tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = most


@contextmanager
def counted_preemptions(llm: Any) -> Iterator[list[str]]:
    """The requests that give way meanwhile: vLLM takes their blocks, and later reads their tokens once more."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    given_way: list[str] = []
    preempt = scheduler._preempt_request

    def counted(request: Any, *rest: Any, **named: Any) -> Any:
        given_way.append(request.request_id)
        return preempt(request, *rest, **named)

    scheduler._preempt_request = counted
    try:
        yield given_way
    finally:
        del scheduler._preempt_request


@contextmanager
def small_pool(llm: Any, blocks: int) -> Iterator[None]:
    """A running engine has so many free blocks: sequences that need more give way."""
    pool = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
    withheld = pool.get_new_blocks(pool.get_num_free_blocks() - blocks)
    try:
        yield
    finally:
        pool.free_blocks(withheld)


@contextmanager
def failing_pool(llm: Any, every: int = 7, times: int = 8) -> Iterator[None]:
    """One in `every` requests for blocks of a running engine fails, `times` at most, so that sequences of every model give way.
    Without softmax layers and prefix caching a sequence keeps the blocks that it began with, however small the pool is."""
    manager = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
    allocate, calls = manager.allocate_slots, count(1)

    def fails(*given: Any, **named: Any) -> Any:
        call = next(calls)
        return None if call % every == 0 and call <= every * times else allocate(*given, **named)

    manager.allocate_slots = fails
    try:
        yield
    finally:
        del manager.allocate_slots


def written(llm: Any, asked: list[list[int]], tokens: int = WRITTEN, **named: Any) -> list[Any]:
    """Greedy continuations, with the logarithms of their probabilities."""
    settings = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    results = llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False, **named)
    return [result.outputs[0] for result in results]


def generated(own: Any, asked: list[list[int]], tokens: int = WRITTEN) -> list[list[int]]:
    """The same by our own generate()."""
    return [
        own.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long), max_new_tokens=tokens,
            do_sample=False,
        )[0, len(ids) :].tolist()
        for ids in asked
    ]  # fmt: skip


@torch.no_grad()
def our_view(own: Any, ids: list[int], output: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What our model gives after each token of a prompt and its continuation, read at once: the logarithm of the probability of
    the token that vLLM took, and the largest one."""
    tokens = list(output.token_ids)
    logits = own(torch.tensor([[*ids, *tokens]])).logits[0, len(ids) - 1 : -1]
    every = logits.float().log_softmax(-1)
    return every[range(len(tokens)), tokens], every.amax(-1)


def errors(own: Any, asked: list[list[int]], outputs: list[Any]) -> torch.Tensor:
    """Between the logarithms of probabilities that vLLM gives and ours, of all tokens."""
    found = []
    for ids, output in zip(asked, outputs, strict=True):
        wanted, _ = our_view(own, ids, output)
        got = torch.tensor([step[token].logprob for token, step in zip(output.token_ids, output.logprobs, strict=True)])
        found.append((got - wanted).abs())
    return torch.cat(found)


def largest_error(own: Any, asked: list[list[int]], outputs: list[Any]) -> float:
    return errors(own, asked, outputs).max().item()  # NaN where one is


def differences(one: Any, other: Any, asked: list[list[int]], outputs: list[Any]) -> torch.Tensor:
    """Between the logarithms of probabilities that two models give to the tokens that vLLM took."""
    views = (
        [our_view(own, ids, output)[0] for own in (one, other)] for ids, output in zip(asked, outputs, strict=True)
    )
    return torch.cat([(a - b).abs() for a, b in views])


def largest_loss(own: Any, asked: list[list[int]], outputs: list[Any]) -> float:
    """How far the logarithm of the probability of a token that vLLM took is below that of our model's own choice."""
    views = (our_view(own, ids, output) for ids, output in zip(asked, outputs, strict=True))
    return max((best - taken).max().item() for taken, best in views)


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@contextmanager
def drafted_by(texts: list[list[int]]) -> Iterator[None]:
    """In an engine with NGRAM, drafts are the tokens that follow in one of these texts: none to all, the last ones often wrong.
    Matches in a text of random weights would hardly ever be right. In some steps no sequence has drafts."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    drawn = random.Random(0)

    def draft(read: list[int], most: int) -> list[int]:
        text = next((text for text in texts if text[: len(read)] == read), [])  # of several, one that may be wrong
        tokens = list(text[len(read) :][: drawn.randint(0, most)])
        right = drawn.randint(0, len(tokens))
        return tokens[:right] + [(token + 1) % VOCABULARY for token in tokens[right:]]

    def propose(self: Any, most: int, sampled: Any, lengths: Any, tokens: Any, *rest: Any, **named: Any) -> Any:
        most = 0 if drawn.random() < 0.3 else most
        return [draft(tokens[n, : lengths[n]].tolist(), most) if new else [] for n, new in enumerate(sampled)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NgramProposer, "propose", propose)
        yield


class Seen(NamedTuple):
    """Of a step: the tokens of its sequences, which read their prompts, how many sequences vLLM calls prefills, and whether some
    read a few tokens of their answers again."""

    counts: list[int]
    reads_prompt: list[bool]
    prefills: int
    reads_again: bool


@contextmanager
def observed_steps() -> Iterator[list[Seen]]:
    from fastweights.serving.vllm.memory import StepBuilder

    seen: list[Seen] = []
    compute = StepBuilder._compute_common_metadata

    def observe(self: Any, common_attn_metadata: Any, **told: Any) -> Any:
        step = compute(self, common_attn_metadata, **told)
        counts = common_attn_metadata.query_start_loc_cpu.diff()
        reads = common_attn_metadata.is_prefilling & (counts > 0)
        kept = step.kept is not None and not step.kept.uniform
        seen.append(Seen(counts[counts > 0].tolist(), reads.tolist(), step.num_prefills, kept))
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepBuilder, "_compute_common_metadata", observe)
        yield seen
