"""Sequences that are read as decodes although all their tokens stay.

- Where each sequence reads as many tokens as a decode does, vLLM replays its CUDA graph of decodes, which it chooses by these
  numbers alone. But it gives the graph rows of the pool only where no sequence reads its prompt (vLLM's issues 57720 and 53051).
  So the builder treats every sequence of such a step as a decode.
- A sequence that gave way reads its answer again. A last piece of it, short as a decode with drafts, is a decode for vLLM.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Kept", "KeptTokens", "check_order", "find_kept"]


OTHER_BACKEND = "set attention_backend to FLASH_ATTN, or to TRITON_ATTN for float32"


class Kept(NamedTuple):
    """Of the sequences of a step, on the device.

    Attributes:
        uniform: each of them reads as many tokens as a decode does, and some read their prompts.
        tokens_N: int64, the number of tokens of each sequence that reads 2 to S tokens which all stay; 0 for other sequences.
        begun_N: bool, those that begin and are treated as decodes.
    """

    uniform: bool
    tokens_N: Tensor
    begun_N: Tensor


class KeptTokens:
    """A builder of steps in front of vLLM's. A decode of S tokens, one and its drafts, writes the state after each token to a row
    of its own, and the next step reads the row of the last token that stays. A sequence whose tokens all stay has its state in
    its first row before and after them. The rows after its other tokens serve as scratch. One that begins gets the first state of
    each layer into its row.

    A step has one more attribute, `kept`, None where nothing differs from vLLM's own metadata.
    """

    drafts: Tensor | None = None  # how many each sequence has in the step that is built, on the host

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        builder: Any = self
        if builder.num_spec_tokens:
            check_order(builder.compilation_config.static_forward_context, 1 + builder.num_spec_tokens)

    def build(self, *given: Any, **told: Any) -> Any:
        builder: Any = super()
        self.drafts = told.get("num_decode_draft_tokens_cpu")
        return builder.build(*given, **told)

    def _compute_common_metadata(
        self, common_attn_metadata: Any, *, num_accepted_tokens: Tensor | None = None, **told: Any
    ) -> Any:
        builder: Any = super()
        kept = find_kept(common_attn_metadata, self.drafts, 1 + self.num_spec_tokens)  # type: ignore[attr-defined]
        if kept is not None:
            if num_accepted_tokens is not None:
                own_N = kept.tokens_N.to(num_accepted_tokens.dtype)
                num_accepted_tokens = num_accepted_tokens[: len(own_N)].where(~kept.begun_N, 1).where(own_N == 0, own_N)
            if kept.uniform:
                decodes = torch.zeros_like(common_attn_metadata.is_prefilling)
                common_attn_metadata = common_attn_metadata.replace(is_prefilling=decodes)
        step = builder._compute_common_metadata(common_attn_metadata, num_accepted_tokens=num_accepted_tokens, **told)
        if self.drafts is not None and bool((self.drafts[step.num_decodes :] > 0).any()):
            raise RuntimeError(
                "vLLM has sorted sequences with drafts behind prompts, where a memory would go on from a wrong state; "
                f"{OTHER_BACKEND}, and tell the developers of fastweights"
            )
        return step if kept is None else self._place(replace(step, kept=kept))

    def update_block_table(self, metadata: Any, *tables: Any) -> Any:
        """The same step for layers with blocks of their own."""
        builder: Any = super()
        step = builder.update_block_table(metadata, *tables)
        return step if step.kept is None else self._place(step)

    def _place(self, step: Any) -> Any:
        builder: Any = self
        rows_NS = step.state_indices_tensor_d
        tokens_N, begun_N = (x[: len(rows_NS)] for x in step.kept[1:])
        if step.kept.uniform:
            first_N = rows_NS[:, 0].where(begun_N, 0)
            for name in builder.layer_names:
                builder.compilation_config.static_forward_context[name].begin(first_N)
        column_S = torch.arange(rows_NS.shape[1], device=rows_NS.device)
        last_N1 = tokens_N[:, None] - 1
        own_NS = (column_S + 1).where(column_S < last_N1, column_S.where(column_S != last_N1, 0))
        step = replace(step, state_indices_tensor_d=rows_NS.gather(1, own_NS))
        return builder._update_metadata_for_cudagraph_capture(step)


def check_order(layers: dict[str, Any], tokens: int) -> None:
    """ValueError where vLLM would sort sequences with drafts behind pieces of prompts, where ours takes them for prefills (vLLM's
    issue 55894): what it sorts as a decode has the smallest number of tokens that a builder names. FlashInfer's names one by its
    class, and more with some kernels only.

    Args:
        layers: of vLLM, those of a draft model included.
        tokens: of a decode with all its drafts.
    """
    for name, layer in layers.items():
        backend: Any = layer.get_attn_backend() if hasattr(layer, "get_attn_backend") else None
        builder = None if backend is None else backend.get_builder_cls()
        if builder is None or issubclass(builder, KeptTokens):
            continue
        threshold = getattr(builder, "reorder_batch_threshold", None)
        if threshold is not None and threshold < tokens:
            raise ValueError(
                f"attention_backend must not be {backend.get_name()} with speculative_config, got it for {name}: vLLM would sort "
                f"sequences with drafts behind prompts, and a memory would go on from a wrong state; {OTHER_BACKEND}"
            )


def find_kept(told: Any, drafts_N: Tensor | None, tokens: int) -> Kept | None:
    """What a step's metadata must say beside vLLM's; None for nothing.

    Args:
        told: what vLLM tells a builder.
        drafts_N: how many drafts each sequence has, on the host; None in a step without drafts.
        tokens: of a decode with all its drafts.
    """
    prefilling = told.is_prefilling is not None and bool(told.is_prefilling.any())
    if tokens == 1 and not prefilling:  # most steps
        return None
    count_N = told.query_start_loc_cpu.diff()
    reads_N = count_N > 0
    prompts_N = reads_N & told.is_prefilling if prefilling else reads_N & False
    uniform = bool(prompts_N.any()) and bool(((count_N == tokens) | ~reads_N).all())
    stays_N = (count_N > 1) & (count_N <= tokens)
    if drafts_N is not None:
        stays_N &= drafts_N[: len(count_N)] != count_N - 1
    if not uniform:  # sequences that read their prompts are prefills
        stays_N &= ~prompts_N
        if not stays_N.any():
            return None
    device = told.seq_lens.device
    tokens_N = count_N.where(stays_N, 0).long().to(device, non_blocking=True)
    begun_N = (prompts_N if uniform else prompts_N & False).to(device, non_blocking=True)
    return Kept(uniform, tokens_N, begun_N & (told.seq_lens == tokens))
