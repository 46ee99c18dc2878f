"""The PyTorch forms and the mixers on a CUDA device: the numbers of the CPU, training. `pytest -m gpu` on a machine with one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastweights.layers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.testing import CASES
from fastweights.testing.contract.compare import values_and_gradients

from .judging import Record, judge

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_op(name: str, dtype: torch.dtype, packed: bool, record_property: Record) -> None:
    case = CASES[name]
    inputs = case.draw(batch=1 if packed else 2, time=150, key=16, value=16, dtype=dtype)
    edges = torch.tensor([0, 70, 70, 150])
    on_cpu = {"cu_seqlens": edges} if packed else {}
    on_gpu = {"cu_seqlens": edges.cuda()} if packed else {}
    got = values_and_gradients(case, inputs.map(Tensor.cuda), backend="torch", **on_gpu)
    wanted = values_and_gradients(case, inputs.map(Tensor.double), backend="reference", **on_cpu)
    judge(name, "torch", dtype, got, wanted, record_property)


@pytest.mark.parametrize("name", MIXERS)
def test_model_trains_in_bfloat16(name: str) -> None:
    config = FastWeightsConfig(vocab_size=64, hidden_size=64, num_hidden_layers=2, num_heads=2, mixer=name)
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(config).cuda()
    tokens = torch.randint(64, (4, 100), device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(20):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.5
