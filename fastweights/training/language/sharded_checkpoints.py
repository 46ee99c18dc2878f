"""The tensors of a checkpoint, which every process writes its part of, and any number of processes reads, sharded or not.

    model*.safetensors       whole weights, as transformers saves them: a checkpoint is a saved model too
    optimizer/*.safetensors  moments by the names of parameters; of a sharded training the shards of each process

torch.distributed.checkpoint (DCP) plans who writes what and reads the shards again. Nothing is pickled.
"""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future

from ...files import file_entry, write_checksums, write_json
from ..checkpoints import CheckpointError

__all__ = ["ShardWriter", "first_failure", "load_moments", "load_weights", "tensors_to_write"]

MODEL, OPTIMIZER = "model", "optimizer"
INDEX = "model.safetensors.index.json"  # transformers' name for the list of which weight is in which file
OFFSETS = "DCP_SHARDING_INFO"  # where DCP's reader of safetensors finds which part of a tensor is in a file
MOMENT = "state."  # how DCP's names of moments begin; those of settings begin otherwise
EARLIER = ("optimizer.pt", "optimizer.bin")  # moments in one file, of trainings without FSDP2 and with it

warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)  # by DCP in a single process


def tensors_to_write(model: nn.Module, optimizer: torch.optim.Optimizer, *, rank: int, size: int) -> dict[str, Any]:
    """The weights and moments that process `rank` of `size` writes. Every process calls it."""
    return {
        MODEL: _own_part(_weights(model), rank, size, whole=True),
        OPTIMIZER: _own_part(_moments(model, optimizer), rank, size, whole=False),
    }


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Without those that are tied to others, as transformers saves them."""
    tied: Any = model.all_tied_weights_keys
    weights: dict[str, Any] = get_model_state_dict(model)
    return {name: x for name, x in weights.items() if name not in tied}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The tensors of the optimizer's state themselves, by names of parameters. They are made if there are none yet."""
    state: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    return {name: x for name, x in state.items() if name.startswith(MOMENT)}


def _own_part(tensors: Mapping[str, Tensor], rank: int, size: int, *, whole: bool) -> dict[str, Tensor]:
    """The shards of process `rank`, and of the tensors that all processes have a share of about as many numbers as the others'.
    whole: gather sharded tensors, one at a time, and share them out too."""
    own: dict[str, Tensor] = {}
    dealt = [0] * size  # numbers, to each process
    for name, x in sorted(tensors.items(), key=lambda entry: -entry[1].numel()):
        if isinstance(x, DTensor) and not whole:
            own[name] = x
            continue
        owner = dealt.index(min(dealt))
        dealt[owner] += x.numel()
        gathered = x.full_tensor() if isinstance(x, DTensor) else x
        if owner == rank:
            own[name] = gathered
    return own


class ShardWriter(dcp.FileSystemWriter):
    """Writes the part of a process to one file of weights and one of moments, each with its checksum, and completes the folder
    when all processes have written theirs.

    The files are those of DCP's HuggingFaceStorageWriter, whose own way copies all tensors twice and holds Python's lock
    meanwhile: training steps would wait for it.

    Args:
        folder: of the checkpoint, with all other files in it.
        rank, size: of this process, and how many there are.
        publish: called in the main process at the end.
    """

    def __init__(self, folder: Path, rank: int, size: int, publish: Callable[[], None]) -> None:
        super().__init__(folder)
        self._folder, self._publish, self._size = folder, publish, size
        part = f"{rank + 1:05}-of-{size:05}"
        self._files = {
            MODEL: f"model-{part}.safetensors" if size > 1 else "model.safetensors",
            OPTIMIZER: f"{OPTIMIZER}/shard-{part}.safetensors",
        }

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        parts = defaultdict(list)
        for item in plan.items:
            parts[item.index.fqn.partition(".")[0]].append(item)
        done: Future[list[WriteResult]] = Future()
        done.set_result([result for part, items in parts.items() for result in self._write(part, items, planner)])
        return done

    def _write(self, part: str, items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
        names = [item.index.fqn.removeprefix(f"{part}.") for item in items]
        tensors: Any = [planner.resolve_data(item) for item in items]
        offsets = {name: {"saved_offsets": list(item.index.offset or ())} for name, item in zip(names, items)}
        path = self._folder / self._files[part]
        path.parent.mkdir(exist_ok=True)
        # One entry: of several the order in the file would be another in every process.
        about = {"format": "pt"} if part == MODEL else {OFFSETS: json.dumps(offsets)}
        save_file({name: x.detach().contiguous() for name, x in zip(names, tensors)}, path, metadata=about)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        entry = file_entry(path)
        return [WriteResult(item.index, x.nbytes, (self._files[part], entry)) for item, x in zip(items, tensors)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = list(chain(*results))
        if self._size > 1:
            weights = [one for one in written if one.index.fqn.startswith(f"{MODEL}.")]
            where = {one.index.fqn.removeprefix(f"{MODEL}."): one.storage_data[0] for one in weights}
            size = sum(one.size_in_bytes for one in weights)
            write_json(self._folder / INDEX, {"metadata": {"total_size": size}, "weight_map": where})
        write_checksums(self._folder, dict(one.storage_data for one in written))
        self._publish()


def load_weights(model: nn.Module, checkpoint: Path) -> None:
    """Fill the weights of a model, sharded or not, from a checkpoint, also one of an earlier version."""
    _read(_weights(model), checkpoint)


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> None:
    """Fill the moments of an optimizer, sharded or not, from a checkpoint, also one of an earlier version. Its settings stay.

    Raises:
        CheckpointError: the checkpoint has moments that this optimizer does not have.
    """
    held, folder = _moments(model, optimizer), checkpoint / OPTIMIZER
    earlier = None if folder.is_dir() else _earlier_moments(model, optimizer, checkpoint)
    saved = _reader(folder).read_metadata().state_dict_metadata.keys() if earlier is None else earlier.keys()
    others = sorted(saved - held.keys())
    if others:
        raise CheckpointError(
            f"checkpoint {checkpoint} must be of a training with the same optimizer, but has {len(others)} moments that the "
            f"optimizer here does not have, such as {others[0]}; set keep_optimizer to false, or train with that optimizer"
        )
    for name in held.keys() - saved:  # of parameters that had no gradient yet: a first step begins with zeros
        held[name].zero_()
    if earlier is None:
        _read({name: held[name] for name in saved}, folder)
        return
    for name, x in earlier.items():
        target = held[name]
        if isinstance(target, DTensor):
            x = distribute_tensor(x.to(target.device), target.device_mesh, target.placements)
        target.copy_(x)


def _earlier_moments(model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: Path) -> dict[str, Tensor]:
    """Whole moments by names of parameters, which without FSDP2 had numbers instead: their places in the groups."""
    file = next(checkpoint / name for name in EARLIER if (checkpoint / name).is_file())
    saved = torch.load(file, map_location="cpu", weights_only=True)
    groups: Any = get_optimizer_state_dict(model, optimizer)["param_groups"]
    keys, names = ([group["params"] for group in some] for some in (saved["param_groups"], groups))
    if list(map(len, keys)) != list(map(len, names)):
        raise CheckpointError(
            f"checkpoint {checkpoint} must be of a training with the same groups of parameters, which an earlier version saved "
            "by their places in these; set keep_optimizer to false, or train with those groups"
        )
    by_key = (
        dict(zip(chain(*keys), chain(*names))) if file.name == EARLIER[0] else {name: name for name in saved["state"]}
    )
    return {f"{MOMENT}{by_key[key]}.{name}": x for key, state in saved["state"].items() for name, x in state.items()}


def _reader(folder: Path) -> dcp.HuggingFaceStorageReader:
    return dcp.HuggingFaceStorageReader(str(folder))


def _read(tensors: dict[str, Tensor], folder: Path) -> None:
    with first_failure():
        dcp.load(tensors, storage_reader=_reader(folder))


@contextmanager
def first_failure() -> Iterator[None]:
    """In place of DCP's exception, which is no Exception, the first of those that it lists by processes."""
    try:
        yield
    except CheckpointException as error:
        raise next(iter(error.failures.values()))[0] from error
