"""docs/linearize.md says what the registry, the families and the models say, and its example runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from fastweights.layers import MIXERS, SoftmaxAttention
from fastweights.models.hybrid import FAMILIES, hybrid_model
from fastweights.models.hybrid.linearize import hybrid_settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "linearize.md").read_text()


def section(heading: str) -> str:
    return PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]


def test_the_families_are_those_of_the_library() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", section("Which models"), re.MULTILINE)
    assert rows == [(family.model_type, f"{family.name}ForCausalLM") for family in FAMILIES.values()]


def test_the_memories_that_are_refused() -> None:
    refused, windowed = set(), set()
    config = LlamaConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=8)
    for name, spec in MIXERS.items():
        if not spec.layer.__module__.startswith("fastweights."):
            continue
        options = {"window": 8} if issubclass(spec.layer, SoftmaxAttention) else {}
        windowed |= {name} if options else set()
        try:
            with torch.device("meta"):
                hybrid_model("llama")(hybrid_settings(config, to=name, options=options))
        except ValueError:
            refused.add(name)
    text = section("Which memories").partition("\nNumbers that")[0]
    named = re.search(r"These are refused: (.*?)\. (.*?) fit with a window", text, re.DOTALL)
    assert named is not None
    assert [set(re.findall(r"`([\w-]+)`", part)) for part in named.groups()] == [refused, windowed]


def test_the_sizes_of_caches() -> None:
    """Of 4 of the 28 layers, which repeat."""
    shapes = dict(hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    config = Qwen3Config(**shapes, intermediate_size=32, vocab_size=8)
    rows = re.findall(r"^\| (teacher|`[\w-]+`)(, `--keep every:4`)? \|(.*)\|$", section("Which memories"), re.MULTILINE)
    assert len(rows) == 6
    parameters = None
    for memory, kept, cells in rows:
        keep = "all" if memory == "teacher" else "every:4" if kept else "none"
        to = "gdn" if memory == "teacher" else memory.strip("`")
        with torch.device("meta"):
            model = hybrid_model("qwen3")(hybrid_settings(config, to=to, keep=keep, options={}))
        parameters = parameters or model.num_parameters()
        more = 7 * (model.num_parameters() - parameters)
        shown = [f"{7 * model.state_size(length):,}" for length in (2048, 32768, 131072)] + [
            f"{more:,}" if more else ""
        ]
        assert [cell.strip() for cell in cells.split("|")] == shown, memory


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """With fewer steps; the rows are those of the page."""
    example = runpy.run_path(str(ROOT / "examples" / "linearize.py"))
    main = example["main"]
    main.__globals__["TESTED"] = 16
    rows = main(["--steps", "2", "2", "2"])
    assert list(rows)[0] == "teacher" and len(rows) == 6
    text = section("On a laptop")
    assert "{:,} | {:,} |".format(*rows["cache after 1,024 tokens, student"]) in text
    assert f"(teacher: {rows['cache after 1,024 tokens, teacher'][0]:,})" in text
    assert tuple(map(int, re.findall(r"(\d+) steps", text))) == main.__globals__["STEPS"]
    assert "after (b), predictions" in capsys.readouterr().out


@pytest.mark.slow
def test_the_example_shows_what_the_page_says() -> None:
    """Up to other threads and processors."""
    rows = runpy.run_path(str(ROOT / "examples" / "linearize.py"))["main"]([])
    assert min(rows["teacher"]) > 0.99 and min(rows["after (b), predictions"]) > 0.85
    for before, after in zip(rows["converted, not trained"], rows["after (a), attention outputs"], strict=True):
        assert before < 0.25 and after > before + 0.05
