"""torchtitan's checkpoints continue on processes that divide the model otherwise, and become folders of saved models and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.integrations.torchtitan import model_registry, save_model_folder
from fastweights.models import FastWeightsForCausalLM

from .configs import LENGTH, architecture, made_up_row
from .jobs import started, train

TENSOR = "parallelism.tensor_parallel_degree"
STEPS = {"lr_scheduler.total_steps": 4, "checkpoint.enable": True, "checkpoint.interval": 2}


def logits_of(folder: Path) -> torch.Tensor:
    tokens, _, positions = made_up_row(0, LENGTH)
    model = FastWeightsForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(tokens[None], position_ids=positions[None]).logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The dump folder of a training of four steps on two processes with FSDP2, and what they found."""
    folder = tmp_path_factory.mktemp("titan")
    settings = {**STEPS, "dump_folder": str(folder), "checkpoint.last_save_model_only": False}
    return folder, started(2).run(train, settings, 4, True)


def test_a_training_continues_on_processes_that_divide_it_otherwise(saved: tuple[Path, list[Any]]) -> None:
    folder, (whole, _) = saved
    settings = {**STEPS, "dump_folder": str(folder), "checkpoint.load_step": 2, "checkpoint.load_only": True, TENSOR: 2}
    (continued, _) = started(2).run(train, settings, 4, True)
    assert list(continued["losses"]) == [3, 4]
    torch.testing.assert_close(continued["losses"], {step: whole["losses"][step] for step in (3, 4)}, rtol=1e-5, atol=0)
    torch.testing.assert_close(continued["weights"], whole["weights"], rtol=0, atol=1e-4)


def test_a_checkpoint_becomes_a_saved_model(saved: tuple[Path, list[Any]], tmp_path: Path) -> None:
    folder, (whole, _) = saved
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    save_model_folder(folder / "checkpoint" / "step-4", tmp_path / "model", architecture(), tmp_path / "tokenizer")
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    torch.testing.assert_close(logits_of(tmp_path / "model"), whole["logits"], rtol=0, atol=1e-5)
    read = model_registry(tmp_path / "model").model.architecture
    assert (read.mixers(), read.hidden_size) == (architecture().mixers(), architecture().hidden_size)
    with pytest.raises(ValueError, match=r"checkpoint must be a folder step-N of torchtitan"):
        save_model_folder(folder, tmp_path / "other", architecture())


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_checkpoint_is_a_saved_model_and_a_training_begins_with_it(tied: bool, tmp_path: Path) -> None:
    settings = {**STEPS, "dump_folder": str(tmp_path), "checkpoint.last_save_in_hf": True, TENSOR: 2}
    model = {"tie_word_embeddings": tied}
    (made, _) = started(2).run(train, settings, 1, True, model)
    folder = tmp_path / "checkpoint" / "step-1"
    wanted = logits_of(folder)
    torch.testing.assert_close(wanted, made["logits"], rtol=0, atol=1e-5)
    begins = {"checkpoint.initial_load_path": str(folder), "checkpoint.initial_load_in_hf": True}
    settings = {**STEPS, "dump_folder": str(tmp_path / "next"), "checkpoint.load_only": True, "debug.seed": 4, **begins}
    (begun, _) = started(2).run(train, settings, 0, True, model)
    torch.testing.assert_close(begun["logits"], wanted, rtol=0, atol=1e-5)
