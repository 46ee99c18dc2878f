"""Trainings by torchtitan on one, two and four processes: however a model is divided, losses and gradients are those of one."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

from fastweights.models import FastWeightsForCausalLM

from .configs import MadeUpRows, architecture
from .jobs import refusal, started, train

TENSOR, CONTEXT = "parallelism.tensor_parallel_degree", "parallelism.context_parallel_degree"
REPLICAS = "parallelism.data_parallel_replicate_degree"
HYBRID = ["gdn", {"name": "softmax", "num_kv_heads": 1}]  # which two processes share


@cache
def alone(mixer: str = "gdn", tied: bool = False) -> dict[str, Any]:
    return started(1).run(train, {}, 3, True, model_of(mixer, tied))[0]


def model_of(mixer: str, tied: bool = False) -> dict[str, Any]:
    return {"mixer": HYBRID if mixer == "hybrid" else mixer, "tie_word_embeddings": tied}


def check(count: int, settings: dict[str, Any], mixer: str = "gdn", tied: bool = False) -> None:
    wanted = alone(mixer, tied)
    found = started(count).run(train, settings, 3, True, model_of(mixer, tied))
    assert sum(one["read"] for one in found) == wanted["read"] * settings.get(TENSOR, 1)
    for one in found:
        for part in ("losses", "norms"):
            torch.testing.assert_close(list(one[part].values()), list(wanted[part].values()), rtol=2e-5, atol=0)
    torch.testing.assert_close(found[0]["weights"], wanted["weights"], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "settings", [{}, {REPLICAS: 2}, {TENSOR: 2}, {CONTEXT: 2}], ids=["fsdp", "replicas", "tensor", "context"]
)
def test_two_processes_train_as_one(settings: dict[str, Any]) -> None:
    check(2, settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [{TENSOR: 2}, {CONTEXT: 2}, {TENSOR: 2, CONTEXT: 2}, {REPLICAS: 2}],
    ids=["tensor", "context", "tensor and context", "replicas"],
)
def test_four_processes_train_as_one(settings: dict[str, Any]) -> None:
    check(4, settings)


@pytest.mark.parametrize("way", [TENSOR, CONTEXT])
@pytest.mark.parametrize("mixer", ["rwkv7", "palimpsa-m", "mamba2", "hybrid"])
def test_other_mixers_are_divided(mixer: str, way: str) -> None:
    check(2, {way: 2}, mixer)


@pytest.mark.parametrize("way", [TENSOR, CONTEXT])
def test_tied_embeddings_stay_tied(way: str) -> None:
    check(2, {way: 2}, tied=True)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_checkpoint": FullAC.Config()},
        {"activation_checkpoint": SelectiveAC.Config(), TENSOR: 2},
        {"activation_checkpoint": FullAC.Config(), CONTEXT: 2},
        {"compile.enable": True, "compile.backend": "aot_eager"},
        {"compile.enable": True, "compile.backend": "aot_eager", TENSOR: 2, "activation_checkpoint": FullAC.Config()},
        {"compile.enable": True, "compile.backend": "aot_eager", CONTEXT: 2},
    ],
    ids=[
        "recomputed",
        "recomputed, tensor",
        "recomputed, context",
        "compiled",
        "compiled, tensor",
        "compiled, context",
    ],
)
def test_recomputed_and_compiled_blocks_train_as_others(settings: dict[str, Any]) -> None:
    check(2, settings)


def test_parameters_are_gathered_in_bfloat16() -> None:
    found = started(2).run(train, {"training.mixed_precision_param": "bfloat16", TENSOR: 2}, 3)[0]["losses"]
    assert found != alone()["losses"] and found == pytest.approx(alone()["losses"], rel=0.02)


def test_validation_reads_divided_rows() -> None:
    validates = {
        "validator.enable": True,
        "validator.steps": 2,
        "validator.dataloader": MadeUpRows.Config(documents=True),
    }
    (wanted,), (found,) = (started(2).run(train, {**validates, way: 2}, 1)[0]["validated"] for way in (TENSOR, CONTEXT))
    assert found == pytest.approx(wanted, rel=1e-5)


def test_first_weights_are_those_of_the_seed() -> None:
    torch.manual_seed(3)
    wanted = FastWeightsForCausalLM(architecture()).state_dict()
    for count, settings in ((1, {}), (2, {TENSOR: 2}), (2, {})):
        found = started(count).run(train, settings, 0, True)[0]["weights"]
        assert found.keys() == wanted.keys() and all(torch.equal(found[name], x) for name, x in wanted.items())


@pytest.mark.parametrize(
    ("settings", "model", "message"),
    [
        (
            {TENSOR: 2},
            {"num_heads": 1},
            r"num_heads must be a multiple of the number of tensor-parallel processes, 2, got 1",
        ),
        ({TENSOR: 2, "parallelism.enable_sequence_parallel": True}, {}, r"enable_sequence_parallel must be False"),
        (
            {"parallelism.pipeline_parallel_degree": 2},
            {},
            r"pipeline_parallel_degree must be 1 for models of fastweights",
        ),
        ({"parallelism.spmd_backend": "spmd_types"}, {}, r'spmd_backend must be "partial_dtensor" .* got "spmd_types"'),
        (
            {},
            {"vocab_size": 63},
            r"must have an entry for every token, but the tokenizer in .* has 64 and vocab_size is 63",
        ),
    ],
    ids=["heads", "sequence", "pipeline", "backend", "vocabulary"],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], model: dict[str, Any], message: str) -> None:
    for found in started(2).run(refusal, settings, model):
        assert re.search(message, found), found
