"""Every private name of transformers, accelerate, PEFT and datasets that fastweights uses, the versions they are tested with, and
what happens without them.

pyproject.toml admits no other versions of transformers. Where a name is gone all the same, classes that need it are refused when
they are defined, by an ImportError that says what to install; of the other functions each says what it does then.

None of the four is imported here: most of the library runs without them.
"""

from __future__ import annotations

import copy
import inspect
import re
import secrets
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import nn

__all__ = [
    "CONVENTIONS",
    "TESTED",
    "GenerationHooks",
    "TrainerHooks",
    "adapt_trainer",
    "add_adapter_targets",
    "dataset_fingerprint",
    "defer_ends",
    "execution_device",
    "is_kept_after_generation",
    "is_placed",
    "keep_after_generation",
    "mask_length",
    "placement_hooks",
    "remove_placement",
    "use_one_gpu",
    "with_attention",
]

TESTED = {"transformers": "5.6 to 5.24", "accelerate": "1.15", "peft": "0.21", "datasets": "5"}

# What transformers asks every author of a model to set or to override, by names that begin with an underscore all the same.
CONVENTIONS = {
    "_init_weights": "first values of one module's parameters",
    "_no_split_modules": "modules whose parameters stay on one device",
    "_skip_keys_device_placement": "arguments that are not moved between devices",
    "_supports_sdpa": "attention by torch's scaled_dot_product_attention",
    "_tied_weights_keys": "parameters that are the same tensor",
}


class Hooks:
    """Mixin in front of a class of transformers, whose private methods it gives names of ours. A subclass overrides these."""

    def __init_subclass__(cls, **extra: Any) -> None:
        """ImportError unless a class behind this one has the private methods."""
        super().__init_subclass__(**extra)
        behind = [one for one in cls.__mro__ if not issubclass(one, Hooks)]
        hooks = [
            name for one in cls.__mro__ if Hooks in one.__bases__ for name in vars(one) if not name.startswith("__")
        ]
        for name in hooks if len(behind) > 1 else ():  # object alone is behind a mixin
            if name.startswith("_") and not any(name in vars(one) for one in behind):
                raise ImportError(
                    f"{cls.__name__} needs the method {name} of transformers, which this version does not have; install "
                    f"transformers {TESTED['transformers']}"
                )


class GenerationHooks(Hooks):
    """In front of GenerationMixin: how generate() makes its cache and reads the prompt.

    Attributes:
        counts_positions: whether the model counts the positions of tokens by itself.
    """

    counts_positions = True

    def read_prompt(
        self, input_ids: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The output of the model for the prompt. args, kwargs: further arguments of transformers."""
        return super()._prefill(input_ids, generation_config, model_kwargs, *args, **kwargs)  # type: ignore[misc]

    def decode_assisted(self, input_ids: Any, mode: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
        """What generate() returns with an assistant. mode: arguments of this way of decoding; model_kwargs: of the model."""
        return super()._assisted_decoding(input_ids, **mode, **model_kwargs)  # type: ignore[misc]

    def decode_one_by_one(self, input_ids: Any, mode: dict[str, Any], model_kwargs: dict[str, Any]) -> Any:
        """What generate() returns by greedy search or sampling. mode, model_kwargs: as above."""
        return super()._sample(input_ids, **mode, **model_kwargs)  # type: ignore[misc]

    def goes_on(self, ended: Any, ask: Callable[[], bool]) -> bool:
        """Whether generate() decodes another token.

        Args:
            ended: whether all sequences have: a tensor in versions whose loop does not look at it.
            ask: the answer of transformers.
        """
        return ask()

    def prepare_cache(self, generation_config: Any, model_kwargs: dict[str, Any], batch_size: int) -> None:
        """Put the cache of the model into model_kwargs, in place of one of transformers' own. batch_size: number of prompts."""
        raise NotImplementedError

    def _prefill(self, *args: Any, **kwargs: Any) -> Any:
        return self.read_prompt(*args, **kwargs)

    def _prepare_cache_for_generation(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        generation_mode: Any,
        batch_size: int,
        max_cache_length: int,
    ) -> Any:
        self.prepare_cache(generation_config, model_kwargs, batch_size)

    def _prepare_position_ids_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        """No position_ids but those that the caller gives where the model counts by itself."""
        return None if self.counts_positions else super()._prepare_position_ids_for_generation(*args, **kwargs)  # type: ignore[misc]

    def _assisted_decoding(self, *args: Any, **kwargs: Any) -> Any:
        return self.decode_assisted(*_split_arguments(super()._assisted_decoding, args, kwargs))  # type: ignore[misc]

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        return self.decode_one_by_one(*_split_arguments(super()._sample, args, kwargs))  # type: ignore[misc]

    def _has_unfinished_sequences(self, this_peer_finished: Any, *args: Any, **kwargs: Any) -> bool:
        ask = super()._has_unfinished_sequences  # type: ignore[misc]
        return self.goes_on(this_peer_finished, lambda: ask(this_peer_finished, *args, **kwargs))


def _split_arguments(loop: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Of a call of a decoding loop: the token ids, its other arguments by name, and those of the model."""
    mode = inspect.signature(loop).bind(*args, **kwargs).arguments
    model_kwargs = mode.pop("model_kwargs", {})
    return mode.pop("input_ids"), mode, model_kwargs


def defer_ends(allows: Callable[[Any], bool]) -> None:
    """Let transformers look for the end of an answer one token late for caches that are allowed. It does so on Apple's GPUs
    alone, and has no place to ask for it, so that its class is changed. Other caches go as before. For versions that cannot do so
    (5.9 cannot, 5.17 can) there is `goes_on`."""
    check = getattr(sys.modules.get("transformers.generation.utils"), "DeferredStopCheck", None)
    if check is None:
        return
    is_supported = check.is_supported

    @wraps(is_supported)
    def is_deferred(device: Any, cache: Any, *args: Any, **kwargs: Any) -> bool:
        return allows(cache) or is_supported(device, cache, *args, **kwargs)

    check.is_supported = staticmethod(is_deferred)


def mask_length(settings: Any, mask: Any) -> int | None:
    """Columns of the attention_mask that generate() was given, of which some versions drop one of ones and note the length in
    the settings of the call. None where no mask is known."""
    return getattr(settings, "_mask_length", None) if mask is None else mask.shape[1]


def keep_after_generation(given: Any) -> None:
    """Tell generate() that its caller has the cache, which it then returns. Another version may leave it out of its result."""
    given._is_user_defined = True


def is_kept_after_generation(cache: Any) -> bool:
    """Whether the caller of generate() has the cache."""
    return getattr(cache, "_is_user_defined", False)


class TrainerHooks(Hooks):
    """In front of Trainer: where its batches go, and what it writes to checkpoints and reads from them."""

    def prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """The batch on the device of this process."""
        return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def checkpoints_folder(self, trial: Any) -> str:
        """Where the folders of checkpoints are made."""
        return super()._get_output_dir(trial)  # type: ignore[misc]

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)  # type: ignore[misc]

    def save_without_weights(self, folder: str) -> None:
        """What a saved model has beside its weights: its configuration, its tokenizer. In a checkpoint this is called for the
        model."""
        super()._save(folder, state_dict={})  # type: ignore[misc]

    def save_optimizer(self, folder: str) -> None:
        """Save the state of the optimizer and of the schedule to a checkpoint."""
        super()._save_optimizer_and_scheduler(folder)  # type: ignore[misc]

    def load_model(self, checkpoint: str, model: Any) -> None:
        super()._load_from_checkpoint(checkpoint, model)  # type: ignore[misc]

    def load_optimizer(self, checkpoint: str | None) -> None:
        """Load the state of the optimizer and of the schedule."""
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]

    def load_random_states(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)  # type: ignore[misc]

    def _prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        return self.prepare_inputs(inputs)

    def _get_output_dir(self, trial: Any) -> str:
        return self.checkpoints_folder(trial)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        self.save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model, or in a checkpoint what it has beside its weights."""
        if _internal_call:
            self.save_without_weights(str(output_dir))
        else:
            super().save_model(output_dir)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.save_optimizer(output_dir)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.load_model(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.load_optimizer(checkpoint)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        self.load_random_states(checkpoint)


def use_one_gpu(arguments: Any) -> None:
    """Let Trainer keep to one GPU of those that it sees: it would split a packed row over all of them.

    Raises:
        RuntimeError: this version of transformers still takes several.
    """
    assert arguments.device is not None  # which sets the number of GPUs
    arguments._n_gpu = min(arguments.n_gpu, 1)
    if arguments.n_gpu > 1:
        raise RuntimeError(
            f"transformers must be {TESTED['transformers']}: this version splits a batch over {arguments.n_gpu} GPUs; set "
            "CUDA_VISIBLE_DEVICES to the number of one"
        )


BeforeCount = Callable[[nn.Module, list], None]
Undecayed = Callable[[nn.Module], Collection[str]]


def adapt_trainer(before_count: BeforeCount, undecayed: Undecayed) -> None:
    """Let transformers' Trainer, once it is imported, ask two functions about its model. That changes the class, because Trainer
    has no place to register them, and users make their trainers themselves, often of subclasses in other libraries. It is done
    once, when the first Trainer gets a model of ours, and both functions leave other models as they are.

    Where a version has lost one of the methods, a warning says which numbers differ then.

    Args:
        before_count: called with the model and the batches of a step before Trainer counts their labels; it may change them.
        undecayed: names of the model's parameters that weight decay must leave alone.
    """
    module = sys.modules.get("transformers.trainer")
    if module is not None:
        _change_trainer(module.Trainer, before_count, undecayed)


@cache
def _change_trainer(trainer: Any, before_count: BeforeCount, undecayed: Undecayed) -> None:
    count, decayed_names = (
        getattr(trainer, name, None) for name in ("_get_num_items_in_batch", "get_decay_parameter_names")
    )
    if count is None or decayed_names is None:
        warnings.warn(
            f"transformers must be {TESTED['transformers']}: in this version Trainer alone counts labels and chooses the "
            "parameters that decay, so that losses of padded and packed rows are too small with gradient accumulation, and rates "
            "of memories decay; install a tested version, or train with gradient_accumulation_steps=1 and weight_decay=0",
            stacklevel=4,
        )
        return

    @wraps(count)
    def _get_num_items_in_batch(self: Any, batch_samples: list, *arguments: Any, **options: Any) -> Any:
        before_count(self.model, batch_samples)
        return count(self, batch_samples, *arguments, **options)

    @wraps(decayed_names)
    def get_decay_parameter_names(self: Any, model: nn.Module) -> list[str]:
        left_alone = undecayed(model)
        return [name for name in decayed_names(self, model) if name not in left_alone]

    trainer._get_num_items_in_batch = _get_num_items_in_batch
    trainer.get_decay_parameter_names = get_decay_parameter_names


def is_placed(module: nn.Module) -> bool:
    """Whether accelerate brings inputs, and the weights that it keeps elsewhere, for the module's call."""
    return "_hf_hook" in vars(module)


def placement_hooks(layer: nn.Module) -> Iterator[Any]:
    """accelerate's hooks on the modules of a layer. With names that are not known here a layer has none, and is refused where its
    parameters are not at hand."""
    return (vars(part)["_hf_hook"] for part in layer.modules() if is_placed(part))


def execution_device(layer: nn.Module) -> torch.device:
    """Where the layer computes: where its parameters are, or where accelerate brings them."""
    for hook in placement_hooks(layer):
        device = getattr(hook, "execution_device", None)
        if device is not None:
            return torch.device(device)
    first = next(layer.parameters(), None)
    return torch.device("cpu") if first is None else first.device


def remove_placement(layer: nn.Module) -> None:
    """Take accelerate's hooks off the layer. The parameters stay where they are, in which this differs from accelerate's own
    `remove_hook_from_module`."""
    for part in layer.modules():
        if vars(part).pop("_hf_hook", None) is not None:
            vars(part).pop("forward", None)
            vars(part).pop("_old_forward", None)


TARGETS_TABLE = re.compile("TRANSFORMERS_MODELS_TO_(.+)_MODULES_MAPPING")


def add_adapter_targets(
    model_type: str, targets: Mapping[str, Sequence[str]], others: Sequence[str], like: str = ""
) -> None:
    """Put the layers that an adapter is for, where its configuration names none, into PEFT's tables of models, if PEFT has been
    imported. PEFT has a table per method and no function to add to it. A version without these tables asks the user for
    `target_modules`.

    Args:
        targets: by what stands between TRANSFORMERS_MODELS_TO_ and _MODULES_MAPPING in the name of a table.
        others: for tables that are not among these.
        like: another model type, whose entries hold for this one where a table has some.
    """
    constants = sys.modules.get("peft.utils.constants")
    for name, table in vars(constants).items() if constants else ():
        found = TARGETS_TABLE.fullmatch(name)
        if found and isinstance(table, dict):
            table.setdefault(model_type, list(table.get(like) or targets.get(found[1], others)))


def dataset_fingerprint(dataset: Any) -> str:
    """What changes whenever the rows of a dataset may. A version of datasets that tells nothing gets a new one each time, so that
    nothing prepared of the dataset is used again."""
    return getattr(dataset, "_fingerprint", None) or secrets.token_hex(8)


def with_attention(config: Any, name: str, changes: Mapping[str, Any]) -> Any:
    """A copy of a model's configuration for one attention module, with the attention function of this name and other changes. The
    constructors of configurations would compute fields anew that a saved one has."""
    copied = copy.copy(config)
    copied.__dict__.update(changes)
    copied._attn_implementation = name
    return copied
