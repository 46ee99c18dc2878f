"""The memories of hybrids begin as they did when `pinned_first_values.json` was written, whatever the defaults of the layers are.
Run as a module, this writes the file anew:

    python -m tests.models.hybrid.test_pinned_first_values
"""

import json
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from fastweights.models import linearize

from ...layers.pinned import fingerprint
from .small import teacher

STORED = Path(__file__).with_name("pinned_first_values.json")
MEMORIES = ("gdn", "kda", "gla", "pgdn", "pla", "palimpsa-d", "gka", "mesa", "lattice", "rls")


def pin(to: str) -> dict[str, Any]:
    """A fingerprint of the parameters that a hybrid has beside its teacher's."""
    named = linearize(teacher(), to=to).named_parameters()
    return fingerprint(nn.ParameterDict({name.replace(".", " "): x for name, x in named if ".memory." in name}))


@pytest.mark.parametrize("to", MEMORIES)
def test_first_values(to):
    found, stored = pin(to), json.loads(STORED.read_text())[to]
    assert found["keys"] == stored["keys"]
    assert found["values"] == pytest.approx(stored["values"], rel=1e-6, abs=1e-6)


if __name__ == "__main__":
    STORED.write_text(json.dumps({to: pin(to) for to in MEMORIES}, indent=1) + "\n")
