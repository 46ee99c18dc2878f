"""The model card: its code runs, it says what the model is, and it never replaces what a person wrote."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import fastweights
from fastweights.models import FastWeightsModel
from fastweights.models.card import model_card, write_card

from ..evaluation.small import save
from .small import HYBRID, config, model


def code(folder: Path) -> str:
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)[1]


def run(folder: Path, capsys, monkeypatch) -> str:
    monkeypatch.chdir(folder)
    capsys.readouterr()
    exec(compile(code(folder), "README.md", "exec"), {})
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["text", "tokens", "body"])
def test_the_code_in_it_runs(tmp_path, capsys, monkeypatch, kind):
    if kind == "text":
        save(tmp_path)
        write_card(tmp_path, model())  # again, as the tokenizer came after the model
        assert run(tmp_path, capsys, monkeypatch).startswith("The")
    elif kind == "tokens":
        model(HYBRID).save_pretrained(tmp_path)
        assert run(tmp_path, capsys, monkeypatch).startswith("tensor(")
    else:
        FastWeightsModel(config(HYBRID)).save_pretrained(tmp_path)
        assert "AutoModel.from_pretrained" in code(tmp_path)
        assert run(tmp_path, capsys, monkeypatch).startswith("tensor(")


WITHOUT_IMPORT = """
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(".")
except ValueError as error:
    print(error)
"""


@pytest.mark.slow
def test_transformers_leads_to_the_import_and_the_card_has_it(tmp_path):
    """In a process of its own, as `fastweights.models` is imported here."""
    model().save_pretrained(tmp_path)
    script = WITHOUT_IMPORT + code(tmp_path)
    environment = {"PYTHONPATH": str(Path(fastweights.__file__).parents[1])}
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert "has model type `fastweights`" in ended.stdout and "tensor(" in ended.stdout
    assert json.loads((tmp_path / "config.json").read_text())["how_to_load"].startswith("import fastweights.models")
    assert "auto_map" not in (tmp_path / "config.json").read_text()
    card = (tmp_path / "README.md").read_text()
    assert "Without `import fastweights.models`" in card and "does not recognise the model type `fastweights`" in card


def test_it_says_what_the_model_is():
    lm = model(["gdn", "gdn", "softmax", "pgdn"])
    card = model_card(lm, {"Steps": "1,000", "Text": "a | b\nc"})
    assert "`gdn` in layers 0-1, `softmax` in layer 2, `pgdn` in layer 3" in card
    assert f"{lm.num_parameters():,}" in card and f"{lm.state_size(1000):,} after 1,000 tokens" in card
    assert "| Steps | 1,000 |" in card and "| Text | a \\| b c |" in card and "## Licence" in card
    assert card.startswith("---\nlibrary_name: fastweights\n")
    assert "Nothing is recorded here" in model_card(lm)


def test_what_a_person_wrote_stays(tmp_path):
    lm, readme = model(), tmp_path / "README.md"
    lm.save_pretrained(tmp_path)
    first = readme.read_text()
    write_card(tmp_path, lm, {"Steps": "7"})
    assert readme.read_text() != first and "| Steps | 7 |" in readme.read_text()
    changed = readme.read_text().replace("Not stated.", "CC-BY 4.0.")
    for text in (changed, "My model", ""):
        readme.write_text(text)
        lm.save_pretrained(tmp_path)
        assert readme.read_text() == text
    readme.unlink()
    readme.symlink_to("elsewhere.md")
    lm.save_pretrained(tmp_path)
    assert not (tmp_path / "elsewhere.md").exists() and readme.is_symlink()
