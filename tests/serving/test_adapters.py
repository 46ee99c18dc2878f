"""Adapters that PEFT makes for our models, in vLLM: several in one batch, the tokens of PEFT's own model for each."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.layers import MIXERS

from .engine import (
    CLOSE,
    CLOSE_OF,
    NGRAM,
    QUICK,
    WINDOW,
    counted_preemptions,
    drafted_by,
    engine,
    failing_pool,
    generated,
    in_pieces,
    largest_error,
    model,
    needs_copies,
    needs_two,
    of_mixer,
    prompts,
    written,
)

peft = pytest.importorskip("peft")
LoRARequest: Any = pytest.importorskip("vllm.lora.request").LoRARequest
SETTINGS: dict[str, Any] = {"enable_lora": True, "max_loras": 3, "max_lora_rank": 8}
ADAPTERS: dict[str, dict[str, Any]] = {
    "all": {"target_modules": "all-linear", "r": 4},
    "usual": {"r": 2, "lora_alpha": 6, "use_rslora": True},  # our default targets
    "some": {"target_modules": ["o_proj", "out_proj", "down_proj"], "r": 3},
}


def adapted(mixer: Any, folder: Path, **options: Any) -> list[Any]:
    """The model, saved in the folder, and by itself and with each of the adapters, saved beside it."""
    own = model(mixer, **options)
    own.save_pretrained(folder / "model")
    found = [own]
    for name, settings in ADAPTERS.items():
        torch.manual_seed(len(found))
        lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **settings)
        one = peft.get_peft_model(model(mixer, **options), lora).eval()
        one.save_pretrained(folder / name)
        found.append(one)
    return found


def check_each(
    folder: Path, models: list[Any], llm: Any, *ways: AbstractContextManager[None], close: float = CLOSE
) -> None:
    """Every prompt by the model and with each adapter, all in one batch, in each of these ways."""
    requests = [None, *(LoRARequest(name, n + 1, str(folder / name)) for n, name in enumerate(ADAPTERS))]
    texts = prompts((3, 17, 64))
    wanted = [generated(own, texts) for own in models]
    assert len({str(tokens) for tokens in wanted}) == len(models)
    asked = [(ids, request) for ids in texts for request in requests]
    for way in ways or (nullcontext(),):
        with way:
            outputs = written(llm, [ids for ids, _ in asked], lora_request=[request for _, request in asked])
        for which, own in enumerate(models):
            answers = outputs[which :: len(models)]
            assert [list(output.token_ids) for output in answers] == wanted[which]
            assert largest_error(own, texts, answers) < close


@pytest.mark.parametrize(
    "name", [name if name in QUICK[:1] else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)
def test_every_mixer(name, tmp_path):
    models = adapted(of_mixer(name), tmp_path)
    with engine(tmp_path / "model", **SETTINGS) as llm, counted_preemptions(llm) as given_way:
        check_each(tmp_path, models, llm, in_pieces(llm, 10), failing_pool(llm), close=CLOSE_OF.get(name, CLOSE))
    assert given_way


MIXED = ["gdn", WINDOW, "lattice", {"name": "kda", "num_v_heads": 4}, {"name": "mamba2", "num_groups": 1}]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"speculative_config": NGRAM}, id="drafts"),
        pytest.param({"enforce_eager": False}, id="compiled"),
        pytest.param({"tensor_parallel_size": 2}, id="two processes", marks=needs_two),
        pytest.param(  # no block of vLLM's is longer than what a step reads
            {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 64},
            id="prefix caching",
            marks=needs_copies,
        ),
        pytest.param({"max_loras": 1}, id="one adapter at a time"),
    ],
)
def test_forms_of_the_engine(settings, tmp_path):
    """With few places for adapters vLLM takes some out while requests wait."""
    models = adapted(MIXED, tmp_path)
    texts = prompts((3, 17, 64))
    drafts = [ids + tokens for own in models for ids, tokens in zip(texts, generated(own, texts), strict=True)]
    drafting = drafted_by(drafts) if "speculative_config" in settings else nullcontext()
    with engine(tmp_path / "model", **{**SETTINGS, **settings}) as llm, drafting:
        check_each(tmp_path, models, llm)
        check_each(tmp_path, models, llm)  # with prefix caching, from what the first round has left


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"r": 16}, "LoRA rank 16 is greater than max_lora_rank 8"),
        ({"modules_to_save": ["norm"]}, "modules_to_save"),
        ({"use_dora": True}, "does not yet support DoRA"),
        ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"),  # on a CPU
        ({"target_parameters": ["mixer.qkv.q_conv.weight"]}, "q_conv"),
    ],
    ids=str,
)
def test_adapters_that_vllm_does_not_have_are_refused(settings, message, one_engine, tmp_path):
    lora = peft.LoraConfig(**{"target_modules": ["q_proj"], "r": 2, **settings})
    peft.get_peft_model(model("gdn"), lora).save_pretrained(tmp_path)
    with pytest.raises(Exception, match=message):
        one_engine.llm_engine.add_lora(LoRARequest("refused", 1, str(tmp_path)))


@pytest.fixture(scope="module")
def one_engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    model("gdn").save_pretrained(folder)
    with engine(folder, **SETTINGS) as llm:
        yield llm
