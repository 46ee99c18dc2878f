"""Every mixer, and the options that change what a layer computes: what the tests of all layers run over."""

from typing import Any

import pytest

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
    "pdn tanh": ("pdn", {"squash": "tanh", "bound": 1.8}),
    "pgdn unstable": ("pgdn", {"squash": "none", "ridge": 0.4, "num_v_heads": 4}),
    "pkda unstable longhorn": ("pkda", {"squash": "none", "gain": "longhorn"}),
    "pmamba2-key grouped": ("pmamba2-key", {"num_v_heads": 4, "squash": "tanh", "interval": "dampen"}),
    "pmamba2-key bare": ("pmamba2-key", {"gain": None, "squash": "none", "tie_preconditioner": True}),
    "retnet grouped": ("retnet", {"num_v_heads": 4, "gain": "beta"}),
    "efla decay": ("efla", {"decay": "head", "num_v_heads": 4}),
    "nlms decay": ("nlms", {"decay": "channel", "normalize_qk": True, "preconditioner": "key"}),
    "comba grouped": ("comba", {"num_v_heads": 4, "output_correction": 1.0, "negative_eigenvalues": True}),
    "comba without decay": ("comba", {"decay": "none", "output_correction": None}),
    "deltaproduct of one": ("deltaproduct", {"householders": 1, "conv_size": None}),
    "gated-deltaproduct grouped": ("gated-deltaproduct", {"householders": 3, "num_v_heads": 4, "expand_v": 0.5}),
    "rwkv7 narrow": ("rwkv7", {"head_dim": 5, "decay_rank": 3, "rate_rank": 4, "gate_rank": 5}),
    "pgdn correction": ("pgdn", {"output_correction": 0.5}),
    "pdn unit": ("pdn", {"gain": "unit"}),
    "pkda damped": ("pkda", {"gain": "damped"}),
    "pgdn fading": ("pgdn", {"gain": "fading", "interval": "amplify"}),
    "deltanet fading": ("deltanet", {"gain": "fading", "normalize_qk": False}),
    "pgdn amplify": ("pgdn", {"interval": "amplify", "num_v_heads": 4}),
    "pdn dampen": ("pdn", {"interval": "dampen", "bound": 2.0, "negative_eigenvalues": True}),
    "pgdn negative": ("pgdn", {"negative_eigenvalues": True, "num_v_heads": 4}),
    "pkda both": ("pkda", {"preconditioner": "both", "interval": "amplify", "negative_eigenvalues": True}),
    "pgdn both grouped": (
        "pgdn",
        {"preconditioner": "both", "num_v_heads": 4, "tie_preconditioner": True, "ridge": 0.5},
    ),
    "pdn both damped": ("pdn", {"preconditioner": "both", "gain": "damped", "output_correction": 0.5}),
    "gdn query": ("gdn", {"preconditioner": "query", "num_v_heads": 4}),
    "pmamba2 both": ("pmamba2", {"preconditioner": "both", "num_v_heads": 4}),
    "deltanet write key": (
        "deltanet",
        {"learn_write_key": True, "negative_eigenvalues": True, "output_correction": 0.5},
    ),
    "gdn write key": ("gdn", {"learn_write_key": True, "num_v_heads": 4, "preconditioner": "query", "squash": "tanh"}),
    "kda write key": ("kda", {"learn_write_key": True, "gain": "unit", "interval": "amplify", "bound": 2.0}),
    "softmax grouped": ("softmax", {"num_kv_heads": 1, "qk_norm": True}),
    "softmax convolved": ("softmax", {"conv_size": 4, "activation": "silu"}),
    "softmax convolved window": ("softmax", {"conv_size": 3, "window": 4, "num_kv_heads": 1, "qk_norm": True}),
    "gdn skip": ("gdn", {"skip_init": 0.5, "num_v_heads": 4}),
    "lattice skip": ("lattice", {"skip_init": 1.0, "output_norm": False}),
    "pkda windows": ("pkda", {"long_memory": "windows"}),
    "pdn windows": ("pdn", {"long_memory": "windows"}),
    "gla windows": ("gla", {"long_memory": "windows", "output_gate": None}),
    "softmax window": ("softmax", {"window": 4, "num_kv_heads": 1}),
    "softmax window of one": ("softmax", {"window": 1}),
    "softmax no positions": ("softmax", {"rope_theta": None, "head_dim": 5}),
    "mamba2 grouped": (
        "mamba2",
        {
            "num_groups": 1,
            "head_dim": 10,
            "expand_v": 0.5,
            "bias": True,
            "norm_groups": 2,
            "dt_min": 0.002,
            "dt_max": 0.05,
        },
    ),
    "mamba2 bare": (
        "mamba2",
        {"residual": False, "output_gate": None, "conv_size": 1, "conv_bias": False, "prior": 3.0},
    ),
    "longhorn-elementwise grouped": ("longhorn-elementwise", {"num_v_heads": 4, "expand_v": 0.5, "normalize_qk": True}),
    "palimpsa-m grouped": ("palimpsa-m", {"num_groups": 1, "expand_v": 2.0, "prior": 0.3, "b_scale": 0.1}),
    "palimpsa-d long": ("palimpsa-d", {"long_memory": True, "prior": 0.3, "expand_v": 2.0}),
    "palimpsa-d grouped": ("palimpsa-d", {"num_v_heads": 4, "gain": None, "residual": False}),
    "palimpsa-d plain": ("palimpsa-d", {"metaplasticity": False, "output_gate": None, "prior": 2.0}),
    "palimpsa-d threshold": ("palimpsa-d", {"metaplastic_threshold": 2.0, "num_v_heads": 4, "prior": 0.3}),
    "palimpsa-d variance": ("palimpsa-d", {"variance_gate": True, "num_v_heads": 4, "prior": 0.3, "residual": False}),
    "palimpsa-m both": (
        "palimpsa-m",
        {"metaplastic_threshold": 2.0, "variance_gate": True, "num_groups": 1, "prior": 0.3},
    ),
    "gka grouped": ("gka", {"num_v_heads": 4, "expand_v": 0.5, "iterations": 12}),
    "gka bare": ("gka", {"decay": "none", "gain": None, "alpha_connection": False, "ridge": 0.1}),
    "gka exact": ("gka", {"solver": "exact", "output_gate": None}),
    "gka constant": ("gka", {"adaptive_ridge": False, "solver": "conjugate_gradient", "ridge": 0.25}),
    "gka constant chebyshev": ("gka", {"adaptive_ridge": False, "ridge": 0.25, "num_v_heads": 4}),
    "gka biases": ("gka", {"gate_bias": True}),
    "gka gradient descent": ("gka", {"solver": "gradient_descent", "ridge": 0.1}),
    "gka accelerated": ("gka", {"solver": "accelerated_gradient_descent"}),
    "gka random sketch": ("gka", {"sketch": 5, "sketch_basis": "random"}),
    "gka constant sketch": ("gka", {"sketch": 5, "adaptive_ridge": False, "ridge": 0.25}),
    "gka sketch": ("gka", {"sketch": 5, "num_v_heads": 4, "gain": None}),
    "gka sketch alone": ("gka", {"sketch": 5, "alpha_connection": False, "num_v_heads": 4}),
    "mesa bare": ("mesa", {"decay": "none", "gain": None, "ridge": 0.5, "smallest_ridge": 0.1}),
    "mesa grouped": ("mesa", {"num_v_heads": 4, "expand_v": 0.5, "iterations": 20}),
    "deltanet shared": ("deltanet", {"shared_qk": True, "output_gate": "gelu"}),
    "gdn shared": ("gdn", {"shared_qk": True, "num_v_heads": 4, "output_norm": False, "output_gate": "gelu"}),
    "linear shared": ("linear", {"shared_qk": True, "feature_map": "elu", "output_norm": False}),
    "palimpsa-d shared": ("palimpsa-d", {"shared_qk": True, "expand_v": 2.0}),
    "lattice separate": ("lattice", {"shared_qk": False, "output_norm": False}),
    "ttt learned state": ("ttt", {"learned_state": True, "num_v_heads": 4, "output_norm": False}),
    "lattice encode": ("lattice", {"objective": "encode", "decay": "none", "rate": 0.5}),
    "lattice similarity": ("lattice", {"objective": "similarity", "slots": 30, "num_v_heads": 4}),
    "lattice free": ("lattice", {"normalize": False, "decay": "none", "rate": 0.1, "normalize_v": False}),
    "lattice sparse": ("lattice", {"l1": 0.01, "slots": 5}),
    "ttt free": ("ttt", {"normalize_v": False, "rate": 0.5, "num_v_heads": 4, "expand_v": 2.0}),
    "vla refresh": ("vla-conv", {"refresh_every": 4, "refresh": 0.05, "ridge": 1.0, "num_v_heads": 4}),
    "vla paper": ("vla", {"refresh_every": None, "expand_v": 0.5}),
    "vla identity": ("vla-conv", {"adaptive": False}),
    "vla long writes": ("vla-conv", {"normalize_writes": False, "ridge": 2.0}),
    "vla long keys": ("vla-conv", {"normalize_keys": False, "head_dim": 2}),
    "linear normalizer": (
        "linear",
        {"feature_map": "elu", "normalizer": True, "decay": "head", "gain": "beta", "num_v_heads": 4},
    ),
    "vla-deltanet grouped": ("vla-deltanet", {"num_v_heads": 4, "normalize_qk": True, "output_norm": True}),
    "rls decay": ("rls", {"decay": "head", "ridge": 0.1}),
    "rls grouped": ("rls", {"gain": None, "num_v_heads": 4, "output_gate": "gelu", "gate_low_rank": True}),
}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {**{name: (name, {}) for name in MIXERS}, **OPTIONS}

every_variant = pytest.mark.parametrize("variant", VARIANTS)
# For what hardly depends on the options: the fast set has every mixer as it is.
options_are_slow = pytest.mark.parametrize(
    "variant", [*MIXERS, *(pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS)]
)


def build(variant: str) -> Mixer:
    name, options = VARIANTS[variant]
    return build_mixer(name, hidden_size=HIDDEN, num_heads=HEADS, **options)
