"""torchtitan's checkpoints and the folders of saved models, one made of the other."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

from ...files import partial_path, publish_folder
from ...models import FastWeightsConfig, FastWeightsForCausalLM
from ...models.loading import SAVED_MODEL, TOKENIZER_PARTS

__all__ = ["CheckpointsWithConfig", "SavedFolder", "export"]

OUTPUT = "lm_head.weight"
ARCHITECTURE = FastWeightsForCausalLM.__name__


class SavedFolder(StateDictAdapter):
    """torchtitan's adapter between the parameters of a training and those of a saved model, whose names are the same. Of tied
    embeddings a saved model has only the first."""

    def __init__(self, model_config: Any, hf_assets_path: str | None) -> None:
        self.model_config, self.hf_assets_path = model_config, hf_assets_path
        self.fqn_to_index_mapping = None  # one file; the assets may be those of another model

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        tied = self.model_config.architecture.tie_word_embeddings
        return {name: x for name, x in state_dict.items() if not (tied and name == OUTPUT)}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return dict(hf_state_dict)


class CheckpointsWithConfig(CheckpointManager):
    """torchtitan's checkpoints. With `last_save_in_hf` the last one is a whole saved model, which `from_pretrained` loads."""

    @dataclass(kw_only=True, slots=True)
    class Config(CheckpointManager.Config):
        pass

    def _save_last_step(self, curr_step: int) -> None:
        super()._save_last_step(curr_step)
        if self.last_save_in_hf and dist.get_rank() == 0:
            assert isinstance(self.sd_adapter, SavedFolder)
            folder = Path(self.folder) / f"step-{curr_step}"
            config = self.sd_adapter.model_config.architecture
            config.architectures = [ARCHITECTURE]
            config.save_pretrained(folder)
            _copy_tokenizer(self.sd_adapter.hf_assets_path, folder)


def export(checkpoint: Path, folder: Path, config: FastWeightsConfig, tokenizer: Path | None) -> None:
    """See `fastweights.integrations.torchtitan.save_model_folder`."""
    if not (checkpoint / ".metadata").is_file():
        raise ValueError(f"checkpoint must be a folder step-N of torchtitan with the file .metadata, got {checkpoint}")
    model = FastWeightsForCausalLM(config)
    dcp.load(model.state_dict(), checkpoint_id=str(checkpoint), no_dist=True)
    partial = partial_path(folder)
    model.save_pretrained(partial)
    _copy_tokenizer(tokenizer, partial)
    publish_folder(partial, folder, SAVED_MODEL)


def _copy_tokenizer(source: str | Path | None, folder: Path) -> None:
    """Copy the files of a tokenizer, where there is one, into the folder of a saved model."""
    for name in TOKENIZER_PARTS if source is not None else ():
        file = Path(str(source)) / name
        if file.is_file():
            shutil.copyfile(file, folder / name)
