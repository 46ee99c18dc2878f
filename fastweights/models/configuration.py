"""Configuration of a language model: its sizes and the mixer of every layer, readable and writable as JSON."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Iterable
from typing import Any

from transformers import GenerationConfig, PreTrainedConfig

from ..checks import (
    LARGEST_DEPTH,
    LARGEST_HEADS,
    LARGEST_WIDTH,
    check_choice,
    check_flag,
    check_list,
    check_positive,
    check_size,
    check_whole_number,
    closest,
    describe_value,
    error_prefix,
)
from ..layers.choice import split_entry
from ..layers.mixer import ConfiguredMixer
from ..layers.registry import MIXERS, mixer_spec
from ..layers.softmax_attention import SoftmaxAttention
from ..private_huggingface import add_adapter_targets
from ..untrusted import one_line
from .cache import CACHE_NAMES
from .inputs import LARGEST_VOCABULARY, check_token

__all__ = ["LORA_TARGETS", "FastWeightsConfig", "how_to_load"]

# The projections of a memory's input and output. Every mixer of the library has some of them.
LORA_TARGETS = ("q_proj", "k_proj", "qk_proj", "v_proj", "o_proj", "in_proj", "out_proj")
# By the names of PEFT's tables, one per method. Those that are not here take LORA_TARGETS.
TARGETS = {
    "GLORA_TARGET": ("q_proj", "k_proj", "qk_proj", "v_proj", "in_proj"),  # it takes no subclass of nn.Linear
    "IA3_TARGET": ("k_proj", "qk_proj", "v_proj", "in_proj", "down_proj"),
    "IA3_FEEDFORWARD": ("down_proj",),
    "LNTUNING_TARGET": ("mixer_norm", "mlp_norm", "norm"),
}
# Far above every model there is, and small enough that a slip of the keyboard does not fill the memory.
LARGEST = {
    "vocab_size": LARGEST_VOCABULARY,
    "hidden_size": LARGEST_WIDTH,
    "num_hidden_layers": LARGEST_DEPTH,
    "num_heads": LARGEST_HEADS,
    "intermediate_size": 2**24,
}
NORMS = ("rms", "layer")
LARGEST_LABELS = 2**20  # transformers lists them one by one
# Keys besides the fields that transformers or this class writes into config.json, or that come with loading one.
TRANSFORMERS_KEYS = {
    "_attn_implementation",
    "_commit_hash",
    "_name_or_path",
    "attn_implementation",
    "auto_map",
    "classifier_dropout",  # of a head that labels tokens
    "experts_implementation",
    "gguf_file",
    "how_to_load",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "quantization_config",
    "torch_dtype",
}
NAMED, LONGEST_KEY = 20, 60  # how many unknown keys of a file a warning names, and how many characters of each


class FastWeightsConfig(PreTrainedConfig):
    """A causal language model of pre-norm blocks, each a sequence mixer and a SwiGLU MLP.

    The defaults have the width, heads and layers of Preconditioned DeltaNet's 340M models; `fastweights.models.preset` has the
    papers' models exactly.

    Args:
        vocab_size: number of tokens.
        hidden_size: width of the residual stream.
        num_hidden_layers: number of blocks.
        num_heads: heads of every mixer.
        mixer: the mixer of every layer, a name of `fastweights.layers.MIXERS` or {"name": ..., option: ...}; or a list of
            these, one per layer (hybrids).
        softmax_layers: layers, counted from 0, that have softmax attention in place of `mixer`, which is then one for all others.
        softmax_options: options of the attention in `softmax_layers`; its defaults when None.
        norm: "rms" for RMSNorms in the residual stream, or "layer" for LayerNorms.
        intermediate_size: width of the MLP; 8/3 of hidden_size rounded up to a multiple of 64 when None, 0 for no MLP.
        norm_eps: of the norms of the residual stream.
        initializer_range: standard deviation of the first weights.
        scale_residuals: whether the first weights of the matrices that write to the residual stream are smaller by the square
            root of their number: two per block, or one without MLP (GPT-2). flash-linear-attention's default is without.
        tie_word_embeddings: whether the output layer shares the embedding's weights.
        use_cache: whether a model in evaluation mode returns a cache by default.
        chunked_loss: whether the loss is computed a chunk of tokens at a time, without the logits of all of them, which a model
            in training mode then does not return; see `FastWeightsForCausalLM.forward`.
        pad_token_id, bos_token_id, eos_token_id: as everywhere in transformers.

    Labels of a head (`num_labels`, `id2label`, `label2id`, `problem_type`) and `dtype` are given as everywhere in transformers.

    Raises:
        ValueError: an unknown key (the message names the nearest valid one; keys of a saved configuration are only warned of),
            mixer or option, or a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    model_type = "fastweights"
    keys_to_ignore_at_inference = list(CACHE_NAMES)
    attribute_map = {"num_attention_heads": "num_heads"}
    auto_map = dict[str, str]()  # TRL reads it of every model that it loads from a folder

    vocab_size: int = 32000
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_heads: int = 8
    mixer: str | dict[str, Any] | list[str | dict[str, Any]] = "gdn"
    softmax_layers: list[int] | tuple[int, ...] = ()
    softmax_options: dict[str, Any] | None = None
    intermediate_size: int | None = None
    norm: str = "rms"
    norm_eps: float = 1e-6
    initializer_range: float = 0.02
    scale_residuals: bool = True
    tie_word_embeddings: bool = False
    use_cache: bool = True
    chunked_loss: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._refuse_unknown(kwargs)
        for name, largest in LARGEST.items():
            if name != "intermediate_size":
                setattr(self, name, check_size(name, getattr(self, name), high=largest))
        check_size("num_labels", kwargs.get("num_labels", 2), high=LARGEST_LABELS)
        for name in ("norm_eps", "initializer_range"):
            check_positive(name, getattr(self, name))
        for name in ("scale_residuals", "tie_word_embeddings", "use_cache", "chunked_loss"):
            check_flag(name, getattr(self, name))
        if self.intermediate_size is None:
            self.intermediate_size = -(-self.hidden_size * 8 // (3 * 64)) * 64
        elif self.intermediate_size != 0:
            largest = LARGEST["intermediate_size"]
            self.intermediate_size = check_size("intermediate_size", self.intermediate_size, high=largest)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            check_token(name, getattr(self, name), self.vocab_size, several=name == "eos_token_id")
        check_choice("norm", self.norm, NORMS)
        self._check_softmax_layers()
        self._check_mixers()
        super().__post_init__(**{**kwargs, "how_to_load": how_to_load("AutoModelForCausalLM")})

    @property
    def num_branches(self) -> int:
        """How many matrices write to the residual stream: a block's mixer, and its MLP where it has one."""
        return self.num_hidden_layers * (2 if self.intermediate_size else 1)

    @property
    def layer_types(self) -> list[str]:
        """Each layer in transformers' words: "linear_attention" for a memory of constant size, "full_attention" for softmax
        attention, "sliding_attention" for softmax attention with a window."""
        types = []
        for name, options in self.mixers():
            spec = MIXERS[name]
            attention = "full" if {**spec.options, **options}.get("window") is None else "sliding"
            types.append(f"{attention if issubclass(spec.layer, SoftmaxAttention) else 'linear'}_attention")
        return types

    def mixers(self) -> list[tuple[str, dict[str, Any]]]:
        """Name and options of the mixer of every layer, checked to exist."""
        if isinstance(self.mixer, (list, tuple)) and len(self.mixer) != self.num_hidden_layers:
            raise ValueError(
                f"mixer must list one mixer per layer, num_hidden_layers is {self.num_hidden_layers}, got {len(self.mixer)}"
            )
        return [self.mixer_of(layer) for layer in range(self.num_hidden_layers)]

    def mixer_of(self, layer: int) -> tuple[str, dict[str, Any]]:
        """Name and options of the mixer of one layer, checked to exist."""
        if layer in self.softmax_layers:
            name, options = "softmax", dict(self.softmax_options or {})
        else:
            entry = self.mixer[layer] if isinstance(self.mixer, (list, tuple)) else self.mixer
            name, options = split_entry(entry, f"mixer of layer {layer}")
        with error_prefix(f"mixer of layer {layer}"):
            mixer_spec(name, options)
        return name, options

    def _check_softmax_layers(self) -> None:
        layers = check_list("softmax_layers", self.softmax_layers, "layer numbers")
        self.softmax_layers = sorted(
            {check_whole_number("softmax_layers", layer, high=self.num_hidden_layers - 1) for layer in layers}
        )
        if self.softmax_layers and isinstance(self.mixer, (list, tuple)):
            raise ValueError(
                f"softmax_layers must be empty where mixer lists the mixer of every layer, got {self.softmax_layers}; name one "
                "mixer, that of all other layers"
            )
        if self.softmax_options is not None:
            if not isinstance(self.softmax_options, dict):
                raise TypeError(f"softmax_options must be a dict, got {describe_value(self.softmax_options)}")
            if not self.softmax_layers:
                raise ValueError(
                    "softmax_options must be None without softmax_layers; name the layers, or put them in mixer"
                )

    def _check_mixers(self) -> None:
        """Check that the options of every mixer fit their kinds, the sizes and each other. Layers of users without `Options`
        check theirs when they are built."""
        checked: list[Any] = []
        for layer, (name, options) in enumerate(self.mixers()):
            spec = MIXERS[name]
            if (name, options) not in checked and issubclass(spec.layer, ConfiguredMixer):
                sizes = {"hidden_size": self.hidden_size, "num_heads": self.num_heads}
                with error_prefix(f"mixer of layer {layer}"):
                    spec.layer.Options.from_keywords(name, {**sizes, **spec.options, **options})
                checked.append((name, options))

    @classmethod
    def unknown_keys(cls, keys: Iterable[str]) -> list[str]:
        """The keys that neither this class nor transformers knows."""
        known = cls._fields() | TRANSFORMERS_KEYS
        return [key for key in keys if key not in known]

    @classmethod
    def _fields(cls) -> set[str]:
        return {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map)

    @classmethod
    def _refuse_unknown(cls, keys: Iterable[str]) -> None:
        for key in cls.unknown_keys(keys):
            raise ValueError(f"{cls.__name__} has no key {key!r}{closest(key, cls._fields())}")

    @classmethod
    def _warn_of_unknown(cls, keys: list[str]) -> None:
        named = [f"'{one_line(key)[:LONGEST_KEY]}'{closest(key, cls._fields())}" for key in keys[:NAMED]]
        more = f" and {len(keys) - NAMED} more" if len(keys) > NAMED else ""
        warnings.warn(
            f"{cls.__name__} does not know these keys of a saved configuration, which change nothing in the model: "
            f"{', '.join(named)}{more}",
            stacklevel=4,
        )

    def _keep(self, key: str, value: Any) -> None:
        """Keep a key of a file as an attribute, as transformers does. Keys are left out that would hide a method, that belong
        to transformers alone, or that are settings of generation, which transformers refuses to save here."""
        if not (key.startswith("_") or hasattr(type(self), key) or hasattr(GenerationConfig(), key)):
            setattr(self, key, value)

    def to_dict(self) -> dict[str, Any]:
        """As in transformers. PEFT calls this before it looks up which layers an adapter is for, so that they are registered
        here."""
        add_adapter_targets(self.model_type, TARGETS, others=LORA_TARGETS)
        return super().to_dict()

    def get_text_config(self, decoder: Any = None, encoder: Any = None) -> FastWeightsConfig:
        """This configuration. transformers would return an attribute named `decoder` or `generator` in its place."""
        return self

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> Any:
        """As in transformers; unknown keys are kept as `from_dict` keeps them."""
        return cls.from_dict(cls.get_config_dict(json_file)[0])

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers: the configuration that a saved dictionary describes. Other tools write keys that are unknown
        here. These are kept as attributes, and a warning names them. Keys that are given beside the dictionary are checked like
        those of a new configuration. An unknown one is refused, unless the caller asks for unused keys to be returned.

        Raises:
            ValueError, TypeError: as for a new configuration.
        """
        saved = dict(config_dict)
        unknown = {key: saved.pop(key) for key in cls.unknown_keys(config_dict)}
        if unknown:
            cls._warn_of_unknown(list(unknown))
        fields = {field.name for field in dataclasses.fields(cls)} - {"dtype"}
        overrides = {key: kwargs.pop(key) for key in list(kwargs) if key in fields}
        return_unused = kwargs.pop("return_unused_kwargs", False)
        config, unused = super().from_dict({**saved, **overrides}, return_unused_kwargs=True, **kwargs)
        for key, value in unknown.items():
            config._keep(key, value)
        if return_unused:
            return config, unused
        cls._refuse_unknown(unused)
        return config


def how_to_load(auto_class: str) -> str:
    """A line in every config.json, for readers to whom transformers says that it does not know the model type `fastweights`."""
    return f"import fastweights.models, then {auto_class}.from_pretrained"
