"""A language model of this library as torchtitan builds, initialises and calls it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torchtitan.protocols.model import BaseModel

from ...models import FastWeightsConfig, FastWeightsForCausalLM
from ...private_torch import size_may_change
from ...training.language import LanguageRun
from ...training.language.estimate import step_operations
from .limits import check_settings

__all__ = ["Blocks", "TitanModel", "document_edges"]


class Blocks(nn.ModuleList):
    """Blocks that torchtitan reads as the dictionary that its own models keep them in."""

    def items(self) -> list[tuple[str, nn.Module]]:
        return list(self.named_children())


class TitanModel(BaseModel):
    """`FastWeightsForCausalLM` without its loss: token ids to logits. Parameters have the names of the saved model."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        """architecture: the configuration of the model."""

        architecture: FastWeightsConfig

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:
            """torchtitan's hook before the model is built: refuses settings of the trainer that do not fit the model."""
            check_settings(config)

        def get_nparams_and_flops(self, model: nn.Module, seq_len: int) -> tuple[int, int]:
            """Number of parameters, and operations per token of a forward and a backward, without those of the memories."""
            count = sum(parameter.numel() for parameter in model.parameters())
            return count, int(step_operations(LanguageRun(length=seq_len), cast(Any, model)))

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config.architecture
        whole = FastWeightsForCausalLM(self.config)
        self.model, self.lm_head = whole.model, whole.lm_head
        self.model.layers = Blocks(self.model.layers)
        self._skip_lm_head = False  # torchtitan's chunked loss sets it, and calls the output layer itself

    # Names that torchtitan's functions look for.
    @property
    def tok_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @property
    def layers(self) -> Blocks:
        return self.model.layers

    @property
    def norm(self) -> nn.Module:
        return self.model.norm

    @property
    def enable_weight_tying(self) -> bool:
        return self.config.tie_word_embeddings

    def verify_module_protocol(self) -> None:
        """Nothing to verify: blocks are modules of this library, whose first values `init_states` draws."""

    def tie_weights(self) -> None:
        """Let the output layer have the embedding's weight again, where the configuration asks for it."""
        if self.enable_weight_tying:
            self.lm_head.weight = self.model.embed_tokens.weight

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """First weights, bit for bit those that `FastWeightsForCausalLM` draws from the same seed, however they are divided.
        The first process draws them in main memory."""
        self.tie_weights()
        several = torch.distributed.is_initialized()
        whole = {}
        if not several or torch.distributed.get_rank() == 0:
            with torch.device("cpu"):
                whole = FastWeightsForCausalLM(self.config).state_dict()
        set_model_state_dict(self, whole, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=several))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size], or hidden states [B, T, D] for the chunked loss.

        Under context parallelism the input is the whole batch, and the output that of this process's tokens, [1, B T / N, ...].

        Args:
            tokens: int64 [B, T].
            positions: int64 [B, T], positions within documents, as torchtitan's data loaders give them: a position that does
                not rise by one starts the next document. None where every row is one document.
        """
        batch = tokens.shape[0]
        if positions is None:
            hidden = self.model(input_ids=tokens, use_cache=False).last_hidden_state
        else:
            edges = document_edges(positions)
            hidden = self.model(input_ids=tokens.reshape(1, -1), cu_seqlens=edges, use_cache=False).last_hidden_state
            if hidden.shape[1] == tokens.numel():
                hidden = hidden.reshape(batch, -1, hidden.shape[-1])
        return hidden if self._skip_lm_head else self.lm_head(hidden)


def document_edges(positions: Tensor) -> Tensor:
    """Cumulative lengths int32 [N + 1] of the documents of rows [B, T] laid end to end. A single one gets an empty one behind
    it, so that torch.compile makes no code of its own for it. The host waits for the device once."""
    begins = torch.nn.functional.pad(positions.diff() != 1, (1, 0), value=True).flatten()
    edges = begins.nonzero()[:, 0]
    ends = edges.new_full((1 if len(edges) > 1 else 2,), positions.numel())
    edges = torch.cat([edges, ends]).int()
    size_may_change(edges, 0)
    return edges
