"""The body of the language models with another head: for one label per text, one per token, or the answer to a question.

The heads and their losses are transformers' own. Only where the last token of a text is found differs, see
`FastWeightsForSequenceClassification`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
)
from transformers.modeling_outputs import (
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.utils import can_return_tuple

from ..checks import check_dense, shape_of, values_are_checked, values_can_be_read
from .cache import CACHE_NAME, FastWeightsCache, given_cache, named_cache
from .configuration import FastWeightsConfig
from .inputs import check_classes, check_label_tensor, is_batch
from .modeling import FastWeightsPreTrainedModel
from .rows import Rows, check_mask, own_columns

__all__ = [
    "FastWeightsForQuestionAnswering",
    "FastWeightsForSequenceClassification",
    "FastWeightsForTokenClassification",
]


class SeesAllRanks:
    """In front of a head: with context parallelism every rank gets the hidden states of all, as a text's label may need any."""

    def __init__(self, config: FastWeightsConfig) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        self.model: Any
        self.model.gathers = True


class FastWeightsForSequenceClassification(SeesAllRanks, GenericForSequenceClassification, FastWeightsPreTrainedModel):
    """One row of logits per text, from its last token: a classifier, a regression, or a reward model (num_labels=1)."""

    _accepts_loss_kwargs = False  # the loss is a mean over texts, also where Trainer accumulates gradients

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **kwargs: Any,
    ) -> SequenceClassifierOutputWithPast:
        """Logits [B, num_labels], and the loss where labels are given.

        The last token is the last one that attention_mask shows, on whichever side the padding is, also where the padding token
        is the end-of-text token. Without a mask it is the last one of input_ids that is not config.pad_token_id, as everywhere
        in transformers, and the last column where that is None or where embeddings are given.

        Args:
            labels: int64 [B] for one class of several, -100 for none; floating-point [B] or [B, num_labels] for a regression,
                [B, num_labels] for several classes at once. config.problem_type decides, or, where it is None, num_labels and
                the dtype of the first labels.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as for `FastWeightsModel`.
            output_hidden_states, kwargs: as for `FastWeightsModel`.

        Raises:
            ValueError: an input that does not fit; several documents in one row, which has one label.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if is_batch(tokens):
            refuse_documents(tokens, attention_mask, position_ids, kwargs)
            last_B = self._last_token(input_ids, tokens, attention_mask)
            if labels is not None:
                check_text_labels(labels, tokens.shape[0], self.config)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
            return_dict=True,
            **kwargs,
        )
        hidden_BTD = outputs.last_hidden_state
        rows_B = torch.arange(len(hidden_BTD), device=hidden_BTD.device)
        logits = self.score(hidden_BTD[rows_B, last_B.to(hidden_BTD.device)])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            **named_cache(getattr(outputs, CACHE_NAME)),
        )

    def _last_token(self, input_ids: Tensor | None, tokens: Tensor, attention_mask: Tensor | None) -> Tensor:
        """int64 [B], the column of the last token of every row."""
        batch, time = tokens.shape[:2]
        if attention_mask is not None:
            check_mask(attention_mask, batch, time)
            is_token = own_columns(attention_mask, time) != 0
            if values_are_checked(is_token) and not is_token.any(1).all():
                row = int((~is_token.any(1)).nonzero()[0])
                raise ValueError(
                    f"attention_mask must show a token in every row, got none in row {row}; leave the row out"
                )
        elif input_ids is not None and self.config.pad_token_id is not None:
            is_token = input_ids != self.config.pad_token_id
        else:
            return torch.full((batch,), time - 1, device=tokens.device)
        return (torch.arange(time, device=is_token.device) * is_token).argmax(-1)


class FastWeightsForTokenClassification(SeesAllRanks, GenericForTokenClassification, FastWeightsPreTrainedModel):
    """One row of logits per token, which sees the tokens before it. Documents may be packed."""

    _accepts_loss_kwargs = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        cache: FastWeightsCache | None = None,
        **kwargs: Any,
    ) -> TokenClassifierOutput:
        """Logits [B, T, num_labels], and the mean of the losses where labels are given.

        Args:
            labels: int64 [B, T], -100 where there is none.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache: as for `FastWeightsModel`.
            cache, kwargs: as for `FastWeightsModel`.

        Raises:
            ValueError: an input that does not fit.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if labels is not None and is_batch(tokens):
            check_classes("labels", labels, tokens.shape[:2], self.num_labels)
        cache = given_cache(past_key_values, cache)
        return super().forward(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, labels, use_cache, **kwargs
        )


class FastWeightsForQuestionAnswering(SeesAllRanks, GenericForQuestionAnswering, FastWeightsPreTrainedModel):
    """How likely the answer to a question begins and ends at each token of its row."""

    _accepts_loss_kwargs = False

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: FastWeightsCache | None = None,
        inputs_embeds: Tensor | None = None,
        start_positions: Tensor | None = None,
        end_positions: Tensor | None = None,
        cache: FastWeightsCache | None = None,
        **kwargs: Any,
    ) -> QuestionAnsweringModelOutput:
        """start_logits and end_logits [B, T], and the mean of the two losses where the answers are given.

        Args:
            start_positions, end_positions: int64 [B], the columns where the answers begin and end. One after the row, T, is
                left out of the loss. As in transformers, the loss counts padding among the columns.
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds: as for `FastWeightsModel`.
            cache, kwargs: as for `FastWeightsModel`.

        Raises:
            ValueError: an input that does not fit; several documents in one row, which has one answer.
        """
        tokens = input_ids if inputs_embeds is None else inputs_embeds
        if is_batch(tokens):
            refuse_documents(tokens, attention_mask, position_ids, kwargs)
            check_answers(start_positions, end_positions, tokens.shape[0])
        cache = given_cache(past_key_values, cache)
        return super().forward(
            input_ids, attention_mask, position_ids, cache, inputs_embeds, start_positions, end_positions, **kwargs
        )


def refuse_documents(
    tokens: Tensor, attention_mask: Tensor | None, position_ids: Tensor | None, others: dict[str, Any]
) -> None:
    """ValueError if a row holds several documents. Positions and masks on a GPU are read only where the body reads them too."""
    for name in ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        if others.get(name) is not None:
            raise ValueError(
                f"{name} must be None: a row is one text here, with one label; pad the documents into rows"
            )
    batch, time = tokens.shape[:2]
    if position_ids is not None or (isinstance(attention_mask, Tensor) and values_can_be_read(attention_mask)):
        rows = Rows(batch, time, attention_mask=attention_mask, position_ids=position_ids)
        if rows.count != batch:
            name = "attention_mask" if position_ids is None else "position_ids"
            raise ValueError(
                f"{name} must show one document per row, got {rows.count} in {batch} rows: a row has one label here; pad the "
                "documents into rows"
            )


def check_text_labels(labels: object, batch: int, config: Any) -> None:
    """Labels of whole texts, for config.problem_type or what transformers takes it to be."""
    kind, count = config.problem_type, config.num_labels
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels must be a tensor, one entry per text, got {type(labels).__name__}")
    check_dense("labels", labels)
    if kind is None:
        is_class = labels.dtype in (torch.int64, torch.int32)
        kind = (
            "regression" if count == 1 else "single_label_classification" if is_class else "multi_label_classification"
        )
    if kind == "single_label_classification":
        check_classes("labels", labels, (batch,), count)
        return
    if not labels.dtype.is_floating_point:
        raise ValueError(
            f"labels must be floating-point for problem_type {kind!r}, got {labels.dtype}; convert them with labels.float()"
        )
    shapes = [[batch, count]] + ([[batch]] if kind == "regression" and count == 1 else [])
    if list(labels.shape) not in shapes:
        raise ValueError(
            f"labels must be {' or '.join(map(str, shapes))} for problem_type {kind!r}, got {shape_of(labels)}"
        )


def check_answers(start_positions: object, end_positions: object, batch: int) -> None:
    """Where answers begin and end: both or none."""
    places = {"start_positions": start_positions, "end_positions": end_positions}
    if all(place is None for place in places.values()):
        return
    for name, place in places.items():
        if place is None:
            raise ValueError(f"{name} must be given with its counterpart: an answer has a start and an end")
        columns = check_label_tensor(name, place, (batch,))
        if values_are_checked(columns) and (columns < 0).any():
            raise ValueError(f"{name} must be columns of the row, from 0, got {int(columns.min())}")
