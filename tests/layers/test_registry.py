"""The registry of mixers."""

import inspect
import re

import pytest

from fastweights.layers import MIXERS, DeltaNet, LinearAttention, SoftmaxAttention, build_mixer
from fastweights.plugins import Registry

MEMORIES = [
    "linear",
    "retnet",
    "mamba2",
    "gla",
    "pla",
    "pgla",
    "pmamba2",
    "pmamba2-tied",
    "pmamba2-key",
    "deltanet",
    "gdn",
    "kda",
    "pdn",
    "pgdn",
    "pkda",
    "longhorn",
    "longhorn-elementwise",
    "efla",
    "nlms",
    "comba",
    "deltaproduct",
    "gated-deltaproduct",
    "rwkv7",
]
VLA = ["vla", "vla-conv", "vla-softmax", "vla-linear", "vla-deltanet"]
PAPERS = ["palimpsa-d", "palimpsa-m", "gka", "mesa", "lattice", "ttt", *VLA, "rls"]
NAMES = ["softmax", *MEMORIES, *PAPERS]


def test_names():
    assert list(MIXERS)[: len(NAMES)] == NAMES  # then those of users


@pytest.mark.parametrize("name", MIXERS)
def test_entries_are_complete_and_agree_with_the_layer(name):
    spec = MIXERS[name]
    for text in (spec.summary, spec.equation, spec.source, spec.state):
        assert text and "\n" not in text
    assert set(spec.options) <= set(inspect.signature(spec.layer).parameters)
    sizes = {"H": 2, "K": 6, "V": 6, "T": 1}
    formula = re.sub(r"(?<=[\w)]) (?=[\w(])", " * ", spec.state.split(" after")[0])
    assert build_mixer(name, hidden_size=12, num_heads=2).state_size(length=1) == eval(formula, sizes)


def test_options_tell_the_mixers_of_a_class_apart():
    for layer in (LinearAttention, DeltaNet, SoftmaxAttention):
        options = [sorted(spec.options.items()) for spec in MIXERS.values() if spec.layer is layer]
        assert all(options.count(one) == 1 for one in options)


def test_given_options_come_over_those_of_the_entry():
    assert build_mixer("gdn", hidden_size=8, num_heads=2, decay="none").decay is None
    assert build_mixer("gdn", hidden_size=8, num_heads=2, head_dim=16, expand_v=0.5).state_size() == 2 * 16 * 8


@pytest.mark.parametrize(
    "error, name, options, message",
    [
        (ValueError, "gdnn", {}, r"layer 3: unknown mixer 'gdnn' \(did you mean 'gdn'\?\); choose from softmax, "),
        (
            ValueError,
            "gdn",
            {"expandv": 2},
            r"layer 3: mixer 'gdn' has no option 'expandv' \(did you mean 'expand_v'\?\)",
        ),
        (
            ValueError,
            "softmax",
            {"decay": "head"},
            "mixer 'softmax' has no option 'decay'.*; it has head_dim, num_kv_heads",
        ),
        (ValueError, "gdn", {"num_heads_v": 2}, "has no option 'num_heads_v'"),
        (ValueError, "gdn", {"hidden_size": 10}, "hidden_size must be a multiple of num_heads, 4, got 10"),
        (ValueError, "gdn", {"num_heads": 0}, "num_heads must be a positive whole number, got 0"),
        (TypeError, "gdn", {"num_heads": True}, "num_heads must be a positive whole number, got True"),
        (ValueError, "gdn", {"head_dim": 257}, "at most 256, got 257"),
        (ValueError, "gdn", {"head_dim": 5, "expand_v": 0.5}, r"expand_v must give whole value heads, got 0.5 \* 5"),
        (TypeError, "gdn", {"expand_v": "2"}, "expand_v must be a number, got '2'"),
        (ValueError, "gdn", {"num_v_heads": 6}, "num_v_heads must be a multiple of num_heads, 4, got 6"),
        (ValueError, "gdn", {"decay": "heads"}, "decay must be one of 'none', 'head', 'channel', got 'heads'"),
        (ValueError, "gdn", {"conv_size": 0}, "conv_size must be a positive whole number, got 0"),
        (ValueError, "gdn", {"activation": "relu"}, "activation must be one of 'silu', 'none'"),
        (TypeError, "gdn", {"output_gate": True}, "output_gate must be one of None, 'silu', 'sigmoid'"),
        (ValueError, "gdn", {"norm_eps": 0}, "norm_eps must be positive"),
        (ValueError, "gdn", {"backend": "cuda"}, "backend must be one of 'auto', "),
        (ValueError, "gdn", {"gain": "none"}, "gain must be one of 'beta', 'longhorn'"),
        (ValueError, "gdn", {"preconditioner": "keys"}, "preconditioner must be one of None, 'key', 'query', 'both'"),
        (ValueError, "pgdn", {"bound": 2.5}, r"bound must be in \[1, 2\].*got 2.5"),
        (ValueError, "pgdn", {"interval": "both"}, "interval must be one of 'symmetric', 'amplify', 'dampen'"),
        (ValueError, "kda", {"gain": "fading"}, "gain must not be 'fading' with decay 'channel'"),
        (TypeError, "pgdn", {"center": "0"}, "center must be a number"),
        (ValueError, "pkda", {"tie_preconditioner": True}, "tie_preconditioner must be False with decay 'channel'"),
        (ValueError, "pgla", {"tie_preconditioner": True}, "tie_preconditioner must be False with decay 'channel'"),
        (ValueError, "pla", {"ridge": 0.0}, "ridge must be positive, got 0.0"),
        (ValueError, "linear", {"feature_map": "relu"}, "feature_map must be one of 'identity', 'elu'"),
        (TypeError, "linear", {"normalize_qk": "yes"}, "normalize_qk must be True or False"),
    ],
)
def test_bad_names_and_options_are_refused(error, name, options, message):
    with pytest.raises(error, match=message):
        build_mixer(name, **{"hidden_size": 16, "num_heads": 4, "layer_idx": 3, **options})


def test_a_layer_of_the_library_under_a_name_of_users_is_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of a script import it again where users have registered something."""
    monkeypatch.setattr(Registry, "made", [])
    registry = Registry[object]("mixer", ("linear",))
    registry.add("linear", object(), LinearAttention)
    registry.add("mine", object(), LinearAttention)
    assert registry.own_names() == ["linear"]
