"""transformers' Qwen3-Next in this library's form, the same numbers: layers of linear attention, and models of nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from fastweights.conversion import check_logits, convert, convert_folder, convert_layer

from .small import VOCABULARY, mamba2, tokens, trained

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12,
    "linear_value_head_dim": 8, "num_experts": 0, "layer_types": ["linear_attention"] * 2, "pad_token_id": 1,
}  # fmt: skip


def qwen3_next(**options: Any) -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    return trained(Qwen3NextForCausalLM(Qwen3NextConfig(**{**SIZES, **options})))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True},
        {"rms_norm_eps": 1e-3},
    ],
)
def test_same_logits(options):
    source = qwen3_next(**options)
    converted = convert(source, to="gdn")
    check = check_logits(source, converted, tokens())
    assert check.saved < 1e-5 * check.largest_logit and check.largest_logit > 0.5
    assert converted.config.pad_token_id == 1 and converted.num_parameters() == source.num_parameters()


def test_same_continuation_and_training_as_another_rule():
    source, prompt = qwen3_next(), tokens(20)[:1]
    options = {"max_new_tokens": 20, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    expected = source.generate(prompt, **options, use_cache=False)  # its cache needs a layer of attention
    assert torch.equal(convert(source, to="gdn").generate(prompt, **options), expected)
    check = check_logits(source, convert(source, to="pgdn"), tokens())
    assert check.neutral is not None and check.neutral < 1e-5 * check.largest_logit < check.saved


@pytest.mark.parametrize(
    "options, message",
    [
        ({"layer_types": ["linear_attention", "full_attention"]}, "qwen3_next with layer_types=.*full_attention"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "mlp_only_layers": [0]}, r"layers_with_experts=\[1\]"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
    ],
)
def test_what_does_not_carry_over_is_named(options, message):
    small = {"moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    with pytest.raises(ValueError, match=message):
        convert(qwen3_next(**small, **options), to="gdn")


def test_a_folder(tmp_path):
    qwen3_next().save_pretrained(tmp_path / "source")
    report = convert_folder(tmp_path / "source", tmp_path / "new", to="gdn")
    assert report.check.saved < 1e-5 * report.check.largest_logit and report.new_parameters == 0


def test_a_layer_beside_attention_and_experts():
    model = qwen3_next(
        layer_types=["full_attention", "linear_attention"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8,
        shared_expert_intermediate_size=8,
    )  # fmt: skip
    theirs = model.model.layers[1].linear_attn
    ours = convert_layer(theirs, model.config)
    x = torch.randn(2, 70, 32)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert ours.qkv.v_conv.weight.data_ptr() != theirs.conv1d.weight.data_ptr() and not ours.training


def test_a_layer_of_mamba2():
    model = mamba2(n_groups=2)
    theirs = model.backbone.layers[0].mixer
    x = torch.randn(2, 70, 32)
    with torch.no_grad():
        torch.testing.assert_close(convert_layer(theirs, model.config)(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_a_layer_or_a_configuration_of_another_kind_is_refused():
    model = qwen3_next()
    with pytest.raises(
        TypeError, match="layer must be one of transformers' Mamba2Mixer, Qwen3NextGatedDeltaNet, got Embedding"
    ):
        convert_layer(model.model.embed_tokens, model.config)
    with pytest.raises(
        TypeError, match="config must be that of the model of a Qwen3NextGatedDeltaNet, got Mamba2Config"
    ):
        convert_layer(model.model.layers[0].linear_attn, mamba2().config)
    with pytest.raises(TypeError, match="config must be PreTrainedConfig"):
        convert_layer(model.model.layers[0].linear_attn, {})
