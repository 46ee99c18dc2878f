"""The language models of this library in torchtitan's trainer, of which nothing is imported before these functions are called:
`torchrun -m torchtitan.train --module fastweights.integrations.torchtitan --config gdn_340m`.

What the package builds on moves between torchtitan's versions: `TESTED` says which one is known here.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ... import environment
from ...models import FastWeightsConfig

if TYPE_CHECKING:
    from torchtitan.protocols.model_spec import ModelSpec

__all__ = ["INSTALL", "TESTED", "check_version", "model_registry", "save_model_folder"]

TESTED = "0.3.0"  # the version that the extra `torchtitan` in pyproject.toml asks for
INSTALL = "install it with Python 3.11 or later: pip install 'fastweights[torchtitan]'"


def check_version() -> None:
    """ValueError where torchtitan is missing or of a version that this package does not know."""
    environment.check_version("torchtitan", environment.installed_version("torchtitan"), TESTED, INSTALL)


def model_registry(flavor: str | Path | FastWeightsConfig) -> ModelSpec:
    """What torchtitan needs to build, divide, train, save and load a model.

    Args:
        flavor: a preset by its name ("gdn-340m"), a folder with the config.json of a saved model, or a configuration.

    Raises:
        ValueError: no such preset or folder, or torchtitan is missing or of another version.
    """
    check_version()
    from .spec import build_spec

    return build_spec(flavor)


def save_model_folder(
    checkpoint: str | Path, folder: str | Path, config: FastWeightsConfig, tokenizer: str | Path | None = None
) -> None:
    """Make the folder of a saved model, whole or not at all, of a checkpoint that torchtitan wrote on any number of processes.

    Args:
        checkpoint: one of its folders step-N.
        folder: of the saved model; `FastWeightsForCausalLM.from_pretrained` loads it. A saved model that is there is replaced.
        config: of the model that was trained.
        tokenizer: folder of the tokenizer it was trained with (`hf_assets_path`), which is saved beside it.

    Raises:
        ValueError: no checkpoint, or torchtitan is missing or of another version.
        OSError: files that belong to no saved model are in the way.
    """
    check_version()
    from .checkpoints import export

    export(Path(checkpoint), Path(folder), config, None if tokenizer is None else Path(tokenizer))
