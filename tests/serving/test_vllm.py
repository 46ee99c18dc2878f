"""vLLM writes the tokens that our own generate() writes, whatever it does with the requests. Each start of vLLM takes some five
seconds, so `make test` has few of these tests, and `make test-vllm` all."""

from __future__ import annotations

import importlib
import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from fastweights.layers import MIXERS, DeltaNet, Lattice, SoftmaxAttention, register_mixer, registry
from fastweights.serving.vllm.pool import PooledMixer
from fastweights.serving.vllm.versions import has_room_for_drafts

from ..models.hybrid.small import hybrid
from .engine import (
    CLOSE,
    CLOSE_OF,
    HYBRIDS,
    NGRAM,
    QUICK,
    WINDOW,
    counted_preemptions,
    engine,
    failing_pool,
    generated,
    in_pieces,
    largest_error,
    largest_loss,
    model,
    needs_copies,
    needs_two,
    of_mixer,
    prompts,
    small_pool,
    verifies_drafts,
    vllm,
    written,
)


def check_same(
    own: Any, llm: Any, asked: list[list[int]], close: float = CLOSE, *ways: AbstractContextManager[None]
) -> None:
    """As vLLM runs by itself, and in each of these ways."""
    wanted = generated(own, asked)
    for way in (nullcontext(), *ways):
        with way:
            outputs = written(llm, asked)
        assert [list(output.token_ids) for output in outputs] == wanted
        assert largest_error(own, asked, outputs) < close


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)
def test_every_mixer(name, tmp_path):
    own = model(of_mixer(name))
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm, counted_preemptions(llm) as given_way:
        check_same(own, llm, prompts(), CLOSE_OF.get(name, CLOSE), in_pieces(llm, 10), failing_pool(llm))
    assert len(set(given_way)) > 1


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, tmp_path):
    own = model(HYBRIDS[name])
    own.save_pretrained(tmp_path)
    with engine(tmp_path, max_model_len=512) as llm, counted_preemptions(llm) as given_way:
        check_same(own, llm, prompts(), CLOSE, in_pieces(llm, 10))
        assert not given_way
        block = llm.llm_engine.vllm_config.cache_config.block_size
        with small_pool(llm, 2 * len(HYBRIDS[name])):  # two sequences fit until they need more blocks in softmax layers
            check_same(own, llm, prompts([block - short for short in (3, 2, 1, 8, 4)]))
    assert len(set(given_way)) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"tie_word_embeddings": True}, {"intermediate_size": 0}], ids=["tied embeddings", "no MLP"]
)
def test_forms_of_the_model(options, tmp_path):
    own = model("pgdn", **options)
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        check_same(own, llm, prompts())


def test_fewer_query_heads_and_no_convolution(tmp_path):
    own = model([{"name": "gdn", "num_v_heads": 4}, {"name": "lattice"}, {"name": "kda", "conv_size": None}])
    own.save_pretrained(tmp_path)
    with engine(tmp_path, max_num_batched_tokens=10) as llm:  # prompts are read in pieces of at most ten tokens
        check_same(own, llm, prompts())


@pytest.mark.slow
def test_prompts_read_at_once(tmp_path):
    own = model("lattice")
    own.save_pretrained(tmp_path)
    with engine(tmp_path, enable_chunked_prefill=False, max_num_batched_tokens=256) as llm:
        check_same(own, llm, prompts())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM's second model runner needs a GPU")
def test_the_second_model_runner(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    own = model(["gdn", "lattice"])
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        check_same(own, llm, prompts(), CLOSE, in_pieces(llm, 10))


def test_sequences_give_way_and_come_back(tmp_path):
    """A pool too small for all: vLLM takes the blocks of running sequences, which later begin once more."""
    own = model(["gdn", "softmax"])
    own.save_pretrained(tmp_path)
    few = {"max_model_len": 512, "block_size": 128, "num_gpu_blocks_override": 9}
    with engine(tmp_path, **few) as llm, counted_preemptions(llm) as given_way:
        block = llm.llm_engine.vllm_config.cache_config.block_size
        # Four fill the pool until they need a second block.
        asked = prompts([block - short for short in (3, 2, 1, 8, 4)])
        outputs = written(llm, asked, 16)
    assert given_way
    assert [list(output.token_ids) for output in outputs] == generated(own, asked, 16)


@pytest.mark.parametrize(
    "mixer", ["gdn", pytest.param(["gdn", WINDOW], marks=pytest.mark.slow)], ids=["memory", "hybrid"]
)
def test_running_memories_ask_for_no_blocks(mixer, tmp_path, monkeypatch):
    own = model(mixer)
    own.save_pretrained(tmp_path)
    asked = prompts()
    with engine(tmp_path, max_num_batched_tokens=10) as llm:  # prompts are read in pieces
        coordinator = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.coordinator
        allocate, calls = coordinator.allocate_new_blocks, []

        def counted(request: str, *given: Any, **named: Any) -> Any:
            calls.append(request)
            return allocate(request, *given, **named)

        monkeypatch.setattr(coordinator, "allocate_new_blocks", counted)
        check_same(own, llm, asked)
    assert (len(calls) == len(asked)) == (mixer == "gdn")


@pytest.mark.parametrize(
    ("mixer", "settings"),
    [
        ("gdn", {}),
        pytest.param("lattice", {}, marks=pytest.mark.slow),
        pytest.param("gdn", {"enforce_eager": False}, marks=pytest.mark.slow, id="compiled"),
        pytest.param("gdn", {"speculative_config": NGRAM}, marks=verifies_drafts, id="drafts"),
    ],
)
def test_prompts_with_padding_behind_them(mixer, settings, tmp_path):
    """As the CUDA graphs of prompts read them, alone and beside sequences that go on; on a CPU the model is called. Where those
    have drafts, only steps of prompts alone are read so."""
    from fastweights.serving.vllm.prompts import PromptGraphs

    own = model(mixer)
    own.save_pretrained(tmp_path)
    asked = prompts((64, 200, 3, 70))
    with engine(tmp_path, max_num_batched_tokens=128, **settings) as llm:
        served = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()
        names = [block.served.name for block in served.model.layers]
        if served.prompts is None:
            served.prompts = PromptGraphs(served.model, names, "speculative_config" in settings, replayed=False)
        for _ in range(2):
            outputs = [written(llm, [ids])[0] for ids in asked]
            assert [list(output.token_ids) for output in outputs] == generated(own, asked)
        assert served.prompts.readings.keys() == {(0, 1, 64), (0, 1, 128)}
        for _ in range(2):
            assert [list(output.token_ids) for output in written(llm, asked)] == generated(own, asked)
        sizes = list(served.prompts.readings)
        assert {one.decodes for one in sizes} == ({0} if "speculative_config" in settings else {0, 16})
        assert {one.prefills for one in sizes} == {1, 7}
        assert all(served.prompts.readings.values())


def test_blocks_are_used_again(tmp_path):
    """More requests than the pool has room for, one after another: nothing of an earlier sequence is left in a block."""
    own = model("lattice")
    own.save_pretrained(tmp_path)
    with engine(tmp_path, num_gpu_blocks_override=4) as llm:
        check_same(own, llm, prompts([5 + 7 * n % 30 for n in range(12)]))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "close"), [("bfloat16", 0.1), ("float16", 0.02)])
def test_weights_in_16_bits(dtype, close, tmp_path):
    """Tokens are those of our own model in this dtype except where two of them are nearly as likely."""
    own = model(["gdn", WINDOW, "palimpsa-d", "lattice"]).to(getattr(torch, dtype))
    own.save_pretrained(tmp_path)
    if dtype == "bfloat16" and torch.cuda.is_available():
        close = 0.2  # vLLM on the GPU beside our model on the CPU
    with engine(tmp_path, dtype=dtype) as llm:
        asked = prompts()
        outputs = written(llm, asked)
    assert largest_error(own, asked, outputs) < close
    assert largest_loss(own, asked, outputs) < close


@pytest.mark.slow
@needs_two
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_heads_divided_between_two_processes(eager, tmp_path):
    shared = [{"name": "softmax", "num_kv_heads": 1}, {"name": "mamba2", "num_groups": 1}]
    mixers = ["gdn", WINDOW, "lattice", {"name": "pgdn", "num_v_heads": 4}, "retnet", "vla", *shared]
    own = model(mixers, tie_word_embeddings=eager)
    own.save_pretrained(tmp_path)
    with engine(tmp_path, tensor_parallel_size=2, enforce_eager=eager) as llm:
        check_same(own, llm, prompts())


def test_a_mixer_whose_heads_cannot_be_divided_is_refused(tmp_path):
    model({"name": "mamba2", "norm_groups": 3, "head_dim": 24}).save_pretrained(tmp_path)
    with (
        pytest.raises(Exception, match="norm_groups must be a multiple or a divisor of the number of tensor-parallel"),
        engine(tmp_path, tensor_parallel_size=2),
    ):
        pass


@pytest.mark.slow
def test_compiled(tmp_path):
    own = model(["pgdn", "softmax"])
    own.save_pretrained(tmp_path)
    with engine(tmp_path, enforce_eager=False) as llm:
        check_same(own, llm, prompts())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "drafts by a class of the user's": (
        {"speculative_config": {"method": "custom_class", "model": "own.Drafts", "num_speculative_tokens": 2}},
        "speculative_config must have one of the methods ngram, suffix, draft_model",
    ),
    "n-gram drafts on a GPU": (
        {"speculative_config": {**NGRAM, "method": "ngram_gpu"}},
        "speculative_config must have one of the methods ngram, suffix, draft_model",
    ),
    "asynchronous scheduling with drafts": (
        {"speculative_config": NGRAM, "async_scheduling": True},
        "async_scheduling must be None or False with speculative_config",
    ),
    "drafts and prefix caching": (
        {"speculative_config": NGRAM, "enable_prefix_caching": True},
        "enable_prefix_caching must be False (on a CPU )?with speculative_config",
    ),
    "drafts in parallel": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "parallel_drafting": True}},
        "parallel_drafting must be False",
    ),
    "another scheduler with drafts": (
        {"speculative_config": NGRAM, "scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
        "scheduler_cls must be None with speculative_config",
    ),
    "states of little range": ({"mamba_ssm_cache_dtype": "float16"}, "mamba_ssm_cache_dtype must be"),
    "divided adapters": (
        {"enable_lora": True, "fully_sharded_loras": True, "tensor_parallel_size": 2},
        "fully_sharded_loras must be False",
    ),
    "a pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
    "parts of a prompt": ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size must be 1"),
    "parts of a cache": (
        {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
        "decode_context_parallel_size must be 1",
    ),
    "another quantisation": (
        {"quantization": "experts_int8", "dtype": "bfloat16"},
        "quantization must be None or one of fp8, fp8_per_tensor",
    ),
    "divided quantised weights": (
        {"quantization": "fp8", "dtype": "bfloat16", "tensor_parallel_size": 2},
        "tensor_parallel_size must be 1 with quantization",
    ),
    "transfer of caches": (
        {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
        "kv_transfer_config must be None",
    ),
    "caches in main memory": ({"kv_offloading_size": 0.05}, "kv_offloading_size must be None"),
    "replayed states": (
        {"use_replayssm": True},
        "use_replayssm must be False|unexpected keyword",
    ),  # vLLM has it since 0.27
    "keys in 8 bits": ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be 'auto'"),
    "windows in another dtype": ({"mamba_cache_dtype": "float16"}, "mamba_cache_dtype must be 'auto'"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_at_the_start(what, tmp_path):
    if torch.cuda.is_available():
        if what == "drafts and prefix caching" and has_room_for_drafts():
            pytest.skip("supported on a GPU")
        if what in ("a pipeline", "parts of a prompt", "parts of a cache") and torch.cuda.device_count() < 2:
            pytest.skip("vLLM itself asks for two GPUs first")
    model("gdn").save_pretrained(tmp_path)
    settings, message = REFUSED[what]
    with pytest.raises(Exception, match=message), engine(tmp_path, **settings):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU sleeps, and then has no pool to fill")
def test_the_pool_is_given_back_in_sleep(tmp_path, monkeypatch):
    """On a GPU sleep gives back all that vLLM allocates while it makes the pool. Here nothing sleeps, and the pool is filled with
    NaN in its place: nothing else that was made with it may be needed."""
    from vllm.platforms import current_platform

    held = []
    rehearse = PooledMixer.rehearse
    monkeypatch.setattr(PooledMixer, "rehearse", lambda pooled, *given: (rehearse(pooled, *given), held.append(pooled)))
    monkeypatch.setattr(type(current_platform), "is_sleep_mode_available", lambda platform: True)
    own = model(["gdn", "lattice", "softmax"])  # Lattice has first states
    own.save_pretrained(tmp_path)
    with engine(tmp_path, enable_sleep_mode=True) as llm:
        tensors = {id(x) for pooled in held for x in vars(pooled).values() if isinstance(x, torch.Tensor)}
        assert tensors == {id(pooled.blocks) for pooled in held}
        check_same(own, llm, prompts())
        llm.sleep()
        for pooled in held:
            pooled.blocks.view(torch.uint8).fill_(255)
        llm.wake_up()
        check_same(own, llm, prompts())


class Louder(SoftmaxAttention):
    def forward(self, x_BTD: Any, cache: Any = None, cu_seqlens: Any = None) -> Any:
        return 2 * super().forward(x_BTD, cache, cu_seqlens)


class Growing(DeltaNet):
    def state_size(self, length: int = 1) -> int:
        return length


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Louder, "got own of the class Louder"), (Growing, "Growing has no state_spec, as its memory grows")],
)
def test_a_mixer_of_the_users_that_vllm_cannot_run_is_refused(layer, message, tmp_path, monkeypatch):
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    register_mixer("own", layer=layer, summary="a test", equation="none", source="a test", state="none")
    model(["gdn", "own"]).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=message), engine(tmp_path):
        pass


def test_a_hybrid_of_a_model_of_transformers_is_refused(tmp_path):
    hybrid().save_pretrained(tmp_path)
    refused = pytest.raises(Exception, match="must be of type 'fastweights', got 'fastweights_llama'")
    with refused, engine(tmp_path, max_model_len=64):
        pass


def test_values_of_another_layer_are_refused(tmp_path):
    model(["rwkv7", {"name": "rwkv7", "value_residual": True}]).save_pretrained(tmp_path)
    with (
        pytest.raises(Exception, match="nothing but hidden states, got rwkv7 with the values of the first layer"),
        engine(tmp_path),
    ):
        pass


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's attention on a GPU has them")
def test_heads_that_vllms_attention_does_not_have_are_refused_at_the_start(tmp_path):
    model(["gdn", "softmax"], hidden_size=72, num_heads=3).save_pretrained(tmp_path)
    with pytest.raises(Exception, match="head_dim of softmax layers must be one of 32, .* got 24"), engine(tmp_path):
        pass


@pytest.mark.slow
def test_reloaded_weights(tmp_path):
    """Also the first states, where these are learned."""
    first, second = (model({"name": "ttt", "learned_state": True}) for _ in range(2))
    with torch.no_grad():
        for x in second.parameters():
            x.add_(0.1 * torch.randn_like(x))
    first.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        check_same(first, llm, prompts())
        second.save_pretrained(tmp_path)
        llm.collective_rpc("reload_weights")
        check_same(second, llm, prompts())


def test_kernels_run_before_the_first_request(tmp_path, monkeypatch):
    rehearsed = []
    monkeypatch.setattr(PooledMixer, "rehearse", lambda pooled, drafted: rehearsed.append(pooled.mixer))
    model(["gdn", "softmax", "lattice"]).save_pretrained(tmp_path)
    with engine(tmp_path):
        assert [type(mixer) for mixer in rehearsed] == [DeltaNet, Lattice]


def test_states_in_16_bits(tmp_path):
    """The memory takes half, and the outputs are those of the stated precision, also of sequences that give way."""
    own = model(["gdn", "softmax", "lattice"])
    own.save_pretrained(tmp_path)
    asked = prompts()
    with engine(tmp_path, mamba_ssm_cache_dtype="bfloat16") as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        (memory,) = (layer for name, layer in layers.items() if name == "model.layers.0.memory")
        assert {pool.dtype for pool in memory.pooled.pools.memory.values()} == {torch.bfloat16}
        assert memory.block.memory == 2 * 32 * 32 * 2
        assert CLOSE < largest_error(own, asked, written(llm, asked)) < 0.1
        with failing_pool(llm), counted_preemptions(llm) as given_way:
            assert largest_error(own, asked, written(llm, asked)) < 0.1
    assert len(set(given_way)) > 1


@needs_copies
@pytest.mark.parametrize(
    "mixer",
    ["lattice", pytest.param(["gdn", WINDOW, "vla", "softmax"], marks=pytest.mark.slow)],
    ids=["one memory", "hybrid"],
)
def test_prefix_caching(mixer, tmp_path):
    """States are kept where blocks end: a prompt that begins like an earlier one is read from there on."""
    own = model(mixer)
    own.save_pretrained(tmp_path)
    first, other = prompts((200, 150))
    asked = [first, first[:150] + other[:30], first, first[:64] + other, other[:10] + first[:100]]
    # No block of vLLM's is longer than what a step reads, of which 64 is the longest here.
    with engine(tmp_path, enable_prefix_caching=True, block_size=32, max_num_batched_tokens=64) as llm:
        check_same(own, llm, asked)
        check_same(own, llm, asked[::-1])  # what the first round has left
        with failing_pool(llm), counted_preemptions(llm) as given_way:
            check_same(own, llm, asked)
        settings = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        found = [
            llm.generate({"prompt_token_ids": ids}, settings, use_tqdm=False)[0].num_cached_tokens for ids in asked
        ]
    block = llm.llm_engine.vllm_config.cache_config.block_size
    assert given_way and found == [(len(ids) - 1) // block * block for ids in asked]


@needs_copies
def test_prefix_caching_with_sequences_that_give_way(tmp_path):
    own = model(["gdn", "softmax"])
    own.save_pretrained(tmp_path)
    first, other = prompts((100, 90))
    asked = [first[:cut] + other[: 50 - cut] for cut in (50, 40, 34, 0, 45, 36)]
    settings = vllm.SamplingParams(temperature=0, max_tokens=90, ignore_eos=True, detokenize=False)
    few = {"enable_prefix_caching": True, "block_size": 32, "num_gpu_blocks_override": 14}
    with engine(tmp_path, **few) as llm, counted_preemptions(llm) as given_way:
        results = llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False)
    assert given_way and sum(result.num_cached_tokens for result in results) >= 64
    assert [list(result.outputs[0].token_ids) for result in results] == generated(own, asked, 90)


def test_another_version_of_vllm_leaves_other_models_alone(monkeypatch):
    from fastweights.serving import vllm as served

    monkeypatch.setattr(served, "TESTED", "0.22 to 0.23")
    with pytest.raises(
        ValueError, match=r"vLLM must be of version 0.22 to 0.23, got 0.*; install vLLM 0.24 to 0.33 with"
    ):
        served.check_version()
    monkeypatch.delitem(sys.modules, "fastweights.serving.vllm.model", raising=False)
    with pytest.raises(ValueError, match="vLLM must be of version 0.22 to 0.23"):
        importlib.import_module("fastweights.serving.vllm.model")  # as our model is served, in a process of its own
    served.register()  # as other models are served
    assert "FastWeightsForCausalLM" in vllm.ModelRegistry.get_supported_archs()
