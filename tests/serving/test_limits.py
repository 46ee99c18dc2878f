"""What is refused and set before a model is loaded, as far as a CPU's own settings would hide it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from . import engine  # which skips all where vLLM is missing


def verify(drafts: str | None, asynchronous: bool | None = None, second_runner: bool = False) -> Any:
    """The scheduler's settings, with drafts by this method. asynchronous: what the user asks of them."""
    from fastweights.serving.vllm.limits import Limits

    parallel = "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size"
    scheduler = SimpleNamespace(scheduler_cls=None, async_scheduling=asynchronous)
    config: Any = SimpleNamespace(
        cache_config=SimpleNamespace(
            enable_prefix_caching=False, kv_offloading_size=None, cache_dtype="auto", mamba_cache_dtype="auto",
            mamba_ssm_cache_dtype="auto",
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, **dict.fromkeys(parallel, 1)),
        model_config=SimpleNamespace(hf_config=engine.model("gdn").config, quantization=None),
        speculative_config=drafts and SimpleNamespace(method=drafts, parallel_drafting=False),
        lora_config=None,
        kv_transfer_config=None,
        scheduler_config=scheduler,
        use_v2_model_runner=second_runner,
    )  # fmt: skip
    Limits.verify_and_update_config(config)
    return scheduler


@pytest.mark.parametrize("asked", [None, False])
@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_drafts_are_scheduled_in_turn(method, asked):
    """On a GPU vLLM would choose otherwise for drafts of a model."""
    assert verify(method, asked).async_scheduling is False


@pytest.mark.parametrize("asked", [None, False, True])
def test_without_drafts_vllm_chooses(asked):
    assert verify(None, asked, second_runner=True).async_scheduling is asked


def test_drafts_beside_asynchronous_scheduling_are_refused():
    with pytest.raises(ValueError, match="async_scheduling must be None or False with speculative_config"):
        verify("draft_model", True)


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_drafts_in_the_second_model_runner_are_refused(method):
    with pytest.raises(ValueError, match="VLLM_USE_V2_MODEL_RUNNER must be 0 in the environment with speculative"):
        verify(method, second_runner=True)
