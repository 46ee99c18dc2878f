"""The memory that `fastweights train --dry-run` estimates, beside that of the trainings that were measured."""

import json

import pytest
import torch
from fastweights_studies.measure.scaling import model_options, settings
from fastweights_studies.places import RESULTS

from fastweights.models import FastWeightsForCausalLM, preset
from fastweights.training.language import LanguageRun
from fastweights.training.language.estimate import LEAST_ACTIVATIONS, activation_bytes, memory_parts


def rows(name, measure):
    return [row for row in json.loads((RESULTS / name).read_text())["rows"] if row["measure"] == measure]


def on_meta(config):
    with torch.device("meta"):
        return FastWeightsForCausalLM(config)


def test_activations_of_measured_presets():
    ratios = []
    for row in rows("training-steps-nvidia-h200.json", "activations_bytes"):
        column = row["column"]
        if "preset" in column and column["library"] == "fastweights" and not row.get("options"):
            run = LanguageRun(precision="bf16", batch_size=column["batch"], length=column["length"])
            ratios.append(row["value"] / activation_bytes(run, on_meta(preset(column["preset"]))))
    assert len(ratios) > 15 and min(ratios) > LEAST_ACTIVATIONS and max(ratios) < 1.54


@pytest.mark.slow
def test_all_memory_of_four_processes():
    """Of one row that is divided over them too: every training that was measured."""
    ratios = []
    for row in rows("scaling-nvidia-h200.json", "memory_bytes"):
        column, mixer = row["column"], row.get("mixer")
        fields = settings(column["gpus"], column["way"], column["length"])
        run = LanguageRun(**{"precision": "bf16", "batch_size": column["batch"], "length": column["length"], **fields})
        model = on_meta(preset(column["preset"], **model_options(mixer)))
        ratios.append(row["value"] / sum(memory_parts(run, model, column["gpus"]).values()))
    assert len(ratios) > 15 and min(ratios) > 0.75 and max(ratios) < 1.1, sorted(ratios)


def test_all_memory_of_two_processes():
    model = on_meta(preset("gdn-1b"))
    for way, fsdp in (("DDP", False), ("FSDP2", True)):
        (row,) = (
            row for row in rows("scaling-nvidia-h100-80gb-hbm3.json", "memory_bytes") if row["column"]["way"] == way
        )
        run = LanguageRun(precision="bf16", batch_size=8, length=2048, fsdp=fsdp)
        assert 0.75 < row["value"] / sum(memory_parts(run, model, 2).values()) < 1.1
