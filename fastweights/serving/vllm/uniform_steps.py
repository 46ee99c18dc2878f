"""Steps in which each sequence reads as many tokens as in a step of decodes, though some of them read their prompts.

For such a step vLLM replays its CUDA graph of decodes, which it chooses by these numbers alone. But it gives the graph rows of
the pool only where no sequence reads its prompt (vLLM's issues 57720 and 53051). So all of them are read as decodes here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

__all__ = ["UniformSteps"]


class UniformSteps:
    """A builder of steps in front of vLLM's. A sequence that begins gets the first state of each layer into its row. One that
    reads S tokens of its prompt, where decodes read S with their drafts, keeps them all: the state before and after them is in
    its first row. The rows after the other tokens are for drafts, which it does not have.

    The steps have two attributes more, `prompts` and `begun`, bool [N], which sequences these are; None in all other steps.
    """

    def _compute_common_metadata(
        self, common_attn_metadata: Any, *, num_accepted_tokens: Tensor | None = None, **told: Any
    ) -> Any:
        builder: Any = super()
        found = find_prompts(common_attn_metadata, 1 + self.num_spec_tokens)  # type: ignore[attr-defined]
        if found is None:
            return builder._compute_common_metadata(
                common_attn_metadata, num_accepted_tokens=num_accepted_tokens, **told
            )
        prompts, begun = found
        if num_accepted_tokens is not None:
            kept = num_accepted_tokens[: len(prompts)]
            num_accepted_tokens = kept.where(~prompts, 1 + self.num_spec_tokens)  # type: ignore[attr-defined]
        decodes = torch.zeros_like(common_attn_metadata.is_prefilling)
        step = builder._compute_common_metadata(
            common_attn_metadata.replace(is_prefilling=decodes), num_accepted_tokens=num_accepted_tokens, **told
        )
        return self._place(replace(step, prompts=prompts, begun=begun))

    def update_block_table(self, metadata: Any, *tables: Any) -> Any:
        """The same step for layers with blocks of their own."""
        builder: Any = super()
        step = builder.update_block_table(metadata, *tables)
        return step if step.prompts is None else self._place(step)

    def _place(self, step: Any) -> Any:
        builder: Any = self
        rows_NS = step.state_indices_tensor_d
        first_N = rows_NS[:, 0].where(step.begun, 0)
        for name in builder.layer_names:
            builder.compilation_config.static_forward_context[name].begin(first_N)
        rows_NS = rows_NS.roll(-1, 1).where(step.prompts[:, None], rows_NS)
        return builder._update_metadata_for_cudagraph_capture(replace(step, state_indices_tensor_d=rows_NS))


def find_prompts(told: Any, tokens: int) -> tuple[Tensor, Tensor] | None:
    """Which sequences of a step read their prompts and which of these begin, bool [N] on the device. None in a step where none
    does or where a sequence does not read exactly so many tokens; padding reads none."""
    if told.is_prefilling is None:
        return None
    count_N = told.query_start_loc_cpu.diff()
    prompts_N = told.is_prefilling & (count_N > 0)
    if not prompts_N.any() or not ((count_N == tokens) | (count_N == 0)).all():
        return None
    prompts_N = prompts_N.to(told.seq_lens.device, non_blocking=True)
    return prompts_N, prompts_N & (told.seq_lens == tokens)
