"""Weights in 8 bits, as llm-compressor saves them (compressed-tensors), in vLLM's own linear layers."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from .engine import CLOSE, differences, engine, errors, largest_error, model, prompts, written

no_amx = pytest.mark.skipif(
    torch.cpu._is_amx_tile_supported() and not torch.cuda.is_available(),
    reason="vLLM's product of int8 refuses float32 on a CPU with AMX",
)
LARGEST = {"float": (torch.float8_e4m3fn, 448.0), "int": (torch.int8, 127.0)}


def round_rows(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in 8 bits, and the number that it is to be multiplied with."""
    dtype, largest = LARGEST[kind]
    scale = x.float().abs().amax(-1, keepdim=True).clamp_min(1e-8) / largest
    return ((x / scale).round() if kind == "int" else x / scale).to(dtype), scale


def save_quantized(own: Any, folder: Path, kind: str) -> None:
    """The model with weights in 8 bits, one scale per row. The model itself then computes with these numbers, and its
    projections with inputs that are rounded per token. On a GPU projections whose sizes are no multiples of 16 stay, as vLLM's
    kernels would fill them up, and fail."""
    own.save_pretrained(folder)
    weights, ignored = load_file(folder / "model.safetensors"), ["lm_head"]
    for name, layer in own.named_modules():
        if not isinstance(layer, torch.nn.Linear) or name == "lm_head":
            continue
        if torch.cuda.is_available() and (layer.in_features % 16 or layer.out_features % 16):
            ignored.append(name)
        else:
            rounded, scale = round_rows(layer.weight.detach(), kind)
            weights |= {f"{name}.weight": rounded, f"{name}.weight_scale": scale}
            layer.weight.data.copy_(rounded.float() * scale)
            layer.register_forward_pre_hook(
                lambda layer, given: torch.mul(*(x.float() for x in round_rows(given[0], kind))).to(given[0].dtype)
            )
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    settings = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**settings, "strategy": "channel", "dynamic": False},
        "input_activations": {**settings, "strategy": "token", "dynamic": True},
    }
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors", "format": f"{kind}-quantized", "quantization_status": "compressed",
        "ignore": ignored, "config_groups": {"all": group},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("kind", "close"), [("float", CLOSE), pytest.param("int", 0.02, marks=no_amx)])
def test_weights_in_8_bits(kind, close, tmp_path):
    """An integer next to a tie may be rounded the other way. vLLM's products on a GPU give 16 bits, so that many are. So is
    our own model in float16. The largest errors of both are chance: their means are compared."""
    own, plain = (model(["gdn", "softmax", "lattice"], initializer_range=0.1) for _ in range(2))
    save_quantized(own, tmp_path, kind)
    half = torch.cuda.is_available()
    with engine(tmp_path, dtype="float16" if half else "float32") as llm:
        outputs = written(llm, prompts())
    error, without_rounding = (errors(one, prompts(), outputs) for one in (own, plain))
    if half:
        in_half = differences(own, copy.deepcopy(own).half(), prompts(), outputs)
        assert error.mean() < min(2 * in_half.mean(), without_rounding.mean())
    else:
        assert error.max() < close < without_rounding.max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="vLLM rounds to fp8 on a GPU only")
def test_weights_that_vllm_rounds(tmp_path):
    """It has one scale per matrix. The tokens of a model without rounding are as far as they are for one per row."""
    own, rounded = (model("gdn", hidden_size=256, initializer_range=0.1) for _ in range(2))
    save_quantized(rounded, tmp_path, "float")
    own.save_pretrained(tmp_path)
    with engine(tmp_path, dtype="bfloat16", quantization="fp8") as llm:
        outputs = written(llm, prompts())
        worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker
        kinds = {x.dtype for x in worker.model_runner.get_model().parameters()}
    assert torch.float8_e4m3fn in kinds
    assert 0.01 < largest_error(own, prompts(), outputs) < 2 * differences(own, rounded, prompts(), outputs).max()
