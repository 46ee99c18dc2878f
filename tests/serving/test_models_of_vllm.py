"""Models that vLLM has by itself, tiny and random, with our kernels under their layers: the same tokens as in transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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
    VOCABULARY,
    counted_preemptions,
    engine,
    failing_pool,
    in_pieces,
    largest_error,
    largest_loss,
    needs_copies,
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
        weights |= {name.replace("conv1d", f"{part}_conv1d"): x.contiguous() for part, x in zip("qkv", parts, strict=True)}
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
    assert largest_error(own, asked, outputs) < CLOSE


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
