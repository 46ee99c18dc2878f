"""Models that vLLM has by itself, tiny and random, with our kernels under their layers: the same tokens as in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fastweights.serving import vllm as served
from fastweights.serving.vllm import delta_layers

from ..integrations.tiny_models import tiny
from .engine import (
    CLOSE,
    NGRAM,
    VOCABULARY,
    counted_preemptions,
    engine,
    failing_pool,
    in_pieces,
    largest_error,
    largest_loss,
    needs_copies,
    needs_two,
    prompts,
    vllm,
    written,
)

OLDEST = vllm.__version__.startswith("0.24.")
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "head_dim": 32, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "moe_intermediate_size": 64,
}  # fmt: skip
KIMI: dict[str, Any] = {"linear_head_dim": 32, "mlp_layer_types": ["sparse"] * 3}
# vLLM's other layers of Kimi-Linear do not run on a CPU.
KIMI |= {"layer_types": ["linear_attention"] * 3}
WIDE = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}  # which vLLM's own op for CPUs has
ASKED = prompts((3, 17, 64, 100))


def saved(family: str, folder: Path, **changes: Any) -> nn.Module:
    """A model of transformers, and a folder in the form that vLLM reads."""
    own = tiny(family, **{**SIZES, **(KIMI if family == "kimi_linear" else {}), **changes})
    own.save_pretrained(folder)
    own.config.use_cache = False
    if family == "kimi_linear":
        change_config(own.config, folder / "config.json")
    if family == "olmo_hybrid":  # transformers would join and divide the filters by the wrong sizes
        save_file(olmo_weights(own), folder / "model.safetensors", {"format": "pt"})
    return own


def change_config(config: Any, file: Path) -> None:
    """As the released model has it."""
    kinds = enumerate(config.layer_types, 1)
    memory = {
        "kda_layers": [layer for layer, kind in kinds if kind == "linear_attention"],
        "full_attn_layers": [],
        "head_dim": config.linear_head_dim,
        "num_heads": config.linear_num_heads,
        "short_conv_kernel_size": config.linear_conv_kernel_dim,
    }
    more = {"linear_attn_config": memory, "num_experts_per_token": config.num_experts_per_tok, "mla_use_nope": True}
    file.write_text(json.dumps({**json.loads(file.read_text()), **more}))


def olmo_weights(own: Any) -> dict[str, torch.Tensor]:
    config, weights = own.config, own.state_dict()
    key = config.linear_num_key_heads * config.linear_key_head_dim
    for name in [name for name in weights if name.endswith("conv1d.weight")]:
        parts = weights.pop(name).split([key, key, config.linear_num_value_heads * config.linear_value_head_dim])
        weights |= {
            name.replace("conv1d", f"{part}_conv1d"): x.contiguous() for part, x in zip("qkv", parts, strict=True)
        }
    return weights


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, ...]]]:
    """With our kernels, as vLLM's plug-ins are loaded: the shapes of tokens that they read."""
    from vllm.model_executor.custom_op import op_registry_oot

    shapes: list[tuple[int, ...]] = []
    read = delta_layers.read_tokens

    def counting(x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        shapes.append(tuple(x.shape))
        return read(x, *rest, **named)

    monkeypatch.setattr(delta_layers, "read_tokens", counting)
    monkeypatch.setenv(served.OUR_KERNELS, "1")
    monkeypatch.setenv("VLLM_KIMI_K3_GEMM_AR", "0")  # a kernel for GPUs, which Kimi-Linear looks for when it is built
    before = dict(op_registry_oot)
    served.register()
    served.register()  # vLLM may load plug-ins more than once
    yield shapes
    op_registry_oot.clear()
    op_registry_oot.update(before)


@pytest.fixture
def loads_filters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Since 0.28 vLLM's loader of OLMo's filters is not told which of the three it has, but for an attribute."""
    module = import_module("vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn")
    make = module._make_fused_conv1d_weight_loader

    def made(*given: Any) -> Any:
        load = make(*given)
        return lambda param, weight, part=None: load(param, weight, getattr(weight, "shard_id", part))

    monkeypatch.setattr(module, "_make_fused_conv1d_weight_loader", made)


@torch.no_grad()
def continued(own: Any, asked: list[list[int]], tokens: int = 12) -> list[list[int]]:
    """Greedy continuations by transformers, which reads the whole text for each token."""
    texts = [list(ids) for ids in asked]
    for text in texts:
        for _ in range(tokens):
            text.append(int(own(torch.tensor([text])).logits[0, -1].argmax()))
    return [text[-tokens:] for text in texts]


def check_same(own: Any, llm: Any, asked: list[list[int]], wanted: list[list[int]]) -> None:
    outputs = written(llm, asked)
    assert [list(output.token_ids) for output in outputs] == wanted
    # On a GPU vLLM's own layers of Qwen3-Next round more: the error is 6.3e-4 in every form of the engine.
    rounded = torch.cuda.is_available() and own.config.model_type == "qwen3_next"
    assert largest_error(own, asked, outputs) < (1e-3 if rounded else CLOSE)


FAMILIES = ("qwen3_next", "qwen3_5", "olmo_hybrid", "kimi_linear")


@pytest.mark.parametrize(
    "family", [name if name == "qwen3_next" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_same_tokens(family, tmp_path, counted, loads_filters):
    """In float32, in which vLLM's own op for CPUs does not run. Batches of prompts, in pieces, single tokens, and sequences that
    give way and begin once more."""
    if family == "qwen3_5" and (OLDEST or find_spec("torchvision") is None):
        pytest.skip("vLLM has Qwen3.5 without pictures since 0.28, and needs torchvision for it")
    own = saved(family, tmp_path)
    wanted = continued(own, ASKED)
    with engine(tmp_path) as llm, counted_preemptions(llm) as given_way:
        check_same(own, llm, ASKED, wanted)
        # On a CPU vLLM takes it from Kimi-Linear, whose other layers, which are not here, cannot read prompts in pieces.
        llm.llm_engine.engine_core.engine_core.scheduler.scheduler_config.enable_chunked_prefill = True
        with in_pieces(llm, 10):
            check_same(own, llm, ASKED, wanted)
        with failing_pool(llm):
            check_same(own, llm, ASKED, wanted)
    assert given_way
    assert any(batch > 1 and time == 1 for batch, time, _ in counted)
    assert any(batch == 1 and time > 10 for batch, time, _ in counted)


@pytest.mark.slow
@needs_copies
def test_prefix_caching(tmp_path, counted):
    """States are kept where blocks end: a prompt that begins like an earlier one is read from there on."""
    own = saved("qwen3_next", tmp_path)
    first, other = prompts((200, 100))
    asked = [first, first[:150] + other[:30], first[:64] + other, other[:10] + first[:100]]
    wanted = continued(own, asked)
    # No block of vLLM's is longer than what a step reads, of which 64 is the longest here.
    with engine(tmp_path, enable_prefix_caching=True, block_size=32, max_num_batched_tokens=64) as llm:
        check_same(own, llm, asked, wanted)
        check_same(own, llm, asked[::-1], wanted[::-1])  # what the first round has left
        with failing_pool(llm):
            check_same(own, llm, asked, wanted)
        settings = vllm.SamplingParams(temperature=0, max_tokens=1, detokenize=False)
        results = llm.generate([{"prompt_token_ids": ids} for ids in asked], settings, use_tqdm=False)
    assert min(result.num_cached_tokens for result in results) >= 64


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True], ids=["vLLM's", "ours"])
def test_in_16_bits(ours, tmp_path, request):
    """With vLLM's own op for CPUs and with ours, the tokens of transformers except where two are nearly as likely."""
    shapes = request.getfixturevalue("counted") if ours else []
    own = saved("qwen3_next", tmp_path, **WIDE).bfloat16()
    # vLLM's own op takes no others, which it knows by itself since 0.32.
    with engine(tmp_path, dtype="bfloat16", mamba_ssm_cache_dtype="float32") as llm:
        outputs = written(llm, ASKED)
    assert bool(shapes) == ours
    assert largest_error(own, ASKED, outputs) < 0.1
    assert largest_loss(own, ASKED, outputs) < 0.1


@pytest.mark.slow
def test_compiled(tmp_path, counted):
    own = saved("qwen3_next", tmp_path)
    with engine(tmp_path, enforce_eager=False) as llm:
        check_same(own, llm, ASKED, continued(own, ASKED))
    assert counted


@pytest.mark.slow
@needs_two
def test_heads_divided_between_two_processes(tmp_path, monkeypatch):
    """In processes of their own, which find the environment variable by themselves."""
    monkeypatch.setenv(served.OUR_KERNELS, "1")
    own = saved("qwen3_next", tmp_path)
    with engine(tmp_path, tensor_parallel_size=2) as llm:
        check_same(own, llm, ASKED, continued(own, ASKED))  # float32, which vLLM's own op refuses


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the log says of layers."""
    lines: list[str] = []

    def say(text: str, *given: Any) -> None:
        lines.append(text % given)

    monkeypatch.setattr(delta_layers, "logger", lambda: SimpleNamespace(info_once=say, warning_once=say, warning=say))
    return lines


@pytest.mark.skipif(OLDEST, reason="vLLM 0.24 cannot verify drafts on a CPU")
def test_layers_that_stay_on_vllms_kernels(tmp_path, counted, said):
    """vLLM's own op for CPUs fails with drafts, so that none are drawn here."""
    saved("qwen3_next", tmp_path, **WIDE)
    with engine(tmp_path, dtype="bfloat16", speculative_config=NGRAM) as llm:
        layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
        assert [x.runs_on_ours for x in layers if hasattr(x, "runs_on_ours")] == [False, False]
    assert not counted
    assert set(said) == {"QwenGatedDeltaNetAttention stays on vLLM's own kernels: speculative decoding must be off."}


def test_what_another_plugin_replaces_stays(counted, said, monkeypatch):
    from vllm.model_executor.custom_op import op_registry_oot

    other = type("Other", (), {})
    monkeypatch.setitem(op_registry_oot, "QwenGatedDeltaNetAttention", other)
    monkeypatch.setitem(delta_layers.LAYERS, "of_no_version", ("Unknown", "_forward"))
    delta_layers.register_layers()
    assert op_registry_oot["QwenGatedDeltaNetAttention"] is other
    assert said == [
        "QwenGatedDeltaNetAttention is replaced by another plug-in, and stays so.",
        "this version of vLLM has no Unknown._forward: such layers stay on vLLM's own kernels.",
    ]


def test_another_version_of_vllm_says_so(monkeypatch):
    monkeypatch.setenv(served.OUR_KERNELS, "1")
    monkeypatch.setattr(served, "TESTED", "0.22 to 0.23")
    with pytest.warns(UserWarning, match="FASTWEIGHTS_VLLM_KERNELS has no effect with vLLM 0.*; install vLLM 0.24"):
        served.register()
