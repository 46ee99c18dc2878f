"""The language models as vLLM builds them: our blocks, with memories and attention whose states vLLM keeps."""

from collections.abc import Iterable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import check_version

check_version()

# ruff: noqa: E402
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.mamba.mamba_utils import get_temporal_copy_spec
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.models.interfaces import HasInnerState, IsHybrid, SupportsLoRA
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.platforms import current_platform
from vllm.sequence import IntermediateTensors

from ...layers import SoftmaxAttention
from ...layers.attention import rotate, rotation
from ...layers.norms import normalize_sum
from ...layers.shared_input import normalize_for
from ...models import FastWeightsConfig
from ...models.modeling import FastWeightsBlock, make_norm
from ...models.parts import find_divisions, part_of_config, take_parts
from .linear import Rows, replace_projections
from .memory import ServedMemory, overlapped
from .pool import StateBlock
from .prompts import PromptGraphs

__all__ = ["FastWeightsForCausalLM"]


class ServedAttention(Attention):
    """Softmax attention: our layer's projections, norms and rotation around vLLM's own attention.

    Args:
        mixer: the layer, which stays a module of its block.
        name: of the layer in vLLM.
    """

    def __init__(self, mixer: SoftmaxAttention, name: str) -> None:
        super().__init__(
            mixer.options.num_heads,
            mixer.head_dim,
            mixer.head_dim**-0.5,
            num_kv_heads=mixer.num_kv_heads,
            cache_config=get_current_vllm_config().cache_config,
            per_layer_sliding_window=mixer.window,
            prefix=name,
        )
        if mixer.options.conv_size is not None or mixer.options.activation != "none":
            raise ValueError(
                "conv_size and activation of softmax layers must be left out in vLLM, whose cache has no place for the inputs of "
                "convolutions; generate with `fastweights generate`"
            )
        # On a CPU vLLM would notice at the first request, and end.
        if not self.attn_backend.supports_head_size(mixer.head_dim):
            sizes = ", ".join(map(str, self.attn_backend.get_supported_head_sizes()))
            raise ValueError(f"head_dim of softmax layers must be one of {sizes} in vLLM here, got {mixer.head_dim}")

    def normalize(self, mixer: Any, norm: Any, x_T1D: Tensor) -> tuple[Tensor, Tensor]:
        return normalize_sum(norm, x_T1D, None)

    def mix(self, mixer: Any, x_T1D: Tensor, position_T: Tensor) -> Tensor:
        """The output of the layer for the tokens of a step."""
        width, x_TD = mixer.head_dim, x_T1D[:, 0]
        q_THK = mixer.q_norm(mixer.q_proj(x_TD).unflatten(1, (-1, width)))
        k_THK = mixer.k_norm(mixer.k_proj(x_TD).unflatten(1, (-1, width)))
        if mixer.rope_theta is not None:
            angles = rotation(position_T[None], width, mixer.rope_theta, x_TD.dtype, mixer.rope_scaling)
            cos, sin = (y[0] for y in angles)
            q_THK, k_THK = rotate(q_THK, cos, sin), rotate(k_THK, cos, sin)
        o_TD = self(q_THK.flatten(1), k_THK.flatten(1), mixer.v_proj(x_TD))
        return mixer.o_proj(o_TD)[:, None]


class ServedBlock(FastWeightsBlock):
    """A block of our models for the tokens [T, D] of one step of all sequences."""

    def __init__(self, config: FastWeightsConfig, layer: int, block: StateBlock, rows: Rows, name: str) -> None:
        super().__init__(config, layer)
        self.served: ServedAttention | ServedMemory
        if isinstance(self.mixer, SoftmaxAttention):
            self.served = ServedAttention(self.mixer, f"{name}.attention")
        else:
            self.served = ServedMemory(self.mixer, block, rows, f"{name}.memory")

    def forward(self, x_T1D: Tensor, position_T: Tensor) -> Tensor:  # type: ignore[override]
        """As the block of our models reads single tokens, so that the same kernels join what is small."""
        # Over the processes, each of which has some heads and part of the MLP.
        summed = tensor_model_parallel_all_reduce
        x_T1D, normed_T1D = self.served.normalize(self.mixer, self.mixer_norm, x_T1D)
        mixed_T1D = summed(self.served.mix(self.mixer, normed_T1D, position_T))
        if self.mlp is None:
            return x_T1D + mixed_T1D
        x_T1D, normed_T1D = normalize_for(self.mlp, self.mlp_norm, x_T1D, mixed_T1D)
        if get_tensor_model_parallel_world_size() == 1:
            return self.mlp(normed_T1D, x_T1D)
        return x_T1D + summed(self.mlp(normed_T1D))


@support_torch_compile
class ServedModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config, block = vllm_config.model_config.hf_config, StateBlock.largest(vllm_config)
        parts = vllm_config.parallel_config.tensor_parallel_size
        part, rows = part_of_config(config, parts), Rows()
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            ServedBlock(part, layer, block, rows, f"{prefix}.layers.{layer}")
            for layer in range(config.num_hidden_layers)
        )
        mixers = [cast(ServedBlock, one).mixer for one in self.layers]
        take_parts(mixers, config, get_tensor_model_parallel_rank(), parts, tensor_model_parallel_all_gather)
        self.norm = make_norm(config)
        if vllm_config.lora_config is not None or vllm_config.quant_config is not None:
            divisions = find_divisions(config, parts)
            for layer, one in enumerate(self.layers):
                replace_projections(one, vllm_config, f"{prefix}.layers.{layer}", rows, divisions)

    # vLLM's compiler looks at the types of these arguments.
    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x_TD = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        x_T1D = x_TD[:, None]
        for block in self.layers:
            x_T1D = block(x_T1D, positions)
        return normalize_sum(self.norm, x_T1D[:, 0], None)[1]


class ExactLogits(UnquantizedEmbeddingMethod):
    """The product of an output layer as our model computes it, bit for bit: by torch, without the words with which vLLM fills up
    the vocabulary. On a CPU vLLM has a product of its own."""

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def process_weights_after_loading(
        self, layer: nn.Module
    ) -> None: ...  # vLLM would pack the weights for its product

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.linear(x, layer.weight[: self.vocab_size], bias)


def adapted_embeddings(dtype: torch.dtype) -> dict[str, str]:
    """The layers beside the projections that take adapters, as vLLM calls them. vLLM's kernels for these give requests without an
    adapter one of the others' on a CPU, and take 16 bits only on a GPU."""
    if current_platform.is_cpu() or dtype == torch.float32:
        return {}
    return {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}


class FastWeightsForCausalLM(nn.Module, HasInnerState, IsHybrid, SupportsLoRA):
    """`fastweights.models.FastWeightsForCausalLM` in vLLM, with the same names of weights."""

    # For adapters, as `embedding_modules` below: no projections are joined.
    packed_modules_mapping: dict[str, list[str]] = {}

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = config = vllm_config.model_config.hf_config
        self.embedding_modules = adapted_embeddings(vllm_config.model_config.dtype)
        if vllm_config.model_config.runner_type == "draft" and "linear_attention" in config.layer_types:
            raise ValueError(
                "a draft model in vLLM must have softmax layers only, because vLLM takes no token of a draft model's memory back"
            )
        self.model = ServedModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        self.lm_head = ParallelLMHead(config.vocab_size, config.hidden_size, prefix=maybe_prefix(prefix, "lm_head"))
        if config.tie_word_embeddings:
            self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        parts, dtype = vllm_config.parallel_config.tensor_parallel_size, vllm_config.model_config.dtype
        if current_platform.is_cpu() and dtype == torch.float32 and parts == 1 and vllm_config.quant_config is None:
            self.lm_head.quant_method = ExactLogits(config.vocab_size)
        self.logits_processor = LogitsProcessor(config.vocab_size)
        served = [one.served for one in self.model.layers]
        names = [one.name for one in served if isinstance(one, ServedMemory)]
        graphs = vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs() and current_platform.is_cuda()
        self.prompts: PromptGraphs | None = None
        if graphs and parts == 1 and vllm_config.lora_config is None and len(names) == len(served):
            self.prompts = PromptGraphs(self.model, names, drafted=vllm_config.speculative_config is not None)

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return StateBlock.largest(vllm_config).shapes

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return StateBlock.largest(vllm_config).dtypes

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple[Any, ...]:
        return (get_temporal_copy_spec,)  # a block is copied whole, see `ServedMemory.bind_kv_cache`

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        if self.prompts is not None and inputs_embeds is None:
            hidden_TD = self.prompts.read(input_ids, positions)
            if hidden_TD is not None:
                return hidden_TD
        with overlapped(positions.device):
            return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.logits_processor(self.lm_head, hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        rank = get_tensor_model_parallel_rank()
        divisions = find_divisions(self.config, get_tensor_model_parallel_world_size())

        def part(name: str, weight: Tensor) -> Tensor:
            # Embeddings are not divided here: vLLM's own layers take their part by themselves.
            return divisions[name].take(weight, rank) if name in divisions else weight

        loaded = AutoWeightsLoader(self).load_weights((name, part(name, weight)) for name, weight in weights)
        for block in self.model.layers:
            if isinstance(block.served, ServedMemory):
                block.served.weights_changed()
        if self.prompts is not None:
            self.prompts.clear()
        return loaded
