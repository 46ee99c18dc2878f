"""What hybrids refuse, in one line that says what to do."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, DynamicCache, OPTConfig, OPTForCausalLM

from fastweights.models import HybridCache, keep_layers, linearize

from .small import hybrid, teacher, tokens


@pytest.mark.parametrize(
    ("keep", "layers"),
    [("none", ()), ("all", (0, 1, 2, 3, 4)), ("every:2", (1, 3)), ("3, 1", (1, 3)), ([2, 0, 2], (0, 2)), ([], ())],
)
def test_kept_layers(keep, layers):
    assert keep_layers(keep, 5) == layers


@pytest.mark.parametrize(
    "keep",
    [
        "every:0",
        "every:6",
        "every:",
        "every:\u00b2",
        "",
        "\u00b2",
        "first",
        "1,,2",
        "1;2",
        "-1",
        "5",
        [5],
        [-1],
        [1.5],
        [True],
        3,
    ],
)
def test_kept_layers_refused(keep):
    with pytest.raises((ValueError, TypeError), match="keep must be"):
        keep_layers(keep, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"to": "gdnn"}, "unknown mixer 'gdnn' \\(did you mean 'gdn'"),
        ({"to": "rwkv7"}, "takes q, k and v, and rwkv7 makes them in its own way; choose another"),
        ({"to": "deltaproduct"}, "one q, k and v per token and head, which deltaproduct with these options has not"),
        ({"to": "softmax"}, "softmax must have a window in place of attention; keep the attention"),
        ({"keep": [4]}, "keep must be a whole number from 0 to 3, got 4"),
        ({"keys": "copied"}, "keys must be"),
        ({"head_dim": 8}, "layer 0: head_dim of gdn must be that of the attention, 12, got 8"),
        ({"expand_v": 2.0}, "layer 0: "),
        ({"conv_sise": 4}, "did you mean 'conv_size'"),
        ({"seed": -1}, "seed must be"),
        ({"rope": 1}, "rope must be"),
    ],
)
def test_linearize_refuses(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        linearize(teacher(), **{"to": "gdn", **changes})


def test_models_that_have_no_hybrid():
    sizes = {"vocab_size": 64, "hidden_size": 16, "ffn_dim": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = OPTForCausalLM(OPTConfig(**sizes, word_embed_proj_dim=16))
    with pytest.raises(ValueError, match="whose attention can become a memory, llama, mistral.*got 'opt'"):
        linearize(other, to="gdn")
    with pytest.raises(ValueError, match="must be a LlamaForCausalLM, got LlamaModel; load it as a causal model"):
        linearize(teacher().model, to="gdn")
    with pytest.raises(ValueError, match="must be a LlamaForCausalLM, got FastWeightsLlamaForCausalLM"):
        linearize(hybrid(), to="gdn")
    with pytest.raises(TypeError, match="teacher must be"):
        linearize(torch.nn.Linear(1, 1), to="gdn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="causally, but its use_bidirectional_attention is True; choose"):
        linearize(teacher("gemma3_text", use_bidirectional_attention=True), to="gdn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": ["gdn"]}, "memory must list a mixer or None for each of the 4 layers, got 1"),
        ({"memory": [None, None, None, "gdnn"]}, "memory of layer 3: unknown mixer"),
        ({"memory_keys": "copied"}, "memory_keys must be"),
        ({"memory_rope": 1}, "memory_rope must be"),
    ],
)
def test_configurations_refused(changes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        AutoConfig.for_model("fastweights_llama", num_hidden_layers=4, **changes)


def test_calls_refused():
    lm, ids = hybrid(), tokens()
    cache = lm(ids).past_key_values
    for changes, error, message in (
        ({"past_key_values": DynamicCache(config=lm.config)}, TypeError, "must be a HybridCache .* got DynamicCache"),
        ({"past_key_values": hybrid(keep=(2,))(ids).past_key_values}, ValueError, "got one of another model"),
        ({"past_key_values": cache, "cache": HybridCache(lm.config)}, ValueError, "cache must be None where"),
        (
            {"attention_mask": torch.tensor([[1] * 4 + [2] * 7, [1] * 11])},
            ValueError,
            "packed rows must have no padding",
        ),
        ({"attention_mask": torch.ones(2, 1, 11, 11)}, ValueError, "attention_mask must be \\[2, at least 11\\]"),
        ({"position_ids": torch.tensor([[*range(4), *range(7)]]), "use_cache": True}, ValueError, "use_cache False"),
        ({"cu_seqlens": torch.tensor([0, 11])}, ValueError, "cu_seqlens"),
        ({"position_ids": torch.tensor([[*range(4), *range(9, 16)]])}, ValueError, "position_ids must rise by one"),
    ):
        with pytest.raises(error, match=message):
            lm(ids, **changes)
    with pytest.raises(ValueError, match="cache_implementation must be None"):
        lm.generate(ids[:1], max_new_tokens=3, cache_implementation="static")
    with pytest.raises(ValueError, match="cropped after activate_past_recording"):
        cache.crop(-1)
