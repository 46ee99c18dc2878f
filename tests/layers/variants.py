"""Every mixer, and the options that change what a layer computes: what the tests of all layers run over."""

from typing import Any

from fastweights.layers import MIXERS, Mixer, build_mixer

HIDDEN, HEADS = 24, 2

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "linear elu": ("linear", {"feature_map": "elu", "normalize_qk": False}),
    "linear bare": ("linear", {"conv_size": None, "activation": "none"}),
    "gla grouped": ("gla", {"num_v_heads": 4, "expand_v": 0.5}),
    "pla tied": ("pla", {"tie_preconditioner": True}),
    "pmamba2 tied": ("pmamba2", {"tie_preconditioner": True, "ridge": 1.0}),
    "pmamba2 grouped": ("pmamba2", {"num_v_heads": 4, "output_gate": "sigmoid"}),
    "deltanet narrow": ("deltanet", {"head_dim": 5, "conv_size": 1, "negative_eigenvalues": True}),
    "gdn gate": ("gdn", {"output_gate": "silu", "expand_v": 2, "conv_size": 3}),
    "gdn grouped": ("gdn", {"num_v_heads": 4}),
    "longhorn decay": ("longhorn", {"decay": "head", "num_v_heads": 4}),
    "pgdn tied": ("pgdn", {"tie_preconditioner": True, "bound": 2.0}),
    "pgdn grouped": ("pgdn", {"num_v_heads": 4}),
    "pgdn longhorn": ("pgdn", {"gain": "longhorn", "num_v_heads": 4}),
    "pdn unit": ("pdn", {"gain": "unit"}),
    "pkda damped": ("pkda", {"gain": "damped"}),
    "softmax grouped": ("softmax", {"num_kv_heads": 1, "qk_norm": True}),
    "softmax window": ("softmax", {"window": 4, "num_kv_heads": 1}),
    "softmax window of one": ("softmax", {"window": 1}),
    "softmax no positions": ("softmax", {"rope_theta": None, "head_dim": 5}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in MIXERS}, **OPTIONS}


def build(variant: str) -> Mixer:
    name, options = VARIANTS[variant]
    return build_mixer(name, hidden_size=HIDDEN, num_heads=HEADS, **options)
