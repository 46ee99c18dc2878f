"""Let a model read sequences that are divided over the ranks of a process group."""

from __future__ import annotations

from typing import Any, TypeVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..checks import describe_value
from ..layers import Mixer
from ..models.modeling import FastWeightsPreTrainedModel
from ..ops.context_parallel.group import ContextParallel, Way, as_context_parallel

__all__ = ["context_parallel", "ranks_of", "whole_sequences"]

Model = TypeVar("Model", bound=nn.Module)


def context_parallel(model: Model, group: Any, way: Way = "auto") -> Model:
    r"""Divide every sequence that the model reads over the processes of a group: rank r of N has the r-th part of the tokens.

    All ranks call a language model with the same whole batch (ids [B, T], labels and what describes documents or padding). The
    model lays the sequences end to end, repeats the last token until N parts are equal, and computes one of them. Its logits and
    hidden states are those of this part, [1, part, ...]; `gather_tokens` has all of them. Its loss is the mean over all tokens,

    $$L = \frac{1}{n} \sum_{r=1}^{N} \sum_{t \in \mathrm{part}_r} \ell_t,$$

    on every rank, and backward leaves N times a rank's own summands in the gradients. Their mean over the ranks, which
    DistributedDataParallel and FSDP2 compute over all processes, is the gradient. Heads that label texts, tokens or answers see
    the hidden states of all ranks. A mixer outside a model gets its part of x and the cu_seqlens of the whole row.

    With Dropout each rank draws its own. A model that is already compiled, wrapped by DistributedDataParallel or sharded by FSDP2
    may be given as well.

    Args:
        model: a model or a module with mixers of this library, changed in place.
        group: a `torch.distributed.ProcessGroup`, a `DeviceMesh` of one dimension or a `ContextParallel`.
        way: how memories work on a whole sequence: "heads" exchanges heads for tokens, "state" passes states from rank to rank
            where the rule allows it, "auto" chooses for each op.

    Returns:
        The model.

    Raises:
        TypeError: model is no module, or group no process group.
        ValueError: no mixer in the model, or one that does not support it; no process group, or another way.
    """
    mixers = _mixers(model)
    cp = ranks_of(group, way)
    for name, mixer in mixers.items():
        if not mixer.serves_context_parallel:
            raise ValueError(
                f"model must have mixers that serve context parallelism, got {type(mixer).__name__} at "
                f"{name or 'its top'}, whose attribute serves_context_parallel is False; set it to True in a class whose forward "
                "passes **self.cp_keywords on to every op, convolution and RuleCall and looks across tokens nowhere else (as "
                "MemoryLayer.forward), or use another mixer"
            )
    _set(model, as_context_parallel(cp))
    return model


def whole_sequences(model: Model) -> Model:
    """Undo `context_parallel`: every process has sequences of its own again, and may generate.

    Raises:
        TypeError: model is no module.
        ValueError: no mixer in the model.
    """
    _mixers(model)
    _set(model, None)
    return model


def ranks_of(group: Any, way: Way = "auto") -> ContextParallel:
    """What the argument `group` of the functions here stands for."""
    if isinstance(group, ContextParallel):
        return group
    return ContextParallel(group.get_group() if isinstance(group, DeviceMesh) else group, way)


def _mixers(model: object) -> dict[str, Mixer]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module with mixers, got {describe_value(model)}")
    mixers = {name: module for name, module in model.named_modules() if isinstance(module, Mixer)}
    if not mixers:
        raise ValueError(f"model must contain a fastweights.layers.Mixer, got {type(model).__name__} without one")
    return mixers


def _set(model: nn.Module, cp: ContextParallel | None) -> None:
    for module in model.modules():
        if isinstance(module, (Mixer, FastWeightsPreTrainedModel)):
            module.cp_group = cp
