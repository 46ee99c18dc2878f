"""First weights and answers of the presets stay as they were when `pinned_presets.json` was written, whatever the
layers' defaults
are. Run as a module, this writes the file anew; do so only for a preset that is new:

    python -m tests.models.test_pinned_presets
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastweights.models import PRESETS, FastWeightsForCausalLM, preset

from ..layers.pinned import fingerprint, tokens

STORED = Path(__file__).with_name("pinned_presets.json")
SMALL = {"vocab_size": 11, "hidden_size": 32, "num_heads": 2, "num_hidden_layers": 2}


def small_model(name: str) -> FastWeightsForCausalLM:
    """The model of a preset from seed 0, with its options, two narrow layers and, where it has them, an MLP and attention."""
    whole, sizes = preset(name), dict[str, Any](SMALL)
    if whole.intermediate_size:
        sizes["intermediate_size"] = 32
    if whole.softmax_layers:
        sizes["softmax_layers"] = [1]
    torch.manual_seed(0)
    return FastWeightsForCausalLM(preset(name, **sizes)).eval()


@torch.no_grad()
def pin(name: str) -> dict[str, Any]:
    """Fingerprints of the first weights and of the logits."""
    model = small_model(name)
    answers = nn.ParameterDict({"logits": model(tokens()).logits})
    return {"weights": fingerprint(model), "logits": fingerprint(answers)["values"]}


def test_every_preset_is_pinned():
    assert set(json.loads(STORED.read_text())) == set(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_first_weights_and_answers(name):
    stored, found = json.loads(STORED.read_text())[name], pin(name)
    assert found["weights"]["keys"] == stored["weights"]["keys"]
    assert found["weights"]["values"] == pytest.approx(stored["weights"]["values"], rel=1e-6, abs=1e-6)
    assert found["logits"] == pytest.approx(stored["logits"], rel=1e-4, abs=1e-5)


if __name__ == "__main__":
    STORED.write_text(json.dumps({name: pin(name) for name in PRESETS}, indent=1) + "\n")
