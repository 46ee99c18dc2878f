"""Attention modules of transformers whose attention is a memory.

The module itself stays transformers' own: it projects and norms q, k and v, rotates q and k, and projects the answer. Such a
module finds its attention function by name, and ours writes and reads the memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig

from ...checks import error_prefix
from ...layers import LayerCache, MemoryLayer, SoftmaxAttention
from ...layers.choice import split_entry
from ...layers.projections import QKVProjection
from ...layers.registry import mixer_spec
from ...ops.authoring import product_dtype
from ...private_huggingface import with_attention
from ..cache import given_cache
from ..rows import Rows

__all__ = ["KEYS", "MemoryAttention", "TakesQKV", "build_memory", "check_takes_qkv"]

ATTENTION = "fastweights_memory"  # what transformers knows our attention function by
KEYS = ("shared", "repeated")
TakesQKV = MemoryLayer | SoftmaxAttention
FORWARDS = (MemoryLayer.forward, SoftmaxAttention.forward)


@dataclass
class MemoryCall:
    """What a memory gets of a call beside q, k and v. x: the hidden states [B, T, D], for gates."""

    x: Tensor
    rows: Rows | None
    cache: LayerCache | None


def build_memory(config: PreTrainedConfig, entry: Any) -> TakesQKV:
    """The layer of an entry, a mixer's name or {"name": ..., option: ...}, for attention of this configuration, without the
    projections, which the attention has.

    Raises:
        ValueError: no such mixer, one that makes q, k and v in a way of its own, or options that do not fit.
    """
    name, options = split_entry(entry, "memory")
    heads = config.num_attention_heads
    sizes = {"hidden_size": config.hidden_size, "num_heads": heads, "head_dim": head_width(config)}
    if issubclass(check_takes_qkv(name), SoftmaxAttention):
        sizes |= {"rope_theta": None, "num_kv_heads": key_heads(config)}
        if options.get("window") is None:
            raise ValueError(
                f"{name} must have a window in place of attention; keep the attention of the layer instead"
            )
    for option, value in sizes.items():
        if options.get(option, value) != value:
            raise ValueError(f"{option} of {name} must be that of the attention, {value}, got {options[option]}")
    spec = mixer_spec(name, options)
    layer: Any = spec.layer(**{**spec.options, **options, **sizes})
    own = [path.rpartition(".")[0] for path, _ in layer.named_modules() if path.split(".")[-1] == "o_proj"]
    if isinstance(layer, MemoryLayer):
        widths = {getattr(layer.heads, width) for width in ("key", "value")} | {sizes["head_dim"]}
        if type(layer.qkv) is not QKVProjection or layer.qkv.steps != 1 or len(own) != 1:
            raise ValueError(
                f"memory must be a mixer with one q, k and v per token and head, which {name} with these options has not; choose "
                "another, such as gdn"
            )
        if len(widths) > 1 or layer.heads.value_heads != heads:
            raise ValueError(
                f"{name} must have the heads of the attention, {heads} of {sizes['head_dim']} channels; leave out options that "
                "change them"
            )
    projecting = layer.qkv if isinstance(layer, MemoryLayer) else layer
    for part in "qkv":
        delattr(projecting, f"{part}_proj")
    owner = layer.get_submodule(own[0])
    del owner.o_proj
    owner.o_proj = unchanged  # no module: adapters would take one of this name for a projection
    return layer


def unchanged(x: Tensor) -> Tensor:
    return x


def check_takes_qkv(name: str) -> type[TakesQKV]:
    """The class of a mixer that can take q, k and v from attention.

    Raises:
        ValueError: a mixer of another class.
    """
    kind: Any = mixer_spec(name, {}).layer
    if not issubclass(kind, (MemoryLayer, SoftmaxAttention)) or kind.forward not in FORWARDS:
        raise ValueError(
            f"memory must be a mixer that takes q, k and v, and {name} makes them in its own way; choose another, such as gdn"
        )
    return kind


def head_width(config: Any) -> int:
    """Channels of a head of attention."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def key_heads(config: Any) -> int:
    """Key and value heads of attention in front of a memory."""
    return config.num_attention_heads if config.memory_keys == "repeated" else config.num_key_value_heads


class MemoryAttention:
    """In front of an attention class of transformers: attention by a memory.

    Attributes:
        memory: the memory layer. Its gates see the input of the attention.
        rotates: whether q and k are rotated as in the attention.
    """

    memory: TakesQKV
    rotates: bool

    def __init__(self, config: Any, layer_idx: int) -> None:
        heads = {"num_key_value_heads": key_heads(config)}
        super().__init__(with_attention(config, ATTENTION, heads), layer_idx)  # type: ignore[call-arg]
        with error_prefix(f"layer {layer_idx}"):
            self.memory = build_memory(config, config.memory[layer_idx])
        self.rotates = config.memory_rope

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        """As transformers' own, whose keywords it takes. The mask is left out: memories are causal, and rows say the rest.
        memory_rows: how the sequences lie in the batch, None where each row is one."""
        names = ("position_embeddings", "attention_mask", "past_key_values")
        kwargs |= dict(zip(names, args, strict=False))
        past = given_cache(kwargs.pop("past_key_values", None), kwargs.pop("cache", None))
        held = None if past is None else past.layers[self.layer_idx].read(hidden_states.shape[1])  # type: ignore[attr-defined]
        rows = kwargs.pop("memory_rows", None)
        kwargs.pop("packed_rows", None)  # of attention that is kept
        if not self.rotates:
            cos, sin = kwargs["position_embeddings"]
            kwargs["position_embeddings"] = torch.ones_like(cos), torch.zeros_like(sin)
        call = MemoryCall(hidden_states, rows, held)
        return super().forward(hidden_states, **{**kwargs, "attention_mask": None, "memory_call": call})  # type: ignore[misc]


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: None = None,
    *,
    scaling: float,
    memory_call: MemoryCall,
    **unused: Any,
) -> tuple[Tensor, None]:
    """The attention function: q [B, H, T, K], and k, v [B, H', T, K] with H' a divisor of H, to answers [B, T, H, K].

    scaling: of q k in attention. Memories norm q and k, or scale by 1 / sqrt(K).
    """
    memory, rows, heads = module.memory, memory_call.rows, query.shape[1]
    query, key, value = (x.to(product_dtype(x)) for x in (query, key, value))  # rotations of autocast are in float32
    if isinstance(memory, MemoryLayer):
        key, value = (x.repeat_interleave(heads // x.shape[1], 1) if x.shape[1] < heads else x for x in (key, value))
    elif scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    x_BTD, cu_seqlens = memory_call.x, None
    flat = [x.transpose(1, 2).flatten(2) for x in (query, key, value)]
    if rows is not None:
        x_BTD, *flat = map(rows.pack, (x_BTD, *flat))
        cu_seqlens = rows.cu_seqlens
    o_BTC = memory.mix_projected(x_BTD, flat, memory_call.cache, cu_seqlens)
    return (o_BTC if rows is None else rows.unpack(o_BTC)).unflatten(2, (heads, -1)), None


AttentionInterface.register(ATTENTION, attend)
