"""vLLM's scheduler, with what it could know of our models.

Where sequences keep the memory that they began with, nothing is allocated while they are read: vLLM asks for memory for each
sequence in each step, which with hundreds of sequences takes longer than the step of a small model. Where vLLM has CUDA graphs of
decodes, all sequences get equally many drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ConstantBlocks", "EvenDrafts", "find_largest_graph", "keeps_its_blocks", "make_scheduler"]


class ConstantBlocks(KVCacheManager):
    """vLLM's manager of blocks where a sequence has one block per group from its beginning to its end."""

    def allocate_slots(self, request: Request, *given: Any, **named: Any) -> KVCacheBlocks | None:
        if request.status == RequestStatus.RUNNING:
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, *given, **named)


class EvenDrafts(Scheduler):
    """Sequences that get fewer drafts than others (n-gram and suffix drafts) get token 0 as drafts beside them. A step in which
    all sequences read equally many tokens replays a CUDA graph; kernel by kernel it takes many times as long. Like every draft,
    token 0 stays only where the model writes it."""

    def __init__(self, vllm_config: VllmConfig, **named: Any) -> None:
        super().__init__(vllm_config=vllm_config, **named)
        self.largest = find_largest_graph(vllm_config)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        super().update_draft_token_ids(draft_token_ids)
        few = [request for request in self.running if len(request.spec_token_ids) < self.num_spec_tokens]
        too_many = len(self.running) * (1 + self.num_spec_tokens) > self.largest
        # A grammar takes no tokens but its own. With these and with pieces of prompts a step has no graph anyway.
        if too_many or any(request.is_prefill_chunk or request.use_structured_output for request in few):
            return
        for request in few:
            missing = self.num_spec_tokens - len(request.spec_token_ids)
            request.spec_token_ids = [*request.spec_token_ids, *[0] * missing]


def find_largest_graph(vllm_config: VllmConfig) -> int:
    """Tokens of the largest step that has a CUDA graph of decodes, 0 where there are none."""
    compiled = vllm_config.compilation_config
    return (compiled.max_cudagraph_capture_size or 0) if compiled.cudagraph_mode.has_full_cudagraphs() else 0


def keeps_its_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether one block of each group holds all that a sequence of any length needs."""
    cache, length = vllm_config.cache_config, vllm_config.model_config.max_model_len
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    constant = all(isinstance(spec, MambaSpec) and spec.block_size >= length for spec in specs)
    return constant and not cache.enable_prefix_caching and vllm_config.speculative_config is None


def make_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **named: Any) -> Scheduler:
    """What vLLM's setting `scheduler_cls` names: the scheduler that vLLM takes by itself, with `ConstantBlocks` or as
    `EvenDrafts` if it can. With drafts it is never the asynchronous one."""
    drafts = vllm_config.speculative_config
    kind: type[Scheduler] = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    if drafts is not None and find_largest_graph(vllm_config):
        kind = EvenDrafts
    scheduler = kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **named)
    if drafts is not None and scheduler.dynamic_sd_lookup is None:
        # Otherwise, since 0.28, a sequence that begins with one token gets placeholders (-1) as drafts, which a memory would
        # read. With a table of drafts by the number of sequences it gets none.
        scheduler.dynamic_sd_lookup = [scheduler.num_spec_tokens] * (vllm_config.scheduler_config.max_num_seqs + 1)
    if keeps_its_blocks(vllm_config, kv_cache_config):
        scheduler.kv_cache_manager.__class__ = ConstantBlocks  # which has no attributes of its own
    return scheduler
