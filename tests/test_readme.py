"""The examples of the README run. tests/house/test_docs.py looks at its links, tests/documentation at its commands."""

from __future__ import annotations

import json
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


def test_speeds_in_the_words_are_those_of_the_results() -> None:
    text, results = " ".join(README.split()), ROOT / "benchmarks" / "results"
    rows = json.loads((results / "decode-table-nvidia-h200.json").read_text())["rows"]

    def speed(row: str) -> str:
        tokens = rows[row]["tokens/s"]
        return f"{round(tokens, -1 if tokens < 1000 else -2):,.0f}"

    def softmax(batch: int, context: int) -> str:
        return speed(f"softmax, batch {batch}, context {context}")

    assert (
        f"`gdn` generates {speed('gdn, batch 1')} tokens per second for one sequence and {speed('gdn, batch 64')} for 64"
        in text
    )
    assert f"Softmax attention generates {softmax(1, 2048)} and {softmax(64, 2048)} at 2,048 tokens of context" in text
    assert f"{softmax(1, 16384)} and {softmax(64, 16384)} at 16,384, and {softmax(1, 131072)} at 131,072" in text
    steps = json.loads((results / "training-steps-nvidia-h200.json").read_text())["comparisons"]

    def ratio(size: str) -> float:
        models = steps[f"palimpsa-d-{size}"]["models"]
        return float(models[f"palimpsa-d-{size}"]["step, ms"][0] / models[f"palimpsa-d-plain-{size}"]["step, ms"][0])

    assert (
        f"Palimpsa's 760M model takes {ratio('760m'):.2f} times" in text
        and f"and {ratio('170m'):.2f} times at 170M" in text
    )
