"""A body of language models between two linear layers: vectors to vectors."""

from __future__ import annotations

from torch import Tensor, nn

from ..checks import LARGEST_WIDTH, check_size
from ..kinds import checked
from .configuration import FastWeightsConfig
from .modeling import FastWeightsModel

__all__ = ["VectorModel"]


@checked
class VectorModel(nn.Module):
    """y = W_out body(W_in x), causal: tasks whose tokens are vectors read and answer through linear layers.

    Args:
        config: of the body; its vocab_size plays no part.
        inputs: channels of the input vectors.
        outputs: channels of the output vectors.
    """

    def __init__(self, config: FastWeightsConfig, *, inputs: int, outputs: int) -> None:
        super().__init__()
        check_size("inputs", inputs, high=LARGEST_WIDTH)
        check_size("outputs", outputs, high=LARGEST_WIDTH)
        self.read_in = nn.Linear(inputs, config.hidden_size)
        self.model = FastWeightsModel(config)
        del self.model.embed_tokens
        self.read_out = nn.Linear(config.hidden_size, outputs)

    def forward(self, x_BTI: Tensor) -> Tensor:
        """[B, T, inputs] to [B, T, outputs]; with context parallelism to those of this rank's part of the tokens."""
        embedded = self.read_in(x_BTI)
        return self.read_out(self.model(inputs_embeds=embedded, use_cache=False).last_hidden_state)

    def _init_weights(self, module: nn.Module) -> None:
        """First values of one module: those of torch for the layers that read and answer, the body's for all others."""
        if module in (self.read_in, self.read_out):
            module.reset_parameters()
        elif module is not self:
            self.model._init_weights(module)

    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def state_size(self, length: int = 1) -> int:
        """How many numbers the memories of all layers hold per sequence after `length` tokens."""
        return self.model.state_size(length)
