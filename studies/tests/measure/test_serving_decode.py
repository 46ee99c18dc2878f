"""The benchmark of decoding in the pool writes the tokens of generate(), so what it times is the model."""

from __future__ import annotations

import pytest
import torch
from fastweights_studies.measure.serving_decode import PooledModel, same_tokens

from tests.evaluation.small import model


# Bytes per sequence: S [2, 16, 16] and A [2, 16] in float32, windows [3, 32] of one convolution (lattice) or three.
@pytest.mark.parametrize(
    ("mixer", "bytes"), [("gdn", 2048 + 3 * 384), (["lattice", "pgdn"], 2432 + 2048 + 128 + 3 * 384)]
)
@torch.no_grad()
def test_the_pooled_model_writes_the_tokens_of_generate(mixer, bytes):
    pooled = PooledModel(model(mixer, hidden_size=32), 3)
    assert same_tokens(pooled, torch.randint(400, (3, 20)), 8) == 1.0
    assert pooled.bytes == bytes
