"""The examples of the README run. tests/house/test_docs.py looks at its links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fastweights.layers import registry

ROOT = Path(__file__).parents[1]

README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("code", BLOCKS, ids=lambda code: code.strip().splitlines()[1])
def test_examples_run(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))  # a mixer that it registers
    exec(compile(code, "README.md", "exec"), {"__name__": "example"})
