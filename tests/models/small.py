"""Small models and inputs for the tests."""

from typing import Any

import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

VOCABULARY = 32
HYBRID = ["pgdn", {"name": "softmax", "qk_norm": True}, "pgla"]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
MIXED = [*HYBRID, {"name": "softmax", "window": 5}]
# left-padded; the first block of three holds no token at all
PROMPTS = torch.tensor([[0] * n + [1] * (12 - n) for n in (3, 5, 11)])


def config(mixer: Any = "gdn", **options: Any) -> FastWeightsConfig:
    layers = len(mixer) if isinstance(mixer, list) else 2
    return FastWeightsConfig(
        **{"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": layers, "num_heads": 2, **options},
        mixer=mixer,
    )


def model(mixer: Any = "gdn", **options: Any) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    return FastWeightsForCausalLM(config(mixer, **options)).eval()


def tokens(batch: int = 2, time: int = 19) -> torch.Tensor:
    return torch.randint(VOCABULARY, (batch, time), generator=torch.Generator().manual_seed(1))
