"""The models of transformers whose attention can become a memory, and the configuration and model classes of their hybrids."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from ...checks import check_choice, check_flag, check_list, describe_value, error_prefix
from ...layers.choice import split_entry
from ...layers.registry import mixer_spec
from ...private_huggingface import add_adapter_targets
from .attention import KEYS, MemoryAttention
from .kept import KeptAttention

__all__ = ["FAMILIES", "Family", "find_family", "hybrid_config", "hybrid_model"]

PREFIX = "FastWeights"


@dataclass(frozen=True)
class Family:
    """Models of transformers of one model type.

    Attributes:
        module: folder in transformers.models.
        name: what the names of its classes begin with.
        config: of the configuration class.
    """

    model_type: str
    module: str
    name: str
    config: str

    def find(self, kind: str, *, configuration: bool = False) -> Any:
        """One of its classes; its module is imported."""
        file = "configuration" if configuration else "modeling"
        return getattr(import_module(f"transformers.models.{self.module}.{file}_{self.module}"), kind)

    @property
    def attention(self) -> Any:
        return self.find(f"{self.name}Attention")


_NAMES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3Moe",
    "smollm3": "SmolLM3",
    "olmo2": "Olmo2",
    "gemma2": "Gemma2",
}
FAMILIES: dict[str, Family] = {
    model_type: Family(model_type, model_type, name, f"{name}Config") for model_type, name in _NAMES.items()
} | {"gemma3_text": Family("gemma3_text", "gemma3", "Gemma3", "Gemma3TextConfig")}


def find_family(config: PreTrainedConfig) -> Family:
    """The family of a teacher's or a hybrid's configuration.

    Raises:
        ValueError: none of `FAMILIES`.
    """
    model_type = str(config.model_type).removeprefix("fastweights_")
    if model_type not in FAMILIES:
        raise ValueError(
            f"the model must be of a type whose attention can become a memory, {', '.join(FAMILIES)}, got {config.model_type!r}"
        )
    return FAMILIES[model_type]


@cache
def hybrid_config(model_type: str) -> type[PreTrainedConfig]:
    """The configuration class of a family's hybrids: the family's, with fields that say which layers have which memory."""
    family = FAMILIES[model_type]
    base = family.find(family.config, configuration=True)

    def __post_init__(self: Any, **kwargs: Any) -> None:
        base.__post_init__(self, **kwargs)
        _check_memory(self)
        hybrid_model(model_type)  # AutoModelForCausalLM looks for it next

    def mixers(self: Any) -> list[tuple[str, dict[str, Any]]]:
        """Name and options of the mixer of every layer; attention that was kept is "softmax"."""
        return [split_entry(entry or "softmax", "memory") for entry in self.memory]

    def to_dict(self: Any) -> dict[str, Any]:
        add_adapter_targets(self.model_type, {}, others=("q_proj", "v_proj"), like=model_type)  # PEFT calls this first
        return base.to_dict(self)

    annotations = {"memory": "list[Any] | None", "memory_rope": "bool", "memory_keys": "str", "teacher": "str | None"}
    fields = {
        "__annotations__": {**annotations},
        "__module__": __name__,
        "__post_init__": __post_init__,
        "mixers": mixers,
        "to_dict": to_dict,
        "__doc__": f"""A {family.config} in which layers have memories in place of attention.

    Args:
        memory: per layer the mixer of its memory, a name or {{"name": ..., option: ...}}, or None where attention is kept.
        memory_rope: whether memories get q and k rotated, as attention does.
        memory_keys: "shared", where a key and value head serves a group of query heads, each with a memory of its own, or
            "repeated", where each has its own weights for them.
        teacher: the model that the weights are from.
    """,
        "model_type": f"fastweights_{model_type}",
        "memory": None,
        "memory_rope": True,
        "memory_keys": "shared",
        "teacher": None,
    }
    return type(f"{PREFIX}{family.config}", (base,), fields)


def _check_memory(config: Any) -> None:
    """Check the fields of a hybrid, and fill in `memory`."""
    layers = config.num_hidden_layers
    entries = [None] * layers if config.memory is None else check_list("memory", config.memory, "mixers")
    if len(entries) != layers:
        raise ValueError(f"memory must list a mixer or None for each of the {layers} layers, got {len(entries)}")
    for layer, entry in enumerate(entries):
        if entry is not None:
            with error_prefix(f"memory of layer {layer}"):
                mixer_spec(*split_entry(entry, "memory"))
    config.memory = list(entries)
    check_flag("memory_rope", config.memory_rope)
    check_choice("memory_keys", config.memory_keys, KEYS)


@cache
def hybrid_attention(model_type: str) -> type[MemoryAttention]:
    """The class of a family's attention by a memory."""
    return _attention_class(model_type, MemoryAttention)


@cache
def kept_attention(model_type: str) -> type[KeptAttention]:
    """The class of a family's attention that is kept."""
    return _attention_class(model_type, KeptAttention)


def _attention_class(model_type: str, mixin: type) -> Any:
    name = f"{FAMILIES[model_type].name}{mixin.__name__}"
    return type(name, (mixin, FAMILIES[model_type].attention), {"__module__": __name__})


@cache
def hybrid_model(model_type: str) -> type[PreTrainedModel]:
    """The model class of a family's hybrids."""
    from ..own import OwnModel
    from .model import HybridModel

    family = FAMILIES[model_type]
    base = family.find(f"{family.name}ForCausalLM")
    fields = {
        "__module__": __name__,
        "__doc__": f"A {base.__name__} in which layers have memories in place of attention.",
        "config_class": hybrid_config(model_type),
        "attention_class": hybrid_attention(model_type),
        "kept_class": kept_attention(model_type),
    }
    model = type(f"{PREFIX}{base.__name__}", (HybridModel, OwnModel, base), fields)
    AutoModelForCausalLM.register(hybrid_config(model_type), model)
    return model


def __getattr__(name: str) -> Any:
    """The classes by their names, for pickles."""
    for model_type, family in FAMILIES.items():
        if name == f"{PREFIX}{family.config}":
            return hybrid_config(model_type)
        if name == f"{PREFIX}{family.name}ForCausalLM":
            return hybrid_model(model_type)
        if name == f"{family.name}MemoryAttention":
            return hybrid_attention(model_type)
        if name == f"{family.name}KeptAttention":
            return kept_attention(model_type)
    raise AttributeError(f"module {__name__!r} has no attribute {describe_value(name)}")


def register() -> None:
    """Make transformers' Auto classes know the hybrids."""
    for model_type in FAMILIES:
        kind = hybrid_config(model_type)
        AutoConfig.register(kind.model_type, kind)
