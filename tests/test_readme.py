"""The examples of the README run. tests/house/test_docs.py looks at its links, tests/documentation at its commands."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

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


def result(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def test_speeds_in_the_words_are_those_of_the_results() -> None:
    text, rows = " ".join(README.split()), result("decode-table-nvidia-h200")["rows"]

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


def test_training_steps_in_the_words_are_those_of_the_results() -> None:
    text, steps = " ".join(README.split()), result("training-steps-nvidia-h200")["comparisons"]
    replayed = ", compiled by blocks, replayed"

    def step(comparison: str, model: str = "") -> float:
        return float(steps[comparison]["models"][model or comparison]["step, ms"][0])

    names = {"pgdn": "pgdn", "kda": "kda", "rls": "rls", "lattice-encode": "lattice", "gka": "gka", "vla": "vla",
             "palimpsa-d": "palimpsa-d"}  # fmt: skip
    bases = {name: step(f"24 layers of {name}{replayed}", f"24 layers of gdn{replayed}") for name in names}
    assert f"takes {statistics.median(bases.values()):.0f} ms with `gdn`, compiled by blocks" in text
    assert f"Called eagerly it takes {step('24 layers of gdn, replayed', '24 layers of gdn'):.0f} ms" in text
    sentence = text[text.index("Compiled and replayed, it takes") :]
    for name, shown in names.items():
        ratio = f"{step(f'24 layers of {name}{replayed}') / bases[name]:.2f}"
        assert re.search(rf"{ratio} (times as long )?with `{shown}`", sentence), (name, ratio)
    gated, theirs = f"24 layers of gated gdn{replayed}", "24 layers of flash-linear-attention's gdn, compiled, replayed"
    assert f"`gdn` takes {step(gated):.0f} ms, where flash-linear-attention's model of that size takes" in text
    assert f"takes {step(gated, theirs):.0f} compiled and replayed" in text
    for size, words in (("760m", "Palimpsa's 760M model takes {:.2f} times"), ("170m", "and {:.2f} times at 170M")):
        one = f"palimpsa-d-{size}"
        assert words.format(step(one) / step(one, f"palimpsa-d-plain-{size}")) in text


def test_other_speeds_in_the_words_are_those_of_the_results() -> None:
    text = " ".join(README.split())
    shares = result("scaling-nvidia-h100-80gb-hbm3")["trainings"]["gdn-1b"]
    ddp, fsdp = (f"{shares[f'2 GPUs, {way}']['share of one GPU']:.2f}".lstrip("0") for way in ("DDP", "FSDP2"))
    assert f"With DDP each GPU processes {ddp} of the tokens per second of one GPU alone, with FSDP2 {fsdp}." in text
    faster = result("transformers-models-nvidia-h200")["models"]["qwen3_next"]["times"]["training step"]["times faster"]
    assert f"train {faster:.1f} times as fast after `accelerate()`" in text
    prompt = result("generate-nvidia-h200")["mixers"]["gdn"]["prefill of 16384"]["ms"]
    assert f"`gdn` reads a prompt at {round(16384 / prompt * 1e3, -4):,.0f} tokens per second" in text
