"""The teacher of a distillation: loaded once per process, called without gradients, its outputs optionally kept on disk."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..evaluation.causal_models import final_hidden
from ..models import HybridModel
from ..models.hybrid import FAMILIES
from ..models.hybrid.linearize import keep_all
from ..models.hybrid.model import positions_of
from ..models.loading import find_saved_model, load_weights
from ..training.language.processes import largest_of_processes
from .cache import RowCache

__all__ = ["HIDDEN", "INPUTS", "OUTPUTS", "Int8Linear", "Teacher", "load_teacher", "quantize_linears", "teacher_blocks"]

# What a batch gets of a teacher: final hidden states [1, B T, E]; of each converted layer [layers, 1, B T, E].
HIDDEN, INPUTS, OUTPUTS = "teacher_hidden", "teacher_inputs", "teacher_outputs"


class Int8Linear(nn.Module):
    r"""A linear layer whose weight is kept in 8 bits, for a model that is only read:

    $$y = s \odot (x \hat W^\top) + b, \qquad s_o = \max_i |W_{oi}| / 127, \quad \hat W = \mathrm{round}(W / s)$$ with one
    scale per output channel. Products are in the dtype of x. (Quantisation by the absolute maximum: Dettmers et al. 2022,
    section 2.1.)

    Attributes:
        weight: [out, in], the bits of int8.
        scale: [out], of the dtype of the layer that it is made of.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scale = (weight.abs().amax(1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        # FSDP2 shards parameters alone, and in torch 2.11 only those of a floating dtype.
        bits = (weight / scale[:, None]).round().to(torch.int8).view(torch.float8_e4m3fn)
        self.weight = nn.Parameter(bits, requires_grad=False)
        self.scale = nn.Parameter(scale.to(linear.weight.dtype), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        y = F.linear(x, self.weight.view(torch.int8).to(x.dtype)) * self.scale.to(x.dtype)
        return y if self.bias is None else y + self.bias.to(x.dtype)


def quantize_linears(model: PreTrainedModel) -> None:
    """Put an `Int8Linear` in place of every `nn.Linear` of a causal language model but its output layer."""
    for parent in list(model.base_model.modules()):
        for name, part in parent.named_children():
            if type(part) is nn.Linear:
                setattr(parent, name, Int8Linear(part))


def teacher_blocks(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of a teacher that processes share one by one; none where its decoder has no `layers`."""
    return list(getattr(model.base_model, "layers", ()))


def share_blocks(model: PreTrainedModel, device: torch.device) -> None:
    """Shard the blocks of a teacher over all processes (FSDP2). A block is whole in a process while it computes there. The
    embedding, the last norm and the output layer stay whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    blocks = teacher_blocks(model)
    if not blocks:
        return
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    outside = set(model.base_model.parameters()) - {p for block in blocks for p in block.parameters()}
    for block in blocks:
        fully_shard(block, mesh=mesh)
    # The blocks' root, by which the next block is gathered while one computes.
    fully_shard(model.base_model, mesh=mesh, ignored_params=outside)


def load_teacher(folder: str | Path, dtype: str, device: torch.device, *, shared: bool = False) -> Any:
    """The model in a folder, as `DistillRun.teacher_dtype` says, in evaluation mode and without gradients. shared: between all
    processes (`share_blocks`), which then have to call it together.

    One whose attention can become a memory is the hybrid that keeps all attention: the same model, which reads packed rows
    without a mask.
    """
    model = load_weights(find_saved_model(Path(folder)), "bfloat16" if dtype == "int8" else dtype)
    if model.config.model_type in FAMILIES and not hasattr(model.config, "quantization_config"):
        model = keep_all(model)
    if dtype == "int8":
        quantize_linears(model)
    model.eval().requires_grad_(False)
    if shared:
        share_blocks(model, device)
    return model.to(device)


class Teacher:
    """A pretrained model that is read.

    Args:
        folder: of the model.
        dtype: "bfloat16", "float32" or "int8" (`DistillRun.teacher_dtype`).
        device: where it computes.
        layers: whose attention is observed.
        length: tokens of a row.
        cache: where final hidden states are kept; None computes them each time.
        shared: whether its blocks are sharded over all processes, each of which then has to read as many batches.

    Attributes:
        model: in evaluation mode, without gradients.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: str,
        device: torch.device,
        *,
        layers: Sequence[int] = (),
        length: int,
        cache: RowCache | None = None,
        shared: bool = False,
    ) -> None:
        self.model = load_teacher(folder, dtype, device, shared=shared)
        self._layers, self._length, self._cache, self._shared = tuple(layers), length, cache, shared

    @torch.no_grad()
    def read(self, batch: Mapping[str, Any], *, observe: bool) -> dict[str, Tensor]:
        """What the teacher computes of a packed batch: `HIDDEN`, and with `observe` the inputs and outputs of attention, `INPUTS`
        and `OUTPUTS`.

        A model that is no hybrid reads the rows side by side. As one row of all tokens, as the student has them, its attention
        would compute and mask what a row sees of others.
        """
        ids_1N = batch["input_ids"]
        ids_BT = ids_1N.view(-1, min(self._length, ids_1N.shape[1]))
        positions_BT = positions_of(batch["cu_seqlens"], ids_1N.shape[1], ids_1N.device).view_as(ids_BT)
        packed = isinstance(self.model, HybridModel)
        given = (
            {"cu_seqlens": batch["cu_seqlens"], "max_length_q": ids_BT.shape[1]}
            if packed
            else {"position_ids": positions_BT}
        )
        with ExitStack() as stack:
            seen = stack.enter_context(self._observed(ids_BT)) if observe else {}
            compute = partial(self._final_hidden, ids_1N if packed else ids_BT, ids_BT.shape, given)
            cache = None if observe else self._cache
            hidden_BTE = compute() if cache is None else cache.read(ids_BT, positions_BT, compute, self._agree)
        return {name: x.flatten(-3, -2).unsqueeze(-3) for name, x in {HIDDEN: hidden_BTE, **seen}.items()}

    def _agree(self, missing: bool) -> bool:
        """Whether rows are missing in any of the processes that share the teacher."""
        return bool(largest_of_processes(missing)) if self._shared else missing

    def _final_hidden(self, ids: Tensor, shape: Sequence[int], given: Mapping[str, Any]) -> Tensor:
        with torch.autocast(ids.device.type, enabled=False):
            return final_hidden(self.model, ids, use_cache=False, **given).view(*shape, -1)

    @contextmanager
    def _observed(self, ids_BT: Tensor) -> Iterator[dict[str, Tensor]]:
        """Inputs and outputs [layers, B, T, E] of the attention of `layers`, which a forward within fills in."""
        weight = self.model.get_input_embeddings().weight
        shape = (len(self._layers), *ids_BT.shape, self.model.config.hidden_size)
        seen = {name: torch.empty(shape, dtype=weight.dtype, device=weight.device) for name in (INPUTS, OUTPUTS)}

        def note(number: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            x = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            for name, y in ((INPUTS, x), (OUTPUTS, output[0])):
                seen[name][number] = y.view_as(seen[name][number])

        hooks = [
            self.model.model.layers[layer].self_attn.register_forward_hook(partial(note, number), with_kwargs=True)
            for number, layer in enumerate(self._layers)
        ]
        try:
            yield seen
        finally:
            for hook in hooks:
                hook.remove()
