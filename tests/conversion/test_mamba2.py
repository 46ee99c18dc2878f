"""transformers' Mamba-2 in this library's form: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.mamba2 import modeling_mamba2

from fastweights.conversion import check_logits, convert

from .small import MAMBA2, mamba2, tokens


class Float64Torch:
    """torch whose float32 is float64, for a module that computes in float32 whatever it is given."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.mark.parametrize("variant", MAMBA2)
def test_same_logits_in_float64(variant, monkeypatch):
    source = mamba2(**MAMBA2[variant]).double()
    converted = convert(source, to="mamba2")
    assert converted.dtype == torch.float64
    monkeypatch.setattr(modeling_mamba2, "torch", Float64Torch())
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    check = check_logits(source, converted, tokens())
    assert 1 < check.largest_logit < 100
    assert check.saved < 1e-12 * check.largest_logit


@pytest.mark.parametrize("variant", MAMBA2)
def test_same_logits_in_float32(variant):
    source = mamba2(**MAMBA2[variant])
    check = check_logits(source, convert(source, to="mamba2"), tokens())
    assert check.saved < 1e-5 * check.largest_logit


def test_same_continuation():
    source = mamba2(**MAMBA2["groups"])
    prompt = tokens(20)[:1]
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = source.generate(prompt, **options)
    assert torch.equal(convert(source, to="mamba2").generate(prompt, **options), expected)


def test_sizes_and_tokens():
    config = convert(mamba2(**MAMBA2["steps"], bos_token_id=4, eos_token_id=5, pad_token_id=6), to="mamba2").config
    assert (config.hidden_size, config.num_heads, config.intermediate_size, config.norm_eps) == (32, 4, 0, 1e-3)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (4, 5, 6)
    _, options = config.mixers()[0]
    assert (options["head_dim"], options["num_groups"]) == (12, 2)
    assert (options["dt_min"], options["dt_max"], options["norm_eps"]) == (0.02, 0.5, 1e-3)


def test_an_option_without_counterpart_is_named():
    with pytest.raises(ValueError, match="hidden_act='gelu'"):
        convert(mamba2(hidden_act="gelu"), to="palimpsa-m")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"norm_eps": 1e-3}, "norm_eps=0.001 cannot be carried over: it must be 1e-05"),
        ({"norm_eps": 1e-5, "dt_limit": [0.0, 0.1]}, r"dt_limit=\(0.0, 0.1\)"),
        ({"norm_eps": 1e-5, "n_groups": 2}, "n_groups=2"),
    ],
)
def test_settings_of_flash_linear_attention_that_transformers_does_not_read(options, message):
    """It saves the same model_type, and normalises all groups at once."""
    with pytest.raises(ValueError, match=message):
        convert(mamba2(**options), to="mamba2")
    convert(mamba2(norm_eps=1e-5, dt_limit=[0.0, float("inf")]), to="mamba2")
