"""Folders of models and tokenizers that somebody else wrote, looked at before any library reads them.

Nothing in such a folder is run. Its files are read only where they are plain files of a sensible size, and they may not lead to
other places.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "AsksForCode",
    "check_file",
    "check_folder",
    "one_line",
    "read_json_object",
]

READ = (".json", ".safetensors", ".jinja", ".txt", ".model", ".bin")  # what a library may read of such a folder
# Bytes of a vocabulary, an index of weights or a template. Parsed JSON takes up to 20 times as much.
LARGEST_TEXT = 64 * 2**20
LARGEST_SETTINGS = 16 * 2**20
# Objects and lists inside each other. Libraries that read deeper ones end with an error of their own.
DEEPEST = 64
# What libraries list one by one from a single number in a file, by the end of its key.
LARGEST_SIZES = {"num_labels": 2**20, "layers": 10_000, "n_layer": 10_000}
LARGEST_TOKENS = 2**20  # of a tokenizer, which may list as many as a setting says
# Files with a JSON object of settings, in which transformers looks for code to run.
SETTINGS = (
    *(
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "processor_config.json",
    ),
    *("preprocessor_config.json", "image_processor_config.json", "video_preprocessor_config.json"),
    *("feature_extractor_config.json", "adapter_config.json"),
)
# Keys by which transformers reads another file, of any name, in place of the one that was checked.
DETOURS = ("configuration_files", "fast_tokenizer_files", "transformers_weights")
LONGEST_MESSAGE = 500


class AsksForCode(ValueError):
    """A file of a model's folder asks for code to be run."""


def check_folder(folder: Path, *, trust_remote_code: bool = False) -> None:
    """Refuse a folder whose files cannot be read safely.

    Args:
        trust_remote_code: whether files may name code to run.

    Raises:
        AsksForCode: settings ask for code to be run.
        ValueError: a pipe, a device or a folder in the place of a file; a link that leads nowhere; a file that is too large;
            settings that are no JSON object, or lead to other files.
    """
    for path in _list_files(folder):
        check_file(path, None if path.suffix in (".safetensors", ".bin") else LARGEST_TEXT)
    for name in SETTINGS:
        if (folder / name).is_file():
            settings = read_json_object(folder / name, LARGEST_SETTINGS)
            _check_sizes(folder / name, settings)
            if not trust_remote_code:
                _refuse_code(folder / name, settings)
            for key in DETOURS:
                if key in settings:
                    raise ValueError(f"{folder / name} must not name other files to be read, but has the key {key!r}")


def read_json_object(path: Path, largest: int = LARGEST_TEXT) -> dict[str, Any]:
    """The JSON object in a file of at most `largest` bytes.

    Raises:
        ValueError: it is damaged, too large, nested too deeply or no object.
    """
    check_file(path, largest)
    try:
        found = json.loads(path.read_bytes())
        _check_nesting(found)
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {one_line(error)}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it must hold a JSON object, got {type(found).__name__}")
    return found


def _check_nesting(value: object) -> None:
    """ValueError if objects and lists are inside each other too deeply."""
    if any(depth >= DEEPEST for depth, _ in _list_containers(value)):
        raise ValueError(f"objects and lists must be at most {DEEPEST} deep")


def _list_containers(value: object) -> Iterator[tuple[int, Any]]:
    """Every object and list of a JSON value, with the number of those around it."""
    left = [(0, value)]
    while left:
        depth, outer = left.pop()
        if isinstance(outer, (dict, list)):
            yield depth, outer
            inside = outer.values() if isinstance(outer, dict) else outer
            left += [(depth + 1, inner) for inner in inside if isinstance(inner, (dict, list))]


def _check_sizes(path: Path, settings: Mapping[str, Any]) -> None:
    """ValueError if a number in settings would make a library list millions of layers, labels or tokens."""
    of_tokenizer = path.name == "tokenizer_config.json"
    objects = (inner for _, inner in _list_containers(settings) if isinstance(inner, dict))
    numbers = ((key, value) for inner in objects for key, value in inner.items() if isinstance(value, int))
    for key, value in numbers:
        ends = (largest for end, largest in LARGEST_SIZES.items() if key.endswith(end))
        largest = next(ends, LARGEST_TOKENS if of_tokenizer and "max" not in key else None)
        if largest is not None and value > largest:
            raise ValueError(
                f"{path}: {one_line(key)} must be a positive whole number of at most {largest:,}, got {one_line(value)}"
            )


def one_line(error: object, longest: int = LONGEST_MESSAGE) -> str:
    """The message of an error as one line of printable characters and of a sensible length, without its middle where it is
    longer: the end often says what to do."""
    text = str(error)
    cut = text if len(text) <= longest else f"{text[: 2 * longest // 3]} ... {text[-longest // 3 :]}"
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in " ".join(cut.split()))


def _list_files(folder: Path) -> Iterator[Path]:
    """Files of the folder that a library may read."""
    templates = folder / "additional_chat_templates"
    for place in (folder, templates):
        if place is folder or place.is_dir():
            yield from (path for path in place.iterdir() if path.suffix in READ)


def check_file(path: Path, largest: int | None = LARGEST_TEXT) -> None:
    """ValueError unless `path` is a file, and no pipe, device or folder, of at most `largest` bytes."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a pipe or a device"
        raise ValueError(f"{path} must be a file, got {kind}")
    if largest is not None and status.st_size > largest:
        raise ValueError(f"{path} must have at most {largest:,} bytes, got {status.st_size:,}")


def _refuse_code(path: Path, settings: Mapping[str, Any]) -> None:
    """AsksForCode, with the name of the code, if settings ask for any."""
    if "auto_map" in settings:
        raise AsksForCode(
            f"{path} asks for code to be run (auto_map: {one_line(settings['auto_map'])}), and no code of a model's folder is "
            "run; delete auto_map from that file if the classes of transformers are enough"
        )
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        if "/" in str(settings.get(key)):
            raise AsksForCode(
                f"{path} asks for code to be downloaded and run ({key}: {one_line(settings[key])}), and no such code is run; "
                f"delete {key} from that file"
            )
