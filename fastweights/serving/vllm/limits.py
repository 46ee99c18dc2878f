"""What is refused before a model is loaded, because it would fail later or give other tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from ...layers import MIXERS, SoftmaxAttention
from ...models import FastWeightsConfig
from ...models.parts import check_parts
from .pool import STATE_DTYPES
from .versions import has_copies_on_cpus, has_room_for_drafts

if TYPE_CHECKING:
    from vllm.config import VllmConfig

__all__ = ["Limits"]

DRAFTS = ("ngram", "suffix", "draft_model")  # the methods that need nothing of the model
SCHEDULER = f"{__package__}.scheduling.make_scheduler"
# Methods of quantisation that vLLM's linear layers run by themselves.
QUANTIZED = ("fp8", "fp8_per_tensor", "fp8_per_block", "compressed-tensors", "torchao")


class Limits(VerifyAndUpdateConfig):
    """vLLM calls this for our architecture when its settings are complete."""

    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        lora, scheduler = vllm_config.lora_config, vllm_config.scheduler_config
        if not isinstance(model.hf_config, FastWeightsConfig):
            raise ValueError(
                f"a model of fastweights in vLLM must be of type 'fastweights', got {model.hf_config.model_type!r}: hybrids of "
                "models of transformers run in transformers alone; use `fastweights generate`"
            )
        refused = {
            "pipeline_parallel_size must be 1": parallel.pipeline_parallel_size != 1,
            "prefill_context_parallel_size must be 1": parallel.prefill_context_parallel_size != 1,
            "decode_context_parallel_size must be 1": parallel.decode_context_parallel_size != 1,
            f"speculative_config must have one of the methods {', '.join(DRAFTS)}": (
                speculative is not None and speculative.method not in DRAFTS
            ),
            "parallel_drafting must be False: vLLM would take more tokens for drafts than there are states": (
                speculative is not None and speculative.parallel_drafting
            ),
            "scheduler_cls must be None with speculative_config: vLLM's own gives placeholders as drafts": (
                speculative is not None and scheduler.scheduler_cls not in (None, SCHEDULER)
            ),
            # No version has run so on a GPU, and on a CPU vLLM schedules in turn by itself.
            "async_scheduling must be None or False with speculative_config": (
                speculative is not None and bool(scheduler.async_scheduling)
            ),
            "VLLM_USE_V2_MODEL_RUNNER must be 0 in the environment with speculative_config: the second model runner of vLLM may "
            "go on from a state before the last accepted drafts": (
                speculative is not None and vllm_config.use_v2_model_runner
            ),
            "enable_prefix_caching must be False on a CPU with speculative_config": (
                cache.enable_prefix_caching and speculative is not None and current_platform.is_cpu()
            ),
            "enable_prefix_caching must be False with speculative_config before vLLM 0.26 in a model without softmax layers": (
                cache.enable_prefix_caching
                and speculative is not None
                and not has_room_for_drafts()
                and not any(issubclass(MIXERS[name].layer, SoftmaxAttention) for name, _ in model.hf_config.mixers())
            ),
            "fully_sharded_loras must be False": lora is not None and lora.fully_sharded_loras,
            # vLLM fills vllm_config.quant_config and, for an offloading size, kv_transfer_config after this call.
            f"quantization must be None or one of {', '.join(QUANTIZED)}": model.quantization not in (None, *QUANTIZED),
            "tensor_parallel_size must be 1 with quantization": (
                model.quantization is not None and parallel.tensor_parallel_size > 1
            ),
            "kv_transfer_config must be None": vllm_config.kv_transfer_config is not None,
            "kv_offloading_size must be None": cache.kv_offloading_size is not None,
            "use_replayssm must be False": getattr(cache, "use_replayssm", False),
            "kv_cache_dtype must be 'auto': softmax layers keep keys and values in the dtype of the weights": (
                cache.cache_dtype != "auto"
            ),
            "enable_prefix_caching must be False on a CPU before vLLM 0.31": (
                cache.enable_prefix_caching and current_platform.is_cpu() and not has_copies_on_cpus()
            ),
            "mamba_cache_dtype must be 'auto'": cache.mamba_cache_dtype != "auto",
            f"mamba_ssm_cache_dtype must be one of {', '.join(STATE_DTYPES)}": (
                cache.mamba_ssm_cache_dtype not in STATE_DTYPES
            ),
        }
        for message, is_so in refused.items():
            if is_so:
                raise ValueError(f"{message}, for models of fastweights in vLLM")
        for name, _ in model.hf_config.mixers():
            layer = MIXERS[name].layer
            if issubclass(layer, SoftmaxAttention) and layer is not SoftmaxAttention:
                raise ValueError(
                    f"a model in vLLM must have mixers of constant memory or of the class SoftmaxAttention, got {name} of the "
                    f"class {layer.__name__}: vLLM computes softmax attention by itself"
                )
        if parallel.tensor_parallel_size > 1:
            check_parts(model.hf_config, parallel.tensor_parallel_size)
        if scheduler.scheduler_cls is None:
            scheduler.scheduler_cls = SCHEDULER
        if speculative is not None:
            scheduler.async_scheduling = False  # vLLM would choose True for drafts of a model
        # On some CPUs vLLM would replace it, with a warning about other layers.
        if cache.mamba_ssm_cache_dtype == "auto":
            cache.mamba_ssm_cache_dtype = "float32"
