"""The language models with their output layer: logits, loss and generation."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from ..checks import check_number
from .cache import CACHE_NAME, FastWeightsCache, given_cache, named_cache
from .configuration import FastWeightsConfig
from .divided_rows import DividedRows, sum_over_ranks
from .generation import CachedGenerationMixin
from .inputs import check_labels, is_batch, kept_positions
from .loss import OutputLayer
from .modeling import FastWeightsModel, FastWeightsPreTrainedModel
from .rows import cumulative_lengths, predicted_labels

__all__ = ["FastWeightsForCausalLM"]


class FastWeightsForCausalLM(FastWeightsPreTrainedModel, CachedGenerationMixin):
    """The model with an output layer: token ids to logits over the next token."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _predicts_labels = True

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)
        self.model = FastWeightsModel(config)
        self.lm_head = OutputLayer(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def train(self, mode: bool = True) -> FastWeightsForCausalLM:
        if mode:
            self.release_step_graphs()
        return super().train(mode)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        """Weights on another device or of another dtype, as of `to()` and `half()`, leave nothing to the graphs of before."""
        before = [(x.device, x.dtype) for x in self.parameters()]
        applied = super()._apply(*args, **kwargs)
        if [(x.device, x.dtype) for x in self.parameters()] != before:
            self.release_step_graphs()
        return applied

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        num_items_in_batch: int | Tensor | None = None,
        position_ids: Tensor | None = None,
        cu_seq_lens_q: Tensor | None = None,
        cu_seq_lens_k: Tensor | None = None,
        max_length_q: int | None = None,
        max_length_k: int | None = None,
        seq_idx: Tensor | None = None,
        cache_position: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        cache: FastWeightsCache | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits [B, T, vocab_size], and the loss where labels are given.

        With labels, config.chunked_loss (the default) and an ordinary output layer and loss function, the loss is computed
        from the hidden states, a chunk of tokens at a time: the logits of all tokens, which with a large vocabulary outweigh
        everything else, are never stored. A model in training mode then returns logits None, unless logits_to_keep is given.
        With context parallelism (`fastweights.distributed.context_parallel`) the loss is that of all ranks. Logits are those of
        this rank's part of the tokens, none beside a loss; with logits_to_keep they are the same on every rank.

        An output layer that was replaced or hooked (PEFT on lm_head, quantised) or a custom `loss_function` gets the logits of
        all tokens, as everywhere in transformers.

        Args:
            labels: int64 [B, T], the input ids; the model shifts them: each token predicts the next one. -100 is ignored, and so
                are padding and the first token of every packed or padded sequence, which no token predicts.
            logits_to_keep: how many of the last positions get logits (0: all), or the positions as a tensor [P]. None is 0,
                or no logits at all as said above.
            num_items_in_batch: what the summed loss is divided by (Trainer's gradient accumulation): the number of labels of a
                step that are not ignored. When None: the number of those in this batch.
            input_ids, attention_mask, past_key_values, inputs_embeds, use_cache: as for `FastWeightsModel`.
            cu_seqlens, output_hidden_states, output_attentions, position_ids: as for `FastWeightsModel`.
            cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, seq_idx: as for `FastWeightsModel`.
            cache_position, token_type_ids, cache: as for `FastWeightsModel`.

        Raises:
            ValueError: an input that does not fit.
        """
        past_key_values = given_cache(past_key_values, cache)
        if isinstance(past_key_values, FastWeightsCache):
            packed = cu_seqlens, position_ids, cu_seq_lens_q, cu_seq_lens_k, seq_idx
            others = inputs_embeds, labels, output_hidden_states, *packed
            plain_ids = input_ids if all(x is None for x in others) else None
            next_logits = None
            if past_key_values.prompts is not None and logits_to_keep == 1:
                next_logits = past_key_values.prompts.read(plain_ids, attention_mask, past_key_values)
            elif past_key_values.steps is not None:
                next_logits = past_key_values.step(plain_ids)
            if next_logits is not None:
                return CausalLMOutputWithPast(logits=next_logits, **named_cache(past_key_values))
        cu_seqlens = cumulative_lengths(cu_seqlens, cu_seq_lens_q, cu_seq_lens_k)
        documents = dict(
            attention_mask=attention_mask, position_ids=position_ids, cu_seqlens=cu_seqlens, seq_idx=seq_idx
        )
        tokens: Any = input_ids if inputs_embeds is None else inputs_embeds
        if is_batch(tokens):
            kept = kept_positions(logits_to_keep, tokens.shape[1])
            if labels is not None:
                check_labels(labels, tokens, self.config.vocab_size)
                if num_items_in_batch is not None and not isinstance(num_items_in_batch, Tensor):
                    check_number("num_items_in_batch", num_items_in_batch, above=0)
        outputs = self.model(
            input_ids=input_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            output_attentions=output_attentions,
            cache_position=cache_position,
            return_dict=True,
            **documents,
        )
        hidden_BTD = whole_BTD = outputs.last_hidden_state
        cp, rows = self.cp_group, None
        if cp is not None:
            rows = DividedRows(cp, tokens.shape, tokens.device, **documents)
            if logits_to_keep is not None:
                whole_BTD = rows.unpack(hidden_BTD)
        kept_BPD = whole_BTD[:, kept]
        loss = logits = None
        if labels is not None:
            labels = predicted_labels(labels, **documents)
            given = {"labels": labels, "num_items_in_batch": num_items_in_batch}
            if rows is not None:
                given = rows.divide_loss(labels, num_items_in_batch)
            if self._can_chunk_loss():
                if logits_to_keep is None and (self.training or rows is not None):
                    kept_BPD = None
                loss, logits = self.lm_head(hidden_BTD, kept_BPD=kept_BPD, **given)
            else:
                every_logit = self.lm_head(hidden_BTD)
                loss = self.loss_function(logits=every_logit, vocab_size=self.config.vocab_size, **given)
                logits = every_logit[:, kept] if whole_BTD is hidden_BTD else self.lm_head(kept_BPD)
            if cp is not None:
                loss = sum_over_ranks(loss, cp)
        else:
            logits = self.lm_head(kept_BPD)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **named_cache(getattr(outputs, CACHE_NAME)),
        )

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """As in transformers, whose `resize_token_embeddings` brings a plain `nn.Linear`."""
        self.lm_head = OutputLayer.from_linear(new_embeddings)

    def _can_chunk_loss(self) -> bool:
        """Whether the output layer and the loss are those that the chunked loss computes."""
        ours = isinstance(self.lm_head, OutputLayer) and self.lm_head.is_unchanged()
        return self.config.chunked_loss and ours and self.loss_function is ForCausalLMLoss
