"""Fingerprints of first weights, state-dict keys and answers. Run as a module, this writes them anew:

    python -m tests.layers.pinned

Do so only for a mixer that is new: what is stored pins that seeded weights, parameter names and saved models stay valid. "layers"
and "models" have the first values of the published block, "defaults" those that layers have where they differ from it.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastweights.layers import MixerChoice, build_mixer, in_block
from fastweights.layers.choice import split_entry
from fastweights.layers.registry import ORDER
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

from .variants import HEADS, HIDDEN, VARIANTS

STORED = Path(__file__).with_name("pinned.json")
CHECKPOINT = Path(__file__).with_name("checkpoint")

# Beside the variants of the other tests: every option of the skeleton, and every part that draws random numbers.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{name} plain": (name, {"conv_size": None, "activation": "none", "normalize_qk": False})
        for name in ("linear", "deltanet", "palimpsa-d", "gka", "mesa", "rls")
    },
    **{
        f"{name} low rank": (name, {"output_gate": "sigmoid", "gate_low_rank": True, "num_v_heads": 4})
        for name in ("pgla", "gdn", "palimpsa-d", "gka", "mesa", "lattice", "ttt", "rls")
    },
    **{
        f"{name} wide": (name, {"head_dim": 6, "expand_v": 2, "output_gate": "gelu"})
        for name in ("pmamba2", "pkda", "palimpsa-m", "palimpsa-d", "gka", "mesa", "lattice", "ttt", "rls")
    },
    "linear ungated": ("linear", {"decay": "none", "gain": "beta"}),
    "pgdn centred": ("pgdn", {"center": 0.5}),
    "pkda damped gate": ("pkda", {"gain": "damped", "output_gate": "silu", "gate_low_rank": False}),
    "mamba2 long": ("mamba2", {"long_memory": True}),
    "palimpsa-m long": ("palimpsa-m", {"long_memory": True, "norm_groups": 2}),
    "gka wide sketch": ("gka", {"sketch": 12}),
    "lattice ungated": ("lattice", {"output_gate": None, "conv_size": 2}),
    "lattice many slots": ("lattice", {"slots": 64}),
    "vla wide": ("vla-conv", {"expand_v": 2, "num_v_heads": 4, "conv_size": 3}),
    "vla bare": ("vla-conv", {"adaptive": False, "conv_size": None}),
}
LAYERS = {name: made for name, made in {**VARIANTS, **MORE}.items() if made[0] in ORDER}

FIRST_MIXERS = [  # what "every mixer" was when it was pinned
    *("softmax", "linear", "mamba2", "gla", "pla", "pgla", "pmamba2"),
    *("deltanet", "gdn", "kda", "pdn", "pgdn", "pkda", "longhorn"),
    *("palimpsa-d", "palimpsa-m", "gka", "mesa", "lattice", "ttt", "vla-conv", "rls"),
]
NEWEST_MIXERS = ["deltaproduct", "gated-deltaproduct", "rwkv7"]
LATER_MIXERS = [name for name in ORDER if name not in (*FIRST_MIXERS, *NEWEST_MIXERS)]
SMALL = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "intermediate_size": 8}
SAVED_MIXERS = [
    "softmax",
    "pgla",
    "mamba2",
    "pkda",
    "palimpsa-d",
    "palimpsa-m",
    "gka",
    "mesa",
    "lattice",
    "ttt",
    "vla-conv",
    "rls",
]
MODELS: dict[str, dict[str, Any]] = {
    "every mixer": {**SMALL, "num_hidden_layers": len(FIRST_MIXERS), "mixer": FIRST_MIXERS},
    "later mixers": {**SMALL, "num_hidden_layers": len(LATER_MIXERS), "mixer": LATER_MIXERS},
    "newest mixers": {**SMALL, "num_hidden_layers": len(NEWEST_MIXERS), "mixer": NEWEST_MIXERS},
    "hybrid": {
        **SMALL,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "mixer": [{"name": "pgdn", "num_v_heads": 4}, "softmax", {"name": "gka", "sketch": 3}],
    },
    "no mlp": {**SMALL, "num_hidden_layers": 2, "intermediate_size": 0, "mixer": "kda"},
}


def fingerprint(module: nn.Module) -> dict[str, Any]:
    """Names, shapes and dtypes as a hash; the values as two numbers a tensor's order and values decide, which unlike a hash
    of their bits are the same on machines whose exp differs in the last place."""
    state = module.state_dict()
    described = "\n".join(f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in state.items())
    flat = torch.cat([tensor.double().flatten() for tensor in state.values()])
    wave = torch.cos(torch.arange(1, len(flat) + 1, dtype=torch.float64))
    return {
        "keys": hashlib.sha256(described.encode()).hexdigest()[:16],
        "values": [float(flat.norm()), float(flat @ wave)],
    }


def published(mixer: str, options: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The options of a mixer with the first values of its authors."""
    return dict(in_block(MixerChoice(mixer, options, mixer), "published", HEADS).options)


def first_layer(name: str) -> nn.Module:
    mixer, options = LAYERS[name]
    torch.manual_seed(0)
    return build_mixer(mixer, hidden_size=HIDDEN, num_heads=HEADS, **published(mixer, options))


def default_layer(mixer: str) -> nn.Module:
    torch.manual_seed(0)
    return build_mixer(mixer, hidden_size=HIDDEN, num_heads=HEADS)


def first_model(name: str) -> FastWeightsForCausalLM:
    sizes = dict(MODELS[name])
    entries = sizes["mixer"] if isinstance(sizes["mixer"], list) else [sizes["mixer"]] * sizes["num_hidden_layers"]
    sizes["mixer"] = [{"name": one, **published(one, options)} for one, options in map(split_entry, entries)]
    torch.manual_seed(0)
    return FastWeightsForCausalLM(FastWeightsConfig(**sizes))


def tokens() -> Tensor:
    return (torch.arange(26) * 7 % 11).view(2, 13)


def main() -> None:
    stored = {
        "layers": {name: fingerprint(first_layer(name)) for name in LAYERS},
        "defaults": {name: fingerprint(default_layer(name)) for name in ORDER if published(name)},
        "models": {name: fingerprint(first_model(name)) for name in MODELS},
    }
    if not CHECKPOINT.exists():
        torch.manual_seed(1)
        sizes = {"vocab_size": 11, "hidden_size": 4, "num_heads": 1, "intermediate_size": 0}
        model = FastWeightsForCausalLM(
            FastWeightsConfig(**sizes, num_hidden_layers=len(SAVED_MIXERS), mixer=list(SAVED_MIXERS))
        ).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
            model.save_pretrained(CHECKPOINT)
            logits = model(tokens()).logits
        (CHECKPOINT / "logits.json").write_text(json.dumps(logits.tolist()) + "\n")
    STORED.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
