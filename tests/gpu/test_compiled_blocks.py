"""Blocks of every mixer by torch.compile on a GPU, as `fastweights train` compiles them: losses and gradients of packed rows."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import MIXERS
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language.compiling import compile_model, mark_document_count_dynamic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


def step(model: FastWeightsForCausalLM, lengths: tuple[int, ...]) -> tuple[float, torch.Tensor]:
    """The loss of packed documents and all gradients, one after the other."""
    ids = torch.randint(64, (1, sum(lengths)), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    edges = torch.tensor([0, *lengths], device="cuda").cumsum(0, dtype=torch.int32)
    batch = mark_document_count_dynamic({"input_ids": ids, "labels": ids, "cu_seqlens": edges})
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("mixer", MIXERS)
def test_blocks_of_every_mixer(mixer: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    torch.manual_seed(0)
    config = FastWeightsConfig(vocab_size=64, hidden_size=128, num_hidden_layers=2, num_heads=2, mixer=mixer)
    model = FastWeightsForCausalLM(config).cuda().train()
    rows = ((70, 100, 30), (20, 1, 150, 29), (199, 1), (200,))
    eager = [step(model, lengths) for lengths in rows]
    torch._dynamo.reset()
    compile_model(model, "blocks", str(tmp_path_factory.mktemp("cache")))
    compiled, graphs = [], []
    for lengths in rows:
        compiled.append(step(model, lengths))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    for (loss, gradient), (wanted, exact) in zip(compiled, eager, strict=True):
        assert abs(loss - wanted) < 1e-3
        assert (gradient - exact).norm() < 1e-2 * exact.norm()
    assert graphs[0] == graphs[-1] > 0  # other lengths are not compiled for
