"""Makes a hybrid of a pretrained Transformer: memories in place of the attention of most layers, all weights carried over."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...checks import (
    check_choice,
    check_flag,
    check_list,
    check_size,
    check_text,
    check_whole_number,
    describe_value,
    error_prefix,
)
from ...kinds import checked
from ...layers.blocks import in_block
from ...layers.choice import MixerChoice
from ...layers.memory_layer import MemoryLayer
from ...layers.projections import OutputProjection, ShortConvolution
from ...layers.registry import mixer_spec
from .attention import KEYS, TakesQKV, build_memory, check_takes_qkv
from .families import find_family, hybrid_config, hybrid_model
from .model import HybridModel

__all__ = ["hybrid_settings", "keep_all", "keep_layers", "linearize", "memory_entry"]

# A new layer has short convolutions, SiLU and gates that are drawn at random. Next to a trained attention a memory begins with
# the attention's own q, k and v, and with an output gate that is open.
FIRST_OPTIONS = {"conv_size": None, "activation": "none", "shared_qk": False}
OPEN = 0.5  # the sigmoid of 0


def keep_layers(keep: str | Iterable[int], layers: int) -> tuple[int, ...]:
    """The layers whose attention is kept.

    Args:
        keep: their numbers from 0, as a list or as a text such as "6,14,22"; "every:4" for the last of every four layers; "none";
            "all".
        layers: how many layers the model has.

    Raises:
        ValueError: a text of another form, or a number that the model has no layer for.
    """
    check_size("layers", layers)
    if isinstance(keep, str):
        words = {"none": (), "all": range(layers)}
        start, _, count = keep.partition(":")
        if keep in words:
            return tuple(words[keep])
        if start == "every" and count.isdecimal():
            if not 0 < int(count) <= layers:
                raise ValueError(
                    f'keep must be "every:N" with N from 1 to the {layers} layers, got {describe_value(keep)}'
                )
            return tuple(range(int(count) - 1, layers, int(count)))
        numbers = [number.strip() for number in keep.split(",")]
        if not all(number.isdecimal() for number in numbers):
            raise ValueError(
                f'keep must be numbers of layers such as "6,14,22", "every:4", "none" or "all", got {describe_value(keep)}'
            )
        return keep_layers([int(number) for number in numbers], layers)
    chosen = check_list(
        "keep",
        list(keep) if isinstance(keep, Iterable) and not isinstance(keep, (Tensor, Mapping)) else keep,
        "layer numbers",
    )
    for layer in chosen:
        check_whole_number("keep", layer, high=layers - 1)
    return tuple(sorted(set(chosen)))


def memory_entry(to: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a memory in a hybrid's configuration: its mixer with the options that it begins with next to trained weights,
    unless they are given.

    Raises:
        ValueError: no such mixer or option.
    """
    check_text("to", to, what="the name of a mixer")
    with error_prefix("to"):
        layer, spec = check_takes_qkv(to), mixer_spec(to, options)
    known = fields(layer.Options)
    first = {one.name: FIRST_OPTIONS[one.name] for one in known if one.name in FIRST_OPTIONS}
    if issubclass(layer, MemoryLayer) and layer.needs_activation:
        del first["activation"]
    gate = next((spec.options.get(one.name, one.default) for one in known if one.name == "output_gate"), None)
    published = in_block(MixerChoice(to, options, to), "published", heads=1).options  # hybrids were measured with these
    return {"name": to, **published, **first, **({"output_gate": "sigmoid"} if gate else {}), **options}


@checked
def linearize(
    teacher: PreTrainedModel,
    *,
    to: str,
    keep: str | Iterable[int] = "none",
    rope: bool = True,
    keys: str = "shared",
    seed: int = 0,
    **options: Any,
) -> HybridModel:
    """A hybrid with the weights of `teacher`, on its device and in its dtype. It has to be trained (`fastweights distill`).

    A memory begins with the attention's projections, norms and rotation of q and k, and with its output projection. Short
    convolutions are left out, or begin as the identity with `conv_size`. An output gate begins at 0.5, which the norm in front of
    it makes up for. Decays and the skip begin as their authors have them (`long_memory="own"`), gains and preconditioners as in a
    new layer.

    Args:
        teacher: a causal language model of transformers, of a type in `FAMILIES`. It is left as it is.
        to: name of the mixer: one that takes q, k and v, of this library or a user's own.
        keep: layers whose attention is kept (`keep_layers`).
        rope: whether memories get q and k rotated, as attention does.
        keys: "shared" or "repeated": whether the query heads of a group share the weights of a key and value head, or get a copy
            each. Each query head has a memory of its own.
        seed: of first values that are random. torch's own random state is not touched.
        options: of the mixer.

    Raises:
        ValueError: a model of another type, no such mixer or layer, a mixer that makes q, k and v in its own way, or an option
            that does not fit.
        TypeError: no model of transformers.
    """
    if not isinstance(teacher, PreTrainedModel):
        raise TypeError(f"teacher must be a causal language model of transformers, got {describe_value(teacher)}")
    check_whole_number("seed", seed)
    family = find_family(teacher.config)
    if isinstance(teacher, HybridModel) or not isinstance(teacher, family.find(f"{family.name}ForCausalLM")):
        raise ValueError(
            f"teacher must be a {family.name}ForCausalLM, got {type(teacher).__name__}; load it as a causal model"
        )
    config = hybrid_settings(teacher.config, to=to, keep=keep, rope=rope, keys=keys, options=options)
    with torch.device("meta"):
        hybrid: Any = hybrid_model(family.model_type)(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        for index, attention in hybrid.memory_layers().items():
            memory = _open(build_memory(config, config.memory[index]))
            attention.memory = memory.to(teacher.device, teacher.dtype)
    weights = {name: x.detach().clone() for name, x in teacher.state_dict().items()}
    if keys == "repeated":
        _repeat_keys(hybrid, weights)
    _carry_over(hybrid, weights, teacher)
    hybrid.generation_config = copy.deepcopy(teacher.generation_config)
    hybrid.generation_config.cache_implementation = None  # such as Gemma's: the hybrid has a cache of its own
    return hybrid.train(teacher.training)


def hybrid_settings(
    teacher: PreTrainedConfig,
    *,
    to: str,
    keep: str | Iterable[int] = "none",
    rope: bool = True,
    keys: str = "shared",
    options: Mapping[str, Any],
) -> Any:
    """The configuration of the hybrid that `linearize` makes of a teacher with this one, with the same arguments.

    Raises:
        ValueError: as `linearize`, but for options that do not fit the attention.
    """
    check_flag("rope", rope)
    check_choice("keys", keys, KEYS)
    kept, entry = keep_layers(keep, teacher.num_hidden_layers), memory_entry(to, options)
    memory = [None if layer in kept else entry for layer in range(teacher.num_hidden_layers)]
    return _settings(teacher, memory=memory, memory_rope=rope, memory_keys=keys)


def keep_all(teacher: PreTrainedModel) -> Any:
    """The hybrid that keeps all attention, with the parameters of `teacher` themselves: the same model, whose layers also read
    packed rows. It is made of a loaded model, as transformers converts the weights of some files by their model type.

    Raises:
        ValueError: a model of another type, or one that does not attend causally.
    """
    config = _settings(teacher.config)
    with torch.device("meta"):
        hybrid: Any = hybrid_model(find_family(config).model_type)(config)
    _carry_over(hybrid, {name: x.detach() for name, x in teacher.state_dict().items()}, teacher)
    return hybrid.train(teacher.training)


def _settings(teacher: PreTrainedConfig, **fields: Any) -> Any:
    kind = hybrid_config(find_family(teacher).model_type)
    if getattr(teacher, "use_bidirectional_attention", False):
        raise ValueError(
            "teacher must attend causally, but its use_bidirectional_attention is True; choose a causal model"
        )
    saved = teacher.to_dict()
    for name in ("model_type", "architectures", "transformers_version", "auto_map", "quantization_config"):
        saved.pop(name, None)
    config = kind.from_dict({**saved, **fields})
    config._attn_implementation = teacher._attn_implementation
    return config


@torch.no_grad()
def _open(memory: TakesQKV) -> TakesQKV:
    """First values next to trained weights: convolutions that change nothing, and an output gate that lets the answer through."""
    for module in memory.modules():
        if isinstance(module, ShortConvolution):
            module.weight.zero_()[:, -1] = 1  # of the token itself
        elif isinstance(module, OutputProjection) and module.gate == "sigmoid":
            for parameter in (list(module.g_proj.children()) or [module.g_proj])[-1].parameters():
                parameter.zero_()
            if module.norm is not None:
                module.norm.weight.fill_(1 / OPEN)
    return memory


@torch.no_grad()
def _carry_over(hybrid: Any, weights: dict[str, Tensor], teacher: PreTrainedModel) -> None:
    """Take the weights, and copies of the teacher's buffers that are not saved. Tied weights stay tied."""
    result = hybrid.load_state_dict(weights, strict=False, assign=True)
    lost = [name for name in result.missing_keys if ".self_attn.memory." not in name] + result.unexpected_keys
    if lost:
        raise ValueError(f"the weights {', '.join(lost)} of the teacher have no counterpart in its hybrid")
    for name, buffer in teacher.named_buffers():
        if hybrid.get_buffer(name).is_meta:  # it is not among the saved weights
            owner, _, last = name.rpartition(".")
            hybrid.get_submodule(owner).register_buffer(last, buffer.detach().clone(), persistent=False)
    for own in hybrid.parameters():
        own.requires_grad_(True)
    hybrid.tie_weights()


def _repeat_keys(hybrid: Any, weights: dict[str, Tensor]) -> None:
    """Give every query head a copy of its key and value heads: rows of the projections, and of a norm over all heads."""
    config = hybrid.config
    groups = config.num_attention_heads // config.num_key_value_heads
    for index, attention in hybrid.memory_layers().items():
        for name, own in attention.named_parameters():
            whole = f"model.layers.{index}.self_attn.{name}"
            held = weights.get(whole)
            if held is not None and held.shape != own.shape:
                heads = held.unflatten(0, (config.num_key_value_heads, -1))
                weights[whole] = heads.repeat_interleave(groups, 0).flatten(0, 1)
