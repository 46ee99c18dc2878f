"""Documents that position_ids or cu_seq_lens keep apart, on a CUDA device: a model reads them as it reads them one at a time."""

from __future__ import annotations

import pytest
import torch

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LENGTHS = (70, 1, 100, 29)


@pytest.mark.parametrize("form", ["positions", "positions of two rows", "cu_seq_lens"])
def test_packed_documents_equal_separate_ones(form: str) -> None:
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=64, hidden_size=128, num_hidden_layers=3, num_heads=2, mixer=["gdn", "softmax", "pgdn"]
    )
    model = FastWeightsForCausalLM(config).cuda().eval()
    ids = torch.randint(64, (1, sum(LENGTHS)), device="cuda")
    edges = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0)
    positions = torch.cat([torch.arange(length, device="cuda") for length in LENGTHS])[None]
    packed = {"input_ids": ids, "position_ids": positions}
    if form == "positions of two rows":
        packed = {name: torch.cat([x, x]) for name, x in packed.items()}
    elif form == "cu_seq_lens":
        packed = {"input_ids": ids, "cu_seq_lens_q": edges.int(), "cu_seq_lens_k": edges.int()}
    with torch.no_grad():
        got = model(**packed).logits
        alone = torch.cat([model(document).logits for document in ids.split(LENGTHS, 1)], 1)
    torch.testing.assert_close(got, alone.expand_as(got), rtol=1e-2, atol=1e-2)
    assert (model(ids).logits - alone).abs().max() > 0.1
