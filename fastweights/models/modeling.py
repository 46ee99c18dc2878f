"""The body of the language models, as a transformers model: token ids to hidden states, through blocks of a sequence mixer and an
MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils import can_return_tuple

from ..checks import check_flag, check_whole_number, describe_value, shape_of
from ..layers import LayerCache, build_mixer
from ..layers.initialization import ResidualProjection
from ..layers.norms import LayerNorm, RMSNorm, normalize_sum
from ..layers.shared_input import (
    InputProducts,
    is_plain,
    joins,
    multiply,
    normalize_for,
    project_jointly,
    project_together,
    project_trained,
    trains_jointly,
    trains_on_gpu,
)
from ..layers.wrapped import is_bare
from ..ops.context_parallel.group import ContextParallel
from ..ops.framework.sequences import check_cu_seqlens
from ..ops.joined_product import product_dtype
from ..ops.linear_rows import Product, linear_rows
from ..ops.silu_product import silu_product, silu_product_of_halves
from .cache import CACHE_NAMES, FastWeightsCache, check_cache, given_cache, named_cache
from .configuration import FastWeightsConfig
from .divided_rows import DividedRows, check_same_batch
from .inputs import check_cache_position, check_embeddings, check_ids
from .own import OwnModel
from .recording import reads_again
from .rows import Rows, check_mask, cumulative_lengths

__all__ = ["FastWeightsBlock", "FastWeightsModel", "FastWeightsPreTrainedModel", "make_norm"]


HALF_COLUMNS = 32  # of the joint projection of an MLP, whose rows torch.compile does not fill up


def make_norm(config: FastWeightsConfig) -> RMSNorm | LayerNorm:
    """A norm of the residual stream."""
    return (RMSNorm if config.norm == "rms" else LayerNorm)(config.hidden_size, eps=config.norm_eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) * W_up x)"""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = ResidualProjection(intermediate_size, hidden_size)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """The result, added to the residual where one is given."""
        if joins(x, self.gate_proj, self.up_proj, self.down_proj):
            h = multiply(x, *self.input_products()[0])
            if residual is not None and residual.dtype == h.dtype:
                return linear_rows(h, self.down_proj.weight, kind="add", other=residual)[0]
        elif trains_jointly(x, self.gate_proj, self.up_proj) and len(self.gate_proj.weight) % HALF_COLUMNS == 0:
            h = silu_product_of_halves(project_jointly(x, self.gate_proj, self.up_proj))
        else:
            h = silu_product(*project_together(x, self.gate_proj, self.up_proj))
        y = project_trained(h, self.down_proj)
        return y if residual is None else residual + y

    def input_products(self) -> InputProducts:
        if not (is_plain(self.gate_proj) and is_plain(self.up_proj)):
            return []
        return [(self.gate_proj, Product(self.gate_proj.weight, "swiglu", more=self.up_proj.weight))]


class FastWeightsBlock(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the second part is missing where intermediate_size is 0."""

    def __init__(self, config: FastWeightsConfig, layer_idx: int) -> None:
        super().__init__()
        name, options = config.mixer_of(layer_idx)
        self.mixer_norm = make_norm(config)
        self.mixer = build_mixer(
            name, hidden_size=config.hidden_size, num_heads=config.num_heads, layer_idx=layer_idx, **options
        )
        self.mlp = None
        if config.intermediate_size:
            self.mlp_norm = make_norm(config)
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size)

    def forward(
        self,
        x_BTD: Tensor,
        past_key_values: LayerCache | None = None,
        cu_seqlens: Tensor | None = None,
        first_values: Tensor | None = None,
        values_only: bool = False,
        branch_BTD: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """past_key_values: this layer's cache, under the name that transformers' checkpointing knows to leave out. values_only:
        return the values of the mixer, which later blocks take as first_values. That is a call of the block, too, because
        sharded or offloaded weights are there only within one. branch_BTD: what is still to be added to x_BTD; the block then
        returns its own last branch beside the stream, too."""
        if values_only:
            return self.mixer.values(normalize_sum(self.mixer_norm, x_BTD, None)[1], past_key_values, cu_seqlens)
        x_BTD, normed_BTD = normalize_for(self.mixer, self.mixer_norm, x_BTD, branch_BTD)
        given = {"first_values": first_values} if self.mixer.takes_first_values else {}
        mixed_BTD = self.mixer(normed_BTD, cache=past_key_values, cu_seqlens=cu_seqlens, **given)
        if self.mlp is None:
            return x_BTD + mixed_BTD if branch_BTD is None else (x_BTD, mixed_BTD)
        x_BTD, normed_BTD = normalize_for(self.mlp, self.mlp_norm, x_BTD, mixed_BTD)
        if branch_BTD is not None:
            return x_BTD, self.mlp(normed_BTD)
        return self.mlp(normed_BTD, x_BTD)


class FastWeightsPreTrainedModel(OwnModel, PreTrainedModel):
    """The settings that transformers needs to build, load and save these models.

    Attributes:
        cp_group: the ranks that each compute a part of the tokens, set by `fastweights.distributed.context_parallel`; None where
            each process has sequences of its own. All ranks are called with the same whole batch.
    """

    cp_group: ContextParallel | None = None
    config_class = FastWeightsConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["FastWeightsBlock"]
    _skip_keys_device_placement = list(CACHE_NAMES)
    _supports_sdpa = True

    def __init__(self, config: FastWeightsConfig) -> None:
        if not isinstance(config, FastWeightsConfig):
            raise TypeError(
                f"config must be a FastWeightsConfig, got {describe_value(config)}; make one of your settings"
            )
        super().__init__(config)

    def state_size(self, length: int = 1) -> int:
        """How many numbers the memories of all layers hold per sequence after `length` tokens."""
        check_whole_number("length", length)
        blocks: Any = self.base_model.layers
        return sum(block.mixer.state_size(length) for block in blocks)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """As in `OwnModel`, with smaller values for matrices that write to the residual stream."""
        if isinstance(module, ResidualProjection):
            std = self.config.initializer_range
            if self.config.scale_residuals:
                std *= self.config.num_branches**-0.5
            init.normal_(module.weight, std=std)
            if module.bias is not None:
                init.zeros_(module.bias)
        else:
            super()._init_weights(module)


class FastWeightsModel(FastWeightsPreTrainedModel):
    """Embedding, blocks and a final norm: token ids to hidden states.

    Attributes:
        gathers: whether a rank returns the hidden states of all ranks with context parallelism, and not of its part alone.
    """

    gathers = False
    _compared: ContextParallel | None = None  # the ranks whose batches have been compared, once: it waits for a GPU

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(FastWeightsBlock(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = make_norm(config)
        self.gradient_checkpointing = False
        self.post_init()

    @can_return_tuple
    @reads_again
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        output_hidden_states: bool | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        cache_position: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache: FastWeightsCache | None = None,
        output_attentions: bool | None = None,
    ) -> BaseModelOutputWithPast:
        """Hidden states [B, T, D] after the final norm; with context parallelism those of this rank's part of the tokens,
        [1, part, D] (`fastweights.distributed.gather_tokens` has all of them).

        Args:
            input_ids: int64 [B, T], or inputs_embeds [B, T, D] in their place.
            attention_mask: [B, T] (with a cache also longer, cached tokens first): 0 for padding, which may be on any side, and
                for tokens 1, or a number above 0 per document, which parts the documents of a row. Additive masks are refused.
                The values are read, which waits for a GPU once and breaks a compiled graph; cu_seqlens avoid both.
            past_key_values: cache of an earlier call, updated in place; the input continues the sequences that it has read.
            use_cache: whether to create a cache where none is given. When None: config.use_cache in evaluation mode, False in
                training mode and with context parallelism.
            cu_seqlens: int [N+1], cumulative lengths of sequences packed into one row (B = 1).
            output_hidden_states: whether to return the embeddings and every block's output too.
            position_ids: int [B, T] or [1, T], positions within documents, as packing collators send them. Within a document they
                rise by one per token; a position that does not rise starts the next document. A row may hold several
                documents. With a cache they must continue where its sequences ended. Their values are read, which waits for a
                GPU; cu_seqlens avoid that.
            cu_seq_lens_q, cu_seq_lens_k: the same as cu_seqlens, under the names of transformers' packing collators.
            max_length_q, max_length_k: sent with these by collators; not needed.
            seq_idx: int [B, T] or [1, T], the number of each token's document in its row, as collators of transformers and TRL
                send it; below 0 for padding. Read like attention_mask. Beside cu_seqlens, which then decide, position_ids and
                seq_idx are only compared with them: on a CPU, or with FASTWEIGHTS_CHECK_VALUES=1.
            cache_position: int [T], the columns of the input, counted from the first one that past_key_values has read. Only
                compared with the cache, where positions are compared.
            token_type_ids: sent by some tokenizers; without meaning here.
            cache: another name of past_key_values, which transformers uses from 5.24 on.
            output_attentions: only False: a memory has no attention weights.

        Raises:
            ValueError: an input that does not fit.
        """
        past_key_values = given_cache(past_key_values, cache)
        if output_attentions:
            raise ValueError("output_attentions must be False: the layers have no attention weights to return")
        batch, time = self._check_inputs(input_ids, inputs_embeds)
        cu_seqlens = cumulative_lengths(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        check_cu_seqlens(cu_seqlens, batch, time)
        if attention_mask is not None:
            _check_columns(attention_mask, past_key_values, batch, time)
        documents = dict(
            attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens, seq_idx=seq_idx
        )
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        cp = self.cp_group
        rows = (
            Rows(batch, time, **documents) if cp is None else DividedRows(cp, tokens.shape, tokens.device, **documents)
        )
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cp is None
        if use_cache and past_key_values is None:
            past_key_values = FastWeightsCache.empty(self.config.num_hidden_layers)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        check_flag("use_cache", use_cache)
        check_flag("output_hidden_states", output_hidden_states)
        if isinstance(past_key_values, FastWeightsCache) and past_key_values.drafts is not None:
            others = inputs_embeds, output_hidden_states or None, cu_seqlens, position_ids, seq_idx
            plain_ids = input_ids if all(x is None for x in others) else None
            drafted_BTD = past_key_values.drafts.read(plain_ids, attention_mask, past_key_values)
            if drafted_BTD is not None:
                return BaseModelOutputWithPast(last_hidden_state=drafted_BTD, **named_cache(past_key_values))
        # generate() lowers the number to draft with the first layers
        blocks = self.layers[: self.config.num_hidden_layers]
        caches = [None] * len(blocks) if past_key_values is None else self._layer_caches(past_key_values, rows.count)
        if past_key_values is not None:
            past_key_values.check_positions(rows.first_position, rows.lengths)
        check_cache_position(cache_position, 0 if past_key_values is None else past_key_values.columns, time)
        if cp != self._compared and not torch.compiler.is_compiling():
            if cp is not None:
                check_same_batch(cp, tokens)
            self._compared = cp
        if inputs_embeds is not None:
            x_BTD = rows.pack(inputs_embeds)
        elif cp is None:
            x_BTD = rows.pack(self.embed_tokens(tokens))
        else:  # a rank embeds its own tokens alone
            x_BTD = self.embed_tokens(rows.pack(tokens))

        hidden_states: tuple[Tensor, ...] = ()
        first_values = branch_BTD = None
        alone = past_key_values is None and cp is None and not output_hidden_states
        if alone and x_BTD.shape[1] and trains_on_gpu(x_BTD) and all(map(self._adds_later, blocks)):
            x_BTD, branch_BTD = self._run_adding_later(x_BTD, blocks, rows.cu_seqlens)
            blocks, caches = blocks[:0], []
        for block, layer_cache in zip(blocks, caches, strict=True):
            hidden_states += (x_BTD,) if output_hidden_states else ()
            if x_BTD.shape[1] or not rows.time:  # a block of a padded prompt may be padding alone
                given = {"past_key_values": layer_cache, "cu_seqlens": rows.cu_seqlens}
                first_values = self.find_values(block, x_BTD, first_values, given)
                x_BTD = block(x_BTD, first_values=first_values, **given)
        x_BTD = self.norm(x_BTD) if branch_BTD is None else normalize_sum(self.norm, x_BTD, branch_BTD, x_BTD.dtype)[1]
        if past_key_values is not None:
            past_key_values.advance(rows.time, rows.first_position, rows.lengths)
        hidden_states += (x_BTD,) if output_hidden_states else ()
        if cp is None or self.gathers:
            x_BTD, hidden_states = rows.unpack(x_BTD), tuple(map(rows.unpack, hidden_states))
        return BaseModelOutputWithPast(
            last_hidden_state=x_BTD,
            hidden_states=hidden_states or None,
            **named_cache(past_key_values),
        )

    def _adds_later(self, block: Any) -> bool:
        """Whether the next block may add a block's last branch to the stream, within its first norm."""
        mixer = block.mixer
        return not (
            ((self.gradient_checkpointing or block.gradient_checkpointing) and self.training)
            or mixer.gives_values
            or mixer.takes_first_values
            or not is_bare(block, FastWeightsBlock)
        )

    def _run_adding_later(self, x_BTD: Tensor, blocks: Any, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
        """The stream after the blocks without the last branch, and this branch. That of the first is zero, and needs a gradient
        as the others do, so that one graph serves all that are compiled."""
        branch_BTD = torch.zeros_like(x_BTD, dtype=product_dtype(x_BTD)).requires_grad_()
        for block in blocks:
            x_BTD, branch_BTD = block(x_BTD, cu_seqlens=cu_seqlens, branch_BTD=branch_BTD)
        return x_BTD, branch_BTD

    def find_values(
        self, block: Any, x_BTD: Tensor, first_values: Tensor | None, given: dict[str, Any]
    ) -> Tensor | None:
        """The values of the first block that has some, where later blocks take them: found already, or those of this block."""
        if first_values is not None or not block.mixer.gives_values:
            return first_values
        blocks: Any = self.layers
        is_taken = any(one.mixer.takes_first_values for one in blocks)
        return block(x_BTD, values_only=True, **given) if is_taken else None

    def _check_inputs(self, input_ids: Tensor | None, inputs_embeds: Tensor | None) -> torch.Size:
        """Batch and time of the input."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass either input_ids or inputs_embeds, not both or neither")
        if inputs_embeds is None:
            return check_ids(input_ids, self).shape
        return check_embeddings(inputs_embeds, self.config.hidden_size, self).shape[:2]

    def _layer_caches(self, past_key_values: FastWeightsCache, sequences: int) -> list[LayerCache]:
        check_cache(past_key_values, self.config.num_hidden_layers)
        if self.cp_group is not None:
            raise ValueError(
                "past_key_values must be None and use_cache False with context parallelism, where no rank has whole sequences; "
                "call fastweights.distributed.whole_sequences(model) before generating"
            )
        if past_key_values.batch_size not in (-1, sequences):
            raise ValueError(
                f"past_key_values must hold as many sequences as the input, {sequences}, got {past_key_values.batch_size}; "
                "start without a cache for other sequences"
            )
        if self.training and self.gradient_checkpointing:
            raise ValueError(
                "past_key_values must be None and use_cache False while training with gradient checkpointing, which would "
                "update the cache twice; call eval() before generating"
            )
        return past_key_values.layers


def _check_columns(attention_mask: Tensor, cache: object, batch: int, time: int) -> None:
    """Columns of a mask before the input stand for what a cache has read, which may be padding alone."""
    check_mask(attention_mask, batch, time)
    has_read = isinstance(cache, FastWeightsCache) and (cache.is_initialized or cache.columns)
    if attention_mask.shape[1] > time and not has_read:
        raise ValueError(
            f"attention_mask must be [{batch}, {time}] without the cache of earlier columns, got shape "
            f"{shape_of(attention_mask)}; leave out what the input does not hold"
        )
