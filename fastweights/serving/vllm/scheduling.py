"""The scheduler of models whose sequences keep the memory that they began with: nothing is allocated while they are read.

vLLM asks for memory for each sequence in each step. With hundreds of sequences that takes longer than the step of a small model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["ConstantBlocks", "keeps_its_blocks", "make_scheduler"]


class ConstantBlocks(KVCacheManager):
    """vLLM's manager of blocks where a sequence has one block per group from its beginning to its end."""

    def allocate_slots(self, request: Request, *given: Any, **named: Any) -> KVCacheBlocks | None:
        if request.status == RequestStatus.RUNNING:
            return self.empty_kv_cache_blocks
        return super().allocate_slots(request, *given, **named)


def keeps_its_blocks(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> bool:
    """Whether one block of each group holds all that a sequence of any length needs."""
    cache, length = vllm_config.cache_config, vllm_config.model_config.max_model_len
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    constant = all(isinstance(spec, MambaSpec) and spec.block_size >= length for spec in specs)
    return constant and not cache.enable_prefix_caching and vllm_config.speculative_config is None


def make_scheduler(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, **named: Any) -> Scheduler:
    """What vLLM's setting `scheduler_cls` names: the scheduler that vLLM takes by itself, with `ConstantBlocks` if it can."""
    kind = AsyncScheduler if vllm_config.scheduler_config.async_scheduling else Scheduler
    scheduler = kind(vllm_config=vllm_config, kv_cache_config=kv_cache_config, **named)
    if keeps_its_blocks(vllm_config, kv_cache_config):
        scheduler.kv_cache_manager.__class__ = ConstantBlocks  # which has no attributes of its own
    return scheduler
