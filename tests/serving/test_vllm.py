"""vLLM writes the tokens that our own generate() writes, whatever it does with the requests. One process for all: each start of
vLLM takes seconds."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastweights.layers import MIXERS

from .engine import engine, generated, largest_error, model, prompts, vllm, written

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


def check_same(own: Any, llm: Any, asked: list[list[int]], close: float = CLOSE) -> None:
    outputs = written(llm, asked)
    assert [list(output.token_ids) for output in outputs] == generated(own, asked)
    assert largest_error(own, asked, outputs) < close


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)
def test_every_mixer(name, tmp_path):
    own = model(name)
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        check_same(own, llm, prompts(), CLOSE_OF.get(name, CLOSE))


@pytest.mark.slow
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids(name, tmp_path):
    own = model(HYBRIDS[name])
    own.save_pretrained(tmp_path)
    with engine(tmp_path) as llm:
        check_same(own, llm, prompts())


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


def test_sequences_give_way_and_come_back(tmp_path, monkeypatch):
    """A pool too small for all: vLLM takes the blocks of running sequences, which later begin once more."""
    from vllm.v1.core.sched.scheduler import Scheduler

    given_way = []
    preempt = Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler,
        "_preempt_request",
        lambda self, *rest, **named: (given_way.append(1), preempt(self, *rest, **named))[1],
    )
    own = model(["gdn", "softmax"])
    own.save_pretrained(tmp_path)
    with engine(tmp_path, num_gpu_blocks_override=9, max_num_seqs=4) as llm:
        asked = prompts((125, 126, 127, 120, 124))
        outputs = written(llm, asked, 16)
    assert given_way
    assert [list(output.token_ids) for output in outputs] == generated(own, asked, 16)


def test_blocks_are_used_again(tmp_path):
    """More requests than the pool has room for, one after another: nothing of an earlier sequence is left in a block."""
    own = model("lattice")
    own.save_pretrained(tmp_path)
    with engine(tmp_path, num_gpu_blocks_override=4) as llm:
        check_same(own, llm, prompts([5 + 7 * n % 30 for n in range(12)]))


def test_bfloat16(tmp_path):
    """Tokens are those of our own model in bfloat16 except where two of them are nearly as likely."""
    own = model(["gdn", WINDOW, "palimpsa-d"]).to(torch.bfloat16)
    own.save_pretrained(tmp_path)
    with engine(tmp_path, dtype="bfloat16") as llm:
        asked = prompts()
        assert largest_error(own, asked, written(llm, asked)) < 0.3


@pytest.mark.slow
def test_compiled(tmp_path):
    own = model(["pgdn", "softmax"])
    own.save_pretrained(tmp_path)
    with engine(tmp_path, enforce_eager=False) as llm:
        check_same(own, llm, prompts())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "speculation": (
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}},
        "speculative_config must be None",
    ),
    "states in half precision": ({"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype must be"),
    "states at block boundaries": ({"mamba_cache_mode": "align"}, "mamba_cache_mode must be 'none'"),
    "adapters": ({"enable_lora": True}, "lora_config must be None"),
    "two processes": ({"tensor_parallel_size": 2}, "tensor_parallel_size must be 1"),
    "a pipeline": ({"pipeline_parallel_size": 2}, "pipeline_parallel_size must be 1"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_supported_is_refused_at_the_start(what, tmp_path):
    model("gdn").save_pretrained(tmp_path)
    settings, message = REFUSED[what]
    with pytest.raises(Exception, match=message), engine(tmp_path, **settings):
        pass


def test_prefix_caching_is_turned_off(tmp_path):
    """It is vLLM's default, and would give other tokens."""
    own = model("gdn")
    own.save_pretrained(tmp_path)
    with engine(tmp_path, enable_prefix_caching=True) as llm:
        asked = prompts((200,))
        check_same(own, llm, [asked[0], asked[0][:150] + asked[0][:30], asked[0]])
        assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching


def test_another_version_of_vllm_leaves_other_models_alone(monkeypatch):
    from fastweights.serving.vllm import register, version

    monkeypatch.setattr(version, "TESTED", "0.31")
    with pytest.raises(ValueError, match=r"vLLM must be of version 0.31, got 0.32.*; install vLLM 0.32: pip install"):
        version.check_version()
    register()  # as other models are served
    assert "FastWeightsForCausalLM" in vllm.ModelRegistry.get_supported_archs()
