"""What all processes of a training must have in common, compared before any work: versions, code, GPUs, settings, models, text,
and the output folder. Where something differs, every process raises the same ValueError, which names values, ranks and hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ...data.text import PreparedText
from ...environment import code_version, installed_version, versions
from ...files import partial_path, writing
from ...models.loading import find_saved_model
from ...ops.context_parallel.agreement import find_differences
from ...untrusted import one_line
from ..folder import as_stored
from .processes import (
    from_main_process,
    gather_to_main,
    is_main_process,
    name_ranks,
    on_every_process,
    on_main_process,
    world_size,
)
from .run import LanguageRun

__all__ = [
    "check_same_code",
    "check_same_models",
    "check_same_run",
    "check_same_text",
    "check_shared",
    "sample_model",
    "who_sees",
]

SEEN_SECONDS = 60.0  # a network file system may show a new file this late
OF_A_HOST = ("cache",)  # settings that may differ from host to host
OURS = ("FASTWEIGHTS_", "TRITON_INTERPRET")  # how environment variables begin that change what is computed
LONGEST = 60  # characters of a value in a message
SAMPLED = 2**22  # bytes of a file


def check_same_code() -> None:
    """ValueError unless all processes have the same versions, code, environment variables of ours, and kind of GPU."""
    _check_same(
        _describe_process,
        "every process must run the same code on the same kind of GPU",
        "install the same on every host, set the same variables, or start the processes on other hosts",
    )


def _describe_process() -> dict[str, Any]:
    found = {
        **versions(),
        "accelerate": version("accelerate"),
        "triton": installed_version("triton", "pytorch-triton"),
        "the code of fastweights": code_version(),
        **{name: value for name, value in sorted(os.environ.items()) if name.startswith(OURS)},
        "GPU": None,
    }
    if not torch.cuda.is_available():
        return found
    number, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if number >= there:
        raise ValueError(
            f"LOCAL_RANK must be the number of a GPU that this process sees, below {there}, got {number}; start at most {there} "
            "processes on a host, and let each see all of them (srun --gpus-per-node in place of --gpus-per-task)"
        )
    gpu = torch.cuda.get_device_properties(number)
    found |= {"GPU": gpu.name, "memory of the GPU": f"about {round(gpu.total_memory / 2**30, -1):.0f} GiB"}
    if torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def check_same_run(run: LanguageRun, **arguments: Any) -> None:
    """ValueError unless all processes have the same settings, but for the folder of the cache, and the same `arguments`."""

    def settings() -> dict[str, Any]:
        every = as_stored(dataclasses.asdict(run)) | arguments
        return dict(_flatten({name: value for name, value in every.items() if name not in OF_A_HOST}))

    _check_same(
        settings,
        "every process must have the same settings",
        "give all of them the same run file and options",
    )


def check_same_models(singles: Sequence[LanguageRun]) -> None:
    """ValueError unless the models that trainings continue from are the same on every host. Those of stages are yet to come."""
    paths = {path for single in singles for path in single.models_read()}
    _check_same(
        lambda: {
            f"the model {path}": sample_model(find_saved_model(Path(path)))
            for path in sorted(paths)
            if Path(path).exists()
        },
        "every process must continue from the same model",
        "copy its folder to every host, or put it where all hosts see it",
    )


def sample_model(folder: Path) -> str:
    """A hash of settings, and of the sizes and first bytes of weights, which two trainings do not share."""
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")):
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        with file.open("rb") as opened:
            digest.update(opened.read(SAMPLED))
    return digest.hexdigest()[:12]


def check_same_text(texts: Sequence[PreparedText]) -> None:
    """ValueError unless the tokens and tokenizers are the same on every host, where each may have a cache of its own."""
    _check_same(
        lambda: dict(_flatten({"text": [text.fingerprints for text in texts]})),
        "every process must have the same text and tokenizer",
        "use the same files on every host, and delete or copy a cache that is older; or put the cache where all hosts see it",
    )


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Dotted names and their values: "model.num_heads", "stages.0.name"."""
    found = []
    for name, value in settings.items():
        inside = dict(enumerate(value)) if isinstance(value, list) else value
        if isinstance(inside, Mapping) and inside:
            found += _flatten({str(key): one for key, one in inside.items()}, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _check_same(describe: Callable[[], Mapping[str, Any]], wanted: str, remedy: str) -> None:
    """ValueError unless `describe` returns the same in every process."""
    if world_size() == 1:
        return
    records = gather_to_main(on_every_process(describe))
    differences = from_main_process(find_differences(records, _show, name_ranks))
    if differences:
        found = "; ".join(f"{name} is {what}" for name, what in differences.items())
        raise ValueError(f"{wanted}, but {found}. Please {remedy}")


def _show(value: Any) -> str:
    return one_line(json.dumps(value), LONGEST)


def check_shared(output: Path) -> None:
    """ValueError unless every process sees what the main process writes into the folder `output`, which several make."""
    if world_size() == 1:
        return
    seen = who_sees(output / "run.json", SEEN_SECONDS)
    blind = [rank for rank, sees in enumerate(seen) if not sees]
    if blind:
        raise ValueError(
            f"output must be a folder that every process sees, but what {name_ranks(0)} writes into {output} is not there for "
            f"{name_ranks(*blind)}; put it on a file system that all hosts share, under the same path"
        )


def who_sees(path: Path, seconds: float) -> list[bool]:
    """By rank, which processes see within `seconds` a file that the main process writes beside `path`, whose folder is made. The
    file goes again; `drop_partials` knows the one of a process that was killed."""
    mark = on_main_process(lambda: _write_mark(path))
    until = time.monotonic() + seconds
    while not (sees := mark.exists()) and time.monotonic() < until:
        time.sleep(0.2)
        if mark.parent.is_dir():
            any(mark.parent.iterdir())  # a network file system looks again at a folder that is listed
    seen = from_main_process(gather_to_main(sees))
    if is_main_process():
        mark.unlink()
    return seen


def _write_mark(path: Path) -> Path:
    mark = partial_path(path)
    with writing("a file that all processes must see", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    return mark
