"""Checks the files with a model's weights before they are loaded: safetensors in the folder itself, of the model's sizes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from ..environment import usable_memory
from ..untrusted import one_line, read_json_object

__all__ = ["check_fit", "check_memory", "check_weights", "read_weights"]

FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}  # bytes of a number
LARGEST_HEADER = 16 * 2**20  # bytes; a model of ten thousand layers has about a tenth
MOST_HOLES = 10_000  # in one file; they are counted one by one
SMALL = 2**30  # bytes of a file that may be holes, as of a model of zeros
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# A distributed checkpoint and an adapter: where transformers finds one, it reads more than the files below, or others.
OTHERS = {"adapter_config.json": "a PEFT adapter", "shard-*-model-*.safetensors": "a distributed checkpoint"}


def check_weights(folder: Path, config: Any) -> dict[str, list[int]]:
    """The shape of every tensor by name. The weights are checked to be safe to load and to have as many layers as the
    configuration.

    Only the headers of the files are read. Layers are counted first, because a model of a billion layers could not be built to
    compare the shapes (see `check_fit`).

    Raises:
        ValueError: no safetensors files, files of another kind, files outside the folder, damaged headers, weights that are
            quantised or no floating-point numbers, large files that are mostly holes, or a number of layers that differs from
            the configuration.
    """
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            f"{folder / 'config.json'} must be of a model that is not quantised, but has quantization_config; load it with "
            "transformers, dequantize() it and save it"
        )
    for pattern, what in OTHERS.items():
        for path in folder.glob(pattern):
            raise ValueError(
                f"{folder} must hold a whole model, but {path.name} is of {what}; load it with transformers or peft and save "
                "the whole model with save_pretrained"
            )
    shapes, layers = {}, set[int]()
    files = _find_files(folder)
    _check_not_empty(folder, files)
    for path in files:
        _check_header(path)
        for name, kind, shape in _read_tensors(path):
            if kind not in FLOATS:
                raise ValueError(f"{path} must hold floating-point weights, but {one_line(name)} is {kind}")
            shapes[name] = shape
            layers.update(map(int, LAYER.findall(name)[:1]))
    if layers != set(range(config.num_hidden_layers)):
        raise ValueError(
            f"the weights in {folder} are not those of its config.json: num_hidden_layers is {config.num_hidden_layers:,}, and "
            f"the weights are of {len(layers):,}"
        )
    return shapes


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor by name, of a folder that has passed `check_weights`."""
    return {name: weight for path in _find_files(folder) for name, weight in load_file(path).items()}


def check_memory(folder: Path) -> None:
    """ValueError if the weights take more memory than this machine has. The system would otherwise end the process without a
    message."""
    size, memory = sum(path.stat().st_size for path in _find_files(folder)), usable_memory()
    if size > memory:
        raise ValueError(
            f"the weights in {folder} must fit into the memory of this machine, {memory / 1e9:,.0f} GB, got {size / 1e9:,.0f} GB"
        )


def check_fit(folder: Path, shapes: Mapping[str, list[int]], model: PreTrainedModel, *, exactly: bool) -> None:
    """ValueError if a weight has another shape than in `model`, which may be on the device "meta".

    exactly: whether the weights must be all those of `model` and no others.
    """
    weights = model.state_dict()
    for name, parameter in weights.items():
        shape, wanted = shapes.get(name), list(parameter.shape)
        if shape is not None and shape != wanted:
            raise ValueError(
                f"the weights in {folder} are not those of its config.json: {name} is {shape} and must be {wanted}"
            )
    if not exactly:
        return
    known = set(weights)
    # the body of the model saves its weights without the prefix
    found = {name if name in known else f"{model.base_model_prefix}.{name}" for name in shapes}
    tied = set(model.all_tied_weights_keys)
    for verb, names in (("lack", known - found - tied), ("have too much:", found - known)):
        if names:
            raise ValueError(
                f"the weights in {folder} are not those of its config.json: they {verb} {_name_some(names)}"
            )


def _name_some(names: Iterable[str]) -> str:
    names = sorted(map(one_line, names))
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _find_files(folder: Path) -> list[Path]:
    """The files that hold the weights."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        return [whole]
    if index.is_file():
        return _find_shards(index)
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise ValueError(
            f"{folder} holds its weights as a pickle ({pickles[0]}), which can run code and is never read; have whoever made it "
            "save them as safetensors, with save_pretrained"
        )
    raise ValueError(f"{folder} holds no weights: there is no model.safetensors in it")


def _find_shards(index: Path) -> list[Path]:
    """The files that an index names."""
    content = read_json_object(index)
    names = content.get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} is damaged: weight_map must say which file holds which weight")
    if not isinstance(content.get("metadata"), dict):
        raise ValueError(f"{index} is damaged: metadata must be a JSON object")
    shards = []
    for name in sorted(set(names.values())):
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{index} must name safetensors files in its own folder, got {name!r}")
        shards.append(index.with_name(name))
        if not shards[-1].is_file():
            raise ValueError(f"{index} names {name!r}, which is not in the folder; copy it there")
    return shards


def _read_tensors(path: Path) -> Iterator[tuple[str, str, list[int]]]:
    """Name, kind of number and shape of every tensor in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dictionary
                tensor = file.get_slice(name)
                yield name, tensor.get_dtype(), tensor.get_shape()
    except (SafetensorError, OSError) as error:
        what = ", but a pickle, which can run code and is never read" if _is_pickle(path) else ""
        raise ValueError(f"{path} is no safetensors file{what}: {one_line(error)}") from None


def _check_header(path: Path) -> None:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
    if LARGEST_HEADER < length <= path.stat().st_size:  # what is longer than the file, the library refuses
        raise ValueError(f"{path} must have a header of at most {LARGEST_HEADER:,} bytes, got {length:,}")


def _check_not_empty(folder: Path, files: Iterable[Path]) -> None:
    """ValueError where most of a file is holes: zeros that take no room on the disk, but all of their size in memory."""
    size = sum(path.stat().st_size for path in files)
    if size > SMALL and (data := sum(map(_bytes_on_disk, files))) < size / 2:
        raise ValueError(
            f"the weights in {folder} must be numbers, but of {size:,} bytes only {data:,} are on the disk and the others are "
            "zeros; get the files again"
        )


def _bytes_on_disk(path: Path) -> int:
    """Bytes that the file takes on the disk, without its holes where the file system can tell."""
    if not hasattr(os, "SEEK_HOLE"):
        return path.stat().st_size
    found, end = 0, 0
    with path.open("rb", buffering=0) as file:
        try:
            for _ in range(MOST_HOLES):
                start = file.seek(end, os.SEEK_DATA)
                end = file.seek(start, os.SEEK_HOLE)
                found += end - start
        except OSError:  # no data is left
            return found
    return found


def _is_pickle(path: Path) -> bool:
    """Whether the file begins as those that torch.save and pickle write."""
    with path.open("rb") as file:
        return file.read(2) in (b"PK", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
