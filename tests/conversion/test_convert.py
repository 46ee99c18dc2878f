"""Every conversion: same weights, same logits where the theory says so, other logits elsewhere, and training that continues."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.conversion import CONVERSIONS, check_logits, condition, convert
from fastweights.layers import MIXERS
from fastweights.models import FastWeightsForCausalLM

from .small import MAMBA2, mamba2, model, tokens

NEW = [pair for pair, conversion in CONVERSIONS.items() if conversion.new]
EQUAL = [pair for pair in NEW if CONVERSIONS[pair].neutral is not None]
OPTIONS = [
    ("gdn", "pgdn", {"output_gate": "silu", "num_v_heads": 4, "expand_v": 0.5}),
    ("deltanet", "pdn", {"gain": "longhorn", "normalize_qk": False, "conv_size": 2}),
    ("kda", "pkda", {"head_dim": 5, "norm_eps": 1e-3}),
    ("linear", "pla", {"feature_map": "elu", "decay": "head", "norm_eps": 1e-3}),
    ("gla", "pgla", {"gain": "beta", "conv_size": None, "activation": "none"}),
    ("linear", "palimpsa-d", {"decay": "head", "gain": "beta", "num_v_heads": 4, "norm_eps": 1e-3}),
    ("linear", "palimpsa-d", {"decay": "head", "normalize_qk": False, "output_gate": "sigmoid", "gate_low_rank": True}),
    ("palimpsa-d", "palimpsa-d", {"metaplasticity": False, "prior": 2.0, "residual": False}),
    ("mamba2", "palimpsa-m", {"num_groups": 1, "expand_v": 2, "norm_groups": 2, "residual": False}),
]


def source_of(source: str, target: str, **options: Any) -> FastWeightsForCausalLM:
    return model({"name": source, **CONVERSIONS[source, target].requires, **options})


def assert_equal_logits(source: Any, target: str, **options: Any) -> None:
    converted = convert(source, to=target, **options)
    before = {name: tensor.clone() for name, tensor in converted.state_dict().items()}
    check = check_logits(source, converted, tokens())
    assert check.neutral is not None and check.neutral < 1e-5 * check.largest_logit
    assert check.saved > 10 * check.neutral  # the new parameters do something
    assert all(torch.equal(tensor, before[name]) for name, tensor in converted.state_dict().items())


def test_the_table_names_mixers():
    for source, target in CONVERSIONS:
        assert source in MIXERS and target in MIXERS
    assert all(set(conversion.requires) for conversion in CONVERSIONS.values() if conversion.new)


@pytest.mark.parametrize("source, target", CONVERSIONS)
def test_a_pair_works_from_the_default_layer_or_states_its_condition(source, target):
    """Also the other way round: with the condition that is stated, it works."""
    stated, default = condition(CONVERSIONS[source, target]), model(source)
    if stated:
        with pytest.raises(ValueError) as refused:
            convert(default, to=target)
        for needed in stated.split(" and "):
            assert needed in str(refused.value) or needed.replace("=", " must be ") in str(refused.value)
        default = model({"name": source, **stated_options(stated)})
    check_logits(default, convert(default, to=target), tokens()).insist()


def stated_options(stated: str) -> dict[str, Any]:
    return {name: ast.literal_eval(value) for name, value in (part.split("=") for part in stated.split(" and "))}


@pytest.mark.parametrize("source, target", [("deltanet", "pdn"), ("gdn", "pgdn"), ("kda", "pkda")])
@pytest.mark.parametrize("interval", ["symmetric", "amplify", "dampen"])
def test_write_keys_in_every_interval(source, target, interval):
    assert_equal_logits(model(source), target, interval=interval, bound=1.7)


def test_a_threshold_and_the_variance_carry_over():
    options = {"metaplastic_threshold": 0.5, "variance_gate": True, "output_gate": "silu"}
    assert_equal_logits(model({"name": "linear", "decay": "head", "output_gate": "silu"}), "palimpsa-d", **options)
    assert_equal_logits(model("mamba2"), "palimpsa-m", **options)


@pytest.mark.parametrize("side", ["query", "both"])
def test_preconditioned_queries_and_negative_eigenvalues_carry_over(side):
    assert_equal_logits(model({"name": "gdn", "negative_eigenvalues": True}), "pgdn", preconditioner=side)


@pytest.mark.parametrize("source, target", EQUAL)
def test_equal_logits_at_the_neutral_setting(source, target):
    assert_equal_logits(source_of(source, target), target)


@pytest.mark.parametrize("source, target, options", OPTIONS)
def test_equal_logits_whatever_the_options(source, target, options):
    assert_equal_logits(source_of(source, target, **options), target)


@pytest.mark.parametrize("variant", MAMBA2)
def test_mamba2_of_transformers_as_palimpsa(variant):
    assert_equal_logits(mamba2(**MAMBA2[variant]), "palimpsa-m")


@pytest.mark.parametrize("source, target", NEW)
def test_weights_carry_over_and_the_source_stays(source, target):
    before = source_of(source, target, **({"output_gate": "silu"} if source != "mamba2" else {}))
    kept = {name: tensor.clone() for name, tensor in before.state_dict().items()}
    converted = convert(before, to=target)
    assert type(converted) is FastWeightsForCausalLM and not converted.training
    assert {name for name, _ in converted.config.mixers()} == {target}
    after = converted.state_dict()
    assert all(torch.equal(before.state_dict()[name], tensor) for name, tensor in kept.items())
    assert all(torch.equal(after[name], tensor) for name, tensor in kept.items())
    assert all(after[name].data_ptr() != tensor.data_ptr() for name, tensor in before.state_dict().items())
    new = [name for name in after if name not in kept]
    assert new and all(name.split(".mixer.")[1].startswith(CONVERSIONS[source, target].new) for name in new)


@pytest.mark.parametrize("source, target", NEW)
def test_training_goes_on(source, target):
    converted = convert(source_of(source, target), to=target).train()
    ids = tokens(24)
    optimizer = torch.optim.AdamW(converted.parameters(), lr=3e-3)
    losses = []
    for _ in range(4):
        loss = converted(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in converted.parameters())


def test_a_wrong_weight_shows():
    source = model("gdn")
    converted = convert(source, to="pgdn")
    with torch.no_grad():
        converted.model.layers[0].mixer.qkv.k_proj.weight[0, 0] += 0.1
    assert check_logits(source, converted, tokens()).neutral > 1e-4


def test_the_largest_difference_is_that_of_either_sign():
    source = model("gdn")
    converted = convert(source, to="pgdn")
    here, there = (check_logits(*pair, tokens()).saved for pair in ((source, converted), (converted, source)))
    with torch.no_grad():
        wanted = (source(tokens()).logits - converted(tokens()).logits).abs().max().item()
    assert here == there == wanted > 0


def test_no_equality_where_there_is_none():
    source = model("gdn")
    check = check_logits(source, convert(source, to="gka"), tokens())
    assert check.neutral is None and check.saved > 0.01


def test_biases_and_a_sketch_of_gka_start_as_in_a_new_layer():
    converted = convert(model("gdn"), to="gka", gate_bias=True, sketch=2)
    mixer = converted.model.layers[0].mixer
    assert not mixer.gain.b_proj.bias.any() and not mixer.mix.b_proj.bias.any() and mixer.sketch.basis.any()


def test_palimpsa_starts_near_its_source():
    source = model({"name": "linear", "decay": "head"})
    converted = convert(source, to="palimpsa-d")
    mixer = converted.model.layers[1].mixer
    scales = torch.cat([layer.mixer.importance.b_scale for layer in converted.model.layers])
    assert len(scales.unique()) == len(scales) and scales.min() >= 0.1 and scales.max() <= 1  # drawn for each head
    assert not mixer.skip.D.any()
    near = check_logits(source, convert(source, to="palimpsa-d", b_scale=-6.0), tokens()).saved
    assert near < 0.1 * check_logits(source, converted, tokens()).saved


def test_trained_skips_are_kept():
    source = model({"name": "palimpsa-d", "metaplasticity": False})
    converted = convert(source, to="palimpsa-d")
    skip = converted.model.layers[0].mixer.skip.D
    assert skip.all() and torch.equal(skip, source.model.layers[0].mixer.skip.D)


def test_a_hybrid_keeps_its_layers_of_attention():
    options = {"num_hidden_layers": 3, "softmax_layers": [1], "softmax_options": {"window": 4}}
    converted = convert(model({"name": "gdn", "conv_size": 2}, **options), to="pgdn").config
    memory = ("pgdn", {"conv_size": 2})
    assert converted.mixers() == [memory, ("softmax", {"window": 4}), memory]
    assert (converted.mixer, converted.softmax_layers) == ({"name": "pgdn", "conv_size": 2}, [1])


def test_hybrids_keep_their_other_layers():
    source = model([{"name": "softmax", "window": 8}, "gdn", "deltanet"], num_hidden_layers=3)
    converted = convert(source, to="pgdn", bound=1.25)
    assert converted.config.mixer == [{"name": "softmax", "window": 8}, {"name": "pgdn", "bound": 1.25}, "deltanet"]
    assert check_logits(source, converted, tokens()).neutral == 0


def test_a_second_conversion_leaves_the_first_alone():
    source = model([{"name": "palimpsa-d", "b_scale": 2.0}, {"name": "linear", "decay": "head"}])
    converted = convert(source, to="palimpsa-d")
    assert converted.config.mixers()[0] == ("palimpsa-d", {"b_scale": 2.0})
    check = check_logits(source, converted, tokens())
    assert check.neutral < 1e-5 * check.largest_logit < check.saved


def test_the_seed_decides_new_weights_and_nothing_else():
    source, state = model("gdn"), torch.get_rng_state()
    first, second = convert(source, to="pgdn", seed=3), convert(source, to="pgdn", seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    other = convert(source, to="pgdn", seed=4).model.layers[0].mixer.preconditioner.gates.gain.b_proj.weight
    assert not torch.equal(other, first.model.layers[0].mixer.preconditioner.gates.gain.b_proj.weight)


def test_dtype_mode_ties_and_tokens_carry_over():
    source = model("gdn", tie_word_embeddings=True, eos_token_id=3, norm_eps=1e-4).bfloat16().train()
    source.generation_config.max_new_tokens = 7
    converted = convert(source, to="pgdn")
    assert converted.dtype == torch.bfloat16 and converted.training
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    assert converted.config.eos_token_id == 3 and converted.config.norm_eps == 1e-4
    assert converted.generation_config.max_new_tokens == 7


@pytest.mark.parametrize(
    "mixer, to, options, words",
    [
        ("gdn", "pgnd", {}, ["gdn", "'pgnd'", "did you mean 'pgdn'", "mamba2 -> palimpsa-m"]),
        ("softmax", "pgdn", {}, ["softmax", "pgdn", "gdn -> pgdn"]),
        ("pgdn", "pgdn", {}, ["no conversion from pgdn"]),
        ("palimpsa-d", "palimpsa-d", {}, ["no conversion from palimpsa-d to itself", "metaplasticity=False"]),
        ("linear", "palimpsa-d", {}, ["layer 0", "decay='none'", "decay must be 'head'"]),
        (
            {"name": "linear", "decay": "head", "feature_map": "elu"},
            "palimpsa-d",
            {},
            ["feature_map must be 'identity'"],
        ),
        ({"name": "gdn", "gain": "unit"}, "gka", {}, ["gain='unit'", "gka", "gain must be 'beta'"]),
        ({"name": "gdn", "bound": 1.2}, "gka", {}, ["bound=1.2", "no such option"]),
        ({"name": "gdn", "preconditioner": "key"}, "pgdn", {}, ["preconditioner='key'", "must be None"]),
        ("gdn", "pgdn", {"bond": 1.2}, ["'bond'", "did you mean 'bound'"]),
        ("gdn", "pgdn", {"bound": 3.0}, ["bound must be in [1, 2]"]),
        ("gdn", "pgdn", {"expand_v": 2}, ["expand_v", "do not fit"]),
        ("gdn", "pgdn", {"conv_size": None}, ["q_conv.weight", "no counterpart"]),
    ],
)
def test_refusals(mixer, to, options, words):
    with pytest.raises(ValueError) as refused:
        convert(model(mixer), to=to, **options)
    for word in words:
        assert word in str(refused.value)


def test_a_model_of_another_kind_is_refused():
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 1,
        "num_hidden_layers": 1,
        "vocab_size": 8,
    }
    with pytest.raises(TypeError, match="LlamaForCausalLM"):
        convert(LlamaForCausalLM(LlamaConfig(**sizes)), to="pgdn")
