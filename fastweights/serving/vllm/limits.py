"""What is refused before a model is loaded, because it would fail later or give other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.model_executor.models.config import VerifyAndUpdateConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Limits"]

logger = init_logger(__name__)


class Limits(VerifyAndUpdateConfig):
    """vLLM calls this for our architecture when its settings are complete."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        refused = {
            "tensor_parallel_size must be 1": parallel.tensor_parallel_size != 1,
            "pipeline_parallel_size must be 1": parallel.pipeline_parallel_size != 1,
            "speculative_config must be None: no token can be removed from a memory": (
                vllm_config.speculative_config is not None
            ),
            "lora_config must be None; merge the adapter into the weights first": vllm_config.lora_config is not None,
            "quantization must be None": vllm_config.quant_config is not None,
            "kv_transfer_config must be None": vllm_config.kv_transfer_config is not None,
            "mamba_cache_mode must be 'none'": cache.mamba_cache_mode != "none",
            "use_replayssm must be False": cache.use_replayssm,
            "mamba_cache_dtype must be 'auto'": cache.mamba_cache_dtype != "auto",
            "mamba_ssm_cache_dtype must be 'auto' or 'float32'": cache.mamba_ssm_cache_dtype not in ("auto", "float32"),
        }
        for message, is_so in refused.items():
            if is_so:
                raise ValueError(f"{message}, for models of fastweights in vLLM")
        if cache.enable_prefix_caching:  # vLLM's default, which looks like a user's wish
            logger.warning(
                "Prefix caching is turned off: the memories of fastweights are not kept at block boundaries."
            )
            cache.enable_prefix_caching = False
