"""Bad arguments of configurations and models are refused at once, in words of the argument."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

from fastweights.layers import LayerCache
from fastweights.models import FastWeightsCache, FastWeightsConfig, FastWeightsForCausalLM, FastWeightsModel, preset

from ..bad_calls import check_refused
from .small import VOCABULARY, config, model, tokens

NAN, INFINITY = float("nan"), float("inf")
SIZES = [0, -1, 1.5, "8", True, None, 10**12]
NUMBERS = [0, -1.0, NAN, INFINITY, "1", True, None]
FLAGS = [1, "yes", None]
TOKENS = [VOCABULARY, -1, 1.0, "3", True]

FIELDS: dict[str, list[Any]] = {
    "vocab_size": SIZES,
    "hidden_size": SIZES,
    "num_hidden_layers": [*SIZES, 10**9],
    "num_heads": [*SIZES, 3],
    "mixer": ["gnd", "", 3, None, [], ["gdn"], ["gdn", 3], {"name": "gdn", "decai": 1}, {"decay": "head"}, {"name": 1}],
    "norm": ["rmsnorm", "", 3, None],
    "softmax_layers": [[-1], [2], [0.5], ["0"], "0", 3],
    "softmax_options": [{"qk_norm": True}, [], 3, "qk_norm"],  # without softmax_layers
    "intermediate_size": [-1, 1.5, "8", True, 10**12],
    "norm_eps": NUMBERS,
    "initializer_range": NUMBERS,
    "tie_word_embeddings": FLAGS,
    "scale_residuals": FLAGS,
    "use_cache": FLAGS,
    "chunked_loss": FLAGS,
    "pad_token_id": TOKENS,
    "bos_token_id": TOKENS,
    "eos_token_id": [*TOKENS, [], [0, VOCABULARY], [1.0], {0}],
}


@pytest.fixture(scope="module")
def small() -> FastWeightsForCausalLM:
    return model()


@pytest.mark.parametrize("field, value", [(field, value) for field, values in FIELDS.items() for value in values])
def test_config(field: str, value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(field, lambda: config(**{"num_hidden_layers": 2, field: value}), tmp_path)


def test_every_field_of_the_config_is_tried() -> None:
    own = FastWeightsConfig.__annotations__
    assert {name for name in own if name not in ("model_type", "attribute_map", "keys_to_ignore_at_inference")} <= set(
        FIELDS
    )


CONFIGS: dict[str, tuple[str, Callable[[], object]]] = {
    "heads that do not divide": ("num_heads", lambda: config(num_heads=5)),
    "heads too wide": ("head_dim", lambda: config(hidden_size=1024, num_heads=2)),
    "an option that does not fit": ("expand_v", lambda: config({"name": "gdn", "expand_v": 0.3})),
    "an option of a wrong kind": ("conv_size", lambda: config({"name": "gdn", "conv_size": "4"})),
    "a misspelt key": ("num_layers", lambda: config(num_layers=3)),
    "a preset that does not exist": ("preset", lambda: preset("pgdn-350m")),
    "a preset by number": ("name", lambda: preset(3)),  # type: ignore[arg-type]
    "a change of a preset": ("vocab_size", lambda: preset("pgdn-340m", vocab_size=-1)),
    "a dictionary for a configuration": ("config", lambda: FastWeightsForCausalLM({"vocab_size": 3})),  # type: ignore[arg-type]
    "a name for a configuration": ("config", lambda: FastWeightsModel("gdn")),  # type: ignore[arg-type]
    "a cache of -1 layers": ("num_layers", lambda: FastWeightsCache.empty(-1)),
    "a cache of half a layer": ("num_layers", lambda: FastWeightsCache.empty(0.5)),  # type: ignore[arg-type]
    "a cache of 10^9 layers": ("num_layers", lambda: FastWeightsCache.empty(10**9)),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_other_constructors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_refused(*CONFIGS[name], tmp_path)


def with_ids(*ids: int) -> torch.Tensor:
    return torch.tensor([ids])


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nested": lambda x: torch.nested.nested_tensor(list(x)),
    "sparse": lambda x: x.to_sparse(),
    "on meta": lambda x: x.to("meta"),
}
NUMBERED = ("attention_mask", "position_ids", "seq_idx", "labels")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "name", [*NUMBERED, "input_ids", "inputs_embeds", "cache_position", "logits_to_keep", "cu_seqlens", "cu_seq_lens_q"]
)
def test_kinds_of_tensors(kind, name, small, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ids = tokens(1, 6)
    right = {
        "input_ids": ids,
        "inputs_embeds": torch.zeros(1, 6, 16),
        "cache_position": torch.arange(6),
        "logits_to_keep": torch.tensor([1]),
        "cu_seqlens": torch.tensor([0, 6]),
        "cu_seq_lens_q": torch.tensor([0, 6]),
        **dict.fromkeys(NUMBERED, torch.arange(6)[None]),
    }
    if kind == "on meta" and name not in (*NUMBERED, "input_ids", "inputs_embeds"):
        pytest.skip("its numbers are read by the layers, or not at all")
    given = {name: KINDS[kind](right[name])}
    given |= {"cu_seq_lens_k": right[name]} if name == "cu_seq_lens_q" else {}
    given |= {} if name.startswith("input") else {"input_ids": ids}
    check_refused("cu_seqlens|cu_seq_lens_q" if name.startswith("cu") else name, lambda: small(**given), tmp_path)


INPUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "no input": ("input_ids", {}),
    "two inputs": ("inputs_embeds", {"input_ids": tokens(), "inputs_embeds": torch.zeros(2, 19, 16)}),
    "an id as large as the vocabulary": ("input_ids", {"input_ids": with_ids(1, VOCABULARY)}),
    "a negative id": ("input_ids", {"input_ids": with_ids(1, -1)}),
    "the ignored label as an id": ("input_ids", {"input_ids": with_ids(-100, 1)}),
    "a huge id": ("input_ids", {"input_ids": with_ids(2**62)}),
    "float ids": ("input_ids", {"input_ids": torch.ones(1, 3)}),
    "bool ids": ("input_ids", {"input_ids": torch.ones(1, 3, dtype=torch.bool)}),
    "complex ids": ("input_ids", {"input_ids": torch.ones(1, 3, dtype=torch.complex64)}),
    "a list of ids": ("input_ids", {"input_ids": [[1, 2]]}),
    "an array of ids": ("input_ids", {"input_ids": np.ones((1, 2), dtype=np.int64)}),
    "text for ids": ("input_ids", {"input_ids": "hello"}),
    "ids without a batch": ("input_ids", {"input_ids": torch.ones(3, dtype=torch.long)}),
    "ids of rank 3": ("input_ids", {"input_ids": torch.ones(1, 2, 3, dtype=torch.long)}),
    "no tokens": ("input_ids", {"input_ids": torch.ones(1, 0, dtype=torch.long)}),
    "ids on meta": ("input_ids", {"input_ids": torch.ones(1, 3, dtype=torch.long, device="meta")}),
    "embeddings of a wrong width": ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 17)}),
    "embeddings of rank 2": ("inputs_embeds", {"inputs_embeds": torch.zeros(3, 16)}),
    "embeddings of a wrong dtype": ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 16, dtype=torch.float64)}),
    "integer embeddings": ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 16, dtype=torch.long)}),
    "embeddings on meta": ("inputs_embeds", {"inputs_embeds": torch.zeros(1, 3, 16, device="meta")}),
    "a list of embeddings": ("inputs_embeds", {"inputs_embeds": [[0.0] * 16]}),
    "a list as mask": ("attention_mask", {"input_ids": tokens(), "attention_mask": [[1] * 19] * 2}),
    "a mask that is too short": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(2, 18)}),
    "a mask of another batch": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(3, 19)}),
    "a mask that is too long": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(2, 20)}),
    "a mask of rank 4": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(2, 1, 19, 19)}),
    "an additive mask": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.full((2, 19), -1e9)}),
    "a mask of NaN": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.full((2, 19), NAN)}),
    "a sparse mask": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(2, 19).to_sparse()}),
    "a mask on meta": ("attention_mask", {"input_ids": tokens(), "attention_mask": torch.ones(2, 19, device="meta")}),
    "numbers that come back": ("attention_mask", {"input_ids": tokens(), "attention_mask": tokens() + 1}),
    "document numbers in a list": ("seq_idx", {"input_ids": tokens(1), "seq_idx": [[0] * 19]}),
    "document numbers that come back": ("seq_idx", {"input_ids": tokens(1), "seq_idx": tokens(1)}),
    "columns in a list": ("cache_position", {"input_ids": tokens(), "cache_position": list(range(19))}),
    "columns of a cache that is not there": (
        "cache_position",
        {"input_ids": tokens(), "cache_position": torch.arange(3, 22)},
    ),
    "a dictionary as cache": ("past_key_values", {"input_ids": tokens(), "past_key_values": {}}),
    "transformers' cache": ("past_key_values", {"input_ids": tokens(), "past_key_values": DynamicCache()}),
    "a layer's cache": ("past_key_values", {"input_ids": tokens(), "past_key_values": LayerCache()}),
    "a cache of three layers": (
        "past_key_values",
        {"input_ids": tokens(), "past_key_values": FastWeightsCache.empty(3)},
    ),
    "use_cache as text": ("use_cache", {"input_ids": tokens(), "use_cache": "yes"}),
    "output_hidden_states as a number": ("output_hidden_states", {"input_ids": tokens(), "output_hidden_states": 2}),
    "attention weights": ("output_attentions", {"input_ids": tokens(), "output_attentions": True}),
    "a list as cu_seqlens": ("cu_seqlens", {"input_ids": tokens(1), "cu_seqlens": [0, 19]}),
    "float cu_seqlens": ("cu_seqlens", {"input_ids": tokens(1), "cu_seqlens": torch.tensor([0.0, 19.0])}),
    "cu_seqlens that end early": ("cu_seqlens", {"input_ids": tokens(1), "cu_seqlens": torch.tensor([0, 18])}),
    "cu_seqlens of two rows": ("cu_seqlens", {"input_ids": tokens(2), "cu_seqlens": torch.tensor([0, 19])}),
    "cu_seqlens with padding": (
        "attention_mask",
        {
            "input_ids": tokens(1),
            "cu_seqlens": torch.tensor([0, 19]),
            "attention_mask": torch.arange(19)[None].clamp(max=1),
        },
    ),
    "labels of another shape": ("labels", {"input_ids": tokens(), "labels": tokens()[:, 1:]}),
    "a label outside the vocabulary": ("labels", {"input_ids": tokens(), "labels": tokens() + VOCABULARY}),
    "a negative label": ("labels", {"input_ids": tokens(), "labels": tokens() - 50}),
    "float labels": ("labels", {"input_ids": tokens(), "labels": tokens().float()}),
    "labels in a list": ("labels", {"input_ids": tokens(), "labels": tokens().tolist()}),
    "labels on meta": ("labels", {"input_ids": tokens(), "labels": tokens().to("meta")}),
    "a negative number of logits": ("logits_to_keep", {"input_ids": tokens(), "logits_to_keep": -1}),
    "half a logit": ("logits_to_keep", {"input_ids": tokens(), "logits_to_keep": 0.5}),
    "logits by name": ("logits_to_keep", {"input_ids": tokens(), "logits_to_keep": "all"}),
    "float places of logits": ("logits_to_keep", {"input_ids": tokens(), "logits_to_keep": torch.tensor([0.0])}),
    "a place outside": ("logits_to_keep", {"input_ids": tokens(), "logits_to_keep": torch.tensor([19])}),
    "a loss divided by 0": (
        "num_items_in_batch",
        {"input_ids": tokens(), "labels": tokens(), "num_items_in_batch": 0},
    ),
    "a loss divided by text": (
        "num_items_in_batch",
        {"input_ids": tokens(), "labels": tokens(), "num_items_in_batch": "4"},
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_forward(name: str, small: FastWeightsForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argument, inputs = INPUTS[name]
    check_refused(argument, lambda: small(**inputs), tmp_path)


ROWS: dict[str, Any] = {
    "a row too many": torch.tensor([0, 2]),
    "a negative row": torch.tensor([-1, 0]),
    "a huge row": torch.tensor([2**62]),
    "float rows": torch.tensor([0.0, 1.0]),
    "bool rows of another batch": torch.tensor([True]),
    "rows of rank 2": torch.tensor([[0, 1]]),
    "a single number": torch.tensor(1),
    "rows in a list": [0, 1],
    "an array": np.array([0, 1]),
    "a number": 1,
    "nothing": None,
    **{f"{kind} rows": change(torch.tensor([[0], [1]])) for kind, change in KINDS.items()},
    "sparse rows of rank 1": torch.tensor([0, 1]).to_sparse(),
    "rows on meta": torch.tensor([0, 1], device="meta"),
}
REPEATS = [0, -1, 1.5, "2", True, None, torch.tensor(2)]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("call, name", [("reorder_cache", "beam_idx"), ("batch_select_indices", "indices")])
def test_rows_of_a_cache(call, name, rows, small, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_cache_refuses(name, lambda cache: getattr(cache, call)(ROWS[rows]), small, tmp_path)


@pytest.mark.parametrize("repeats", REPEATS, ids=str)
def test_copies_of_the_rows_of_a_cache(repeats, small, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    check_cache_refuses("repeats", lambda cache: cache.batch_repeat_interleave(repeats), small, tmp_path)


def check_cache_refuses(
    name: str, call: Callable[[FastWeightsCache], object], lm: FastWeightsForCausalLM, folder: Path
) -> None:
    """It refuses the call, and stays as it was."""
    cache = lm(tokens(2)).past_key_values
    before = cache.copy()
    check_refused(name, lambda: call(cache), folder)
    for layer, kept in zip(cache.layers, before.layers, strict=True):
        assert all(layer.memory[name] is x for name, x in kept.memory.items())


CACHES: dict[str, tuple[str, Callable[[FastWeightsForCausalLM], object]]] = {
    "of two sequences": (
        "past_key_values must hold as many",
        lambda model: model(tokens(3), past_key_values=model(tokens(2)).past_key_values),
    ),
    "of other layers": (
        "cache must be one that this layer has filled",
        lambda model: model(tokens(2), past_key_values=OTHERS["softmax"](tokens(2)).past_key_values),
    ),
    "of other widths": (
        "cache must be one that this layer|initial_state must",
        lambda model: model(tokens(2), past_key_values=OTHERS["wide"](tokens(2)).past_key_values),
    ),
}
OTHERS = {"softmax": model("softmax"), "wide": model(hidden_size=32)}


@pytest.mark.parametrize("mixer", ["gdn", "softmax", "pgdn", "vla", "lattice"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_that_another_model_has_filled(name: str, mixer: str) -> None:
    argument, call = CACHES[name]
    if (mixer, name) == ("softmax", "of other layers"):
        pytest.skip("the same layers")
    with pytest.raises((ValueError, TypeError), match=argument):
        call(model(mixer))


GENERATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "a list of ids": ("input_ids", {"inputs": [[1, 2]]}),
    "float ids": ("input_ids", {"inputs": torch.ones(1, 3)}),
    "an id outside the vocabulary": ("input_ids", {"inputs": with_ids(1, VOCABULARY)}),
    "an empty prompt": ("input_ids", {"inputs": torch.ones(1, 0, dtype=torch.long)}),
    "an end outside the vocabulary": ("eos_token_id", {"inputs": tokens(), "eos_token_id": VOCABULARY}),
    "a negative end": ("eos_token_id", {"inputs": tokens(), "eos_token_id": -1}),
    "one of the ends outside": ("eos_token_id", {"inputs": tokens(), "eos_token_id": [1, 10**6]}),
    "a float end": ("eos_token_id", {"inputs": tokens(), "eos_token_id": 1.5}),
    "padding outside the vocabulary": (
        "pad_token_id",
        {"inputs": tokens(), "eos_token_id": 1, "pad_token_id": VOCABULARY},
    ),
    "negative padding": ("pad_token_id", {"inputs": tokens(), "pad_token_id": -1}),
    "a first token outside": ("bos_token_id", {"bos_token_id": VOCABULARY}),
    "a dictionary as cache": ("past_key_values", {"inputs": tokens(), "past_key_values": {}}),
    "no new tokens": ("max_new_tokens", {"inputs": tokens(), "max_new_tokens": 0}),
    "fewer than no new tokens": ("max_new_tokens", {"inputs": tokens(), "max_new_tokens": -1}),
    "half a new token": ("max_new_tokens", {"inputs": tokens(), "max_new_tokens": 0.5}),
    "a mask of another batch": ("attention_mask", {"inputs": tokens(), "attention_mask": torch.ones(3, 19)}),
    "a list as mask": ("attention_mask", {"inputs": tokens(), "attention_mask": [[1] * 19] * 2}),
    "a mask of one number": ("attention_mask", {"inputs": tokens(), "attention_mask": torch.full((2, 19), 5)}),
    "a mask of 2 and padding": ("attention_mask", {"inputs": tokens(), "attention_mask": 2 * (tokens() > 3).long()}),
    **{
        f"a {kind} {name}": (
            name,
            {name: change(torch.ones(2, 19, 16)[..., 0 if name == "attention_mask" else slice(16)])},
        )
        for kind, change in KINDS.items()
        if kind != "on meta"
        for name in ("attention_mask", "inputs_embeds")
    },
}


@pytest.mark.parametrize("name", GENERATIONS)
def test_generate(name: str, small: FastWeightsForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    argument, inputs = GENERATIONS[name]
    check_refused(argument, lambda: small.generate(**{"max_new_tokens": 2, "do_sample": False, **inputs}), tmp_path)


@pytest.mark.parametrize("length", [-1, 1.5, "4", None, True])
def test_state_size(length: Any, small: FastWeightsForCausalLM, tmp_path: Path) -> None:
    check_refused("length", lambda: small.state_size(length), tmp_path)
    check_refused("length", lambda: small.model.state_size(length), tmp_path)
