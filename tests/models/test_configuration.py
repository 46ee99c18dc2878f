"""The configuration: checked, and the same after a trip through JSON."""

import json

import pytest
from transformers import AutoConfig

from fastweights.models import FastWeightsConfig

SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2}
HYBRID = ["gdn", {"name": "softmax", "qk_norm": True, "rope_theta": 500.0}]


def test_defaults_are_the_340m_setting():
    config = FastWeightsConfig()
    assert (config.hidden_size, config.num_heads, config.num_hidden_layers) == (1024, 8, 24)
    assert config.intermediate_size == 2752 and config.num_attention_heads == 8
    assert config.mixers() == [("gdn", {})] * 24


@pytest.mark.parametrize("mixer", ["pkda", {"name": "gdn", "expand_v": 2.0, "conv_size": None}, HYBRID])
def test_round_trip_through_json(tmp_path, mixer):
    config = FastWeightsConfig(**SMALL, mixer=mixer, tie_word_embeddings=True, norm_eps=1e-5, eos_token_id=[1, 2])
    config.save_pretrained(tmp_path)
    for loaded in (
        FastWeightsConfig.from_pretrained(tmp_path),
        AutoConfig.from_pretrained(tmp_path),
        FastWeightsConfig(**json.loads(config.to_json_string(use_diff=False))),
        FastWeightsConfig(**config.to_dict()),
    ):
        assert type(loaded) is FastWeightsConfig
        assert loaded.to_diff_dict() == config.to_diff_dict()
        assert loaded.mixers() == config.mixers() and loaded.mixer == mixer


def test_hybrid_lists_one_mixer_a_layer():
    config = FastWeightsConfig(**SMALL, mixer=HYBRID)
    assert config.mixers() == [("gdn", {}), ("softmax", {"qk_norm": True, "rope_theta": 500.0})]
    assert config.mixer == HYBRID


def test_a_hybrid_by_its_layers_of_attention(tmp_path):
    layout = {"softmax_layers": (3, 1), "softmax_options": {"window": 4}}
    config = FastWeightsConfig(**{**SMALL, "num_hidden_layers": 4}, mixer={"name": "gdn", "expand_v": 2.0}, **layout)
    memory, attention = ("gdn", {"expand_v": 2.0}), ("softmax", {"window": 4})
    assert config.mixers() == [memory, attention, memory, attention] and config.softmax_layers == [1, 3]
    assert config.layer_types == ["linear_attention", "sliding_attention"] * 2
    config.save_pretrained(tmp_path)
    assert FastWeightsConfig.from_pretrained(tmp_path).to_dict() == config.to_dict()
    old = json.loads((tmp_path / "config.json").read_text())
    for key in ("softmax_layers", "softmax_options", "norm"):  # a configuration of before has none of them
        old.pop(key)
    (tmp_path / "config.json").write_text(json.dumps(old))
    loaded = FastWeightsConfig.from_pretrained(tmp_path)
    assert loaded.mixers() == [memory] * 4 and loaded.norm == "rms"


@pytest.mark.parametrize(
    ("error", "changes", "message"),
    [
        (ValueError, {"softmax_layers": [2]}, "softmax_layers must be a whole number from 0 to 1, got 2"),
        (TypeError, {"softmax_layers": "1"}, "softmax_layers must be a list of layer numbers"),
        (ValueError, {"softmax_layers": [1], "mixer": HYBRID}, "softmax_layers must be empty where mixer lists"),
        (ValueError, {"softmax_options": {"qk_norm": True}}, "softmax_options must be None without softmax_layers"),
        (TypeError, {"softmax_layers": [1], "softmax_options": "qk_norm"}, "softmax_options must be a dict"),
        (ValueError, {"softmax_layers": [1], "softmax_options": {"expand_v": 2}}, "layer 1: .*no option 'expand_v'"),
        (ValueError, {"norm": "batch"}, "norm must be one of 'rms', 'layer', got 'batch'"),
    ],
)
def test_layouts_and_norms_that_do_not_fit_are_refused(error, changes, message):
    with pytest.raises(error, match=message):
        FastWeightsConfig(**SMALL, **changes)


def test_keys_given_when_loading_are_checked_too(tmp_path):
    FastWeightsConfig(**SMALL).save_pretrained(tmp_path)
    assert FastWeightsConfig.from_pretrained(tmp_path, mixer="kda").mixers() == [("kda", {})] * 2
    with pytest.raises(ValueError, match="unknown mixer 'kdaa'"):
        FastWeightsConfig.from_pretrained(tmp_path, mixer="kdaa")
    with pytest.raises(ValueError, match="num_heads must be a positive"):
        AutoConfig.from_pretrained(tmp_path, num_heads=-1)
    with pytest.raises(ValueError, match=r"no key 'num_head' \(did you mean 'num_heads'\?\)"):
        AutoConfig.from_pretrained(tmp_path, num_head=4)
    _, unused = AutoConfig.from_pretrained(tmp_path, device_map="cpu", return_unused_kwargs=True)
    assert unused == {"device_map": "cpu"}


@pytest.mark.parametrize(
    "error, key, value, message",
    [
        (ValueError, "hiden_size", 16, r"FastWeightsConfig has no key 'hiden_size' \(did you mean 'hidden_size'\?\)"),
        (ValueError, "max_length", 20, "has no key 'max_length'"),
        (ValueError, "vocab_size", 0, "vocab_size must be a positive whole number, got 0"),
        (TypeError, "hidden_size", 16.0, "hidden_size must be a positive whole number, got 16.0"),
        (TypeError, "num_hidden_layers", "2", "num_hidden_layers must be a positive whole number, got '2'"),
        (TypeError, "num_heads", None, "num_heads must be a positive whole number, got None"),
        (ValueError, "intermediate_size", -1, "intermediate_size must be a positive whole number, got -1"),
        (ValueError, "norm_eps", 0.0, "norm_eps must be positive, got 0.0"),
        (ValueError, "initializer_range", float("nan"), "initializer_range must be a finite number, got nan"),
        (TypeError, "tie_word_embeddings", "yes", "tie_word_embeddings must be True or False, got 'yes'"),
        (ValueError, "mixer", "gdnn", r"mixer of layer 0: unknown mixer 'gdnn' \(did you mean 'gdn'\?\)"),
        (ValueError, "mixer", ["gdn"], "mixer must list one mixer per layer, num_hidden_layers is 2, got 1"),
        (TypeError, "mixer", ["gdn", {"expand_v": 2}], "mixer of layer 1 must be a name or"),
        (TypeError, "mixer", 3, "mixer of layer 0 must be a name or"),
        (
            ValueError,
            "mixer",
            ["gdn", {"name": "gdn", "expandv": 2}],
            "mixer of layer 1: mixer 'gdn' has no option 'expandv'",
        ),
    ],
)
def test_bad_keys_and_values_are_refused(error, key, value, message):
    with pytest.raises(error, match=message):
        FastWeightsConfig(**{**SMALL, key: value})
