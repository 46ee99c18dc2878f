"""Small trained-looking models to convert."""

from typing import Any

import torch
from torch import nn
from transformers import Mamba2Config, Mamba2ForCausalLM

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

VOCABULARY = 40

MAMBA2: dict[str, dict[str, Any]] = {
    "plain": {"n_groups": 1},
    "groups": {"n_groups": 4, "num_heads": 8, "head_dim": 8},
    "biases": {"n_groups": 2, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3, "tie_word_embeddings": True},
    "steps": {"n_groups": 2, "time_step_limit": (0.02, 0.5), "layer_norm_epsilon": 1e-3, "chunk_size": 16},
}


def trained(model: nn.Module) -> Any:
    """The model with weights that no initialisation gives: norms that are not 1, gates that are not even."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def mamba2(**options: Any) -> Mamba2ForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "state_size": 12, "num_hidden_layers": 2, "n_groups": 1}
    return trained(Mamba2ForCausalLM(Mamba2Config(**{"vocab_size": VOCABULARY, **sizes, **options})))


def model(mixer: Any, **options: Any) -> FastWeightsForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_heads": 2, "vocab_size": VOCABULARY}
    return trained(FastWeightsForCausalLM(FastWeightsConfig(**{**sizes, **options}, mixer=mixer)))


def tokens(count: int = 150) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, count), generator=torch.Generator().manual_seed(1))
