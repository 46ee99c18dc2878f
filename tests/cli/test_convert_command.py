"""`fastweights convert` from outside: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from fastweights.cli import main
from fastweights.conversion import CONVERSIONS

from ..conversion.small import mamba2, model, tokens
from ..full_disk import largest_file


@pytest.fixture
def source(tmp_path) -> Path:
    model(["gdn", "softmax", "gdn", "gdn"], num_hidden_layers=4).save_pretrained(tmp_path / "source")
    return tmp_path / "source"


def convert(source: object, to: str, output: object, *more: str) -> int:
    return main(["convert", str(source), "--to", to, "--output", str(output), *more])


def number_after(label: str, text: str) -> float:
    return float(text.split(label)[1].split()[0].rstrip("):"))


def test_mamba2_to_palimpsa(tmp_path, capsys):
    original = mamba2(n_groups=2)
    original.save_pretrained(tmp_path / "source")
    output = tmp_path / "runs" / "palimpsa"
    assert convert(tmp_path / "source", "palimpsa-m", output, "--option", "b_scale=0.5", "--tokens", "64") == 0
    printed = capsys.readouterr().out
    assert "mamba2 -> palimpsa-m in 2 of 2 layers: 0-1\n" in printed and "b_scale = -inf" in printed
    assert f"name the tokenizer of the source under [tokenizer] in {output / 'train.toml'}" in printed
    assert "over 64 random tokens" in printed and f"fastweights train {output / 'train.toml'}" in printed
    assert number_after("where they should be equal:", printed) < 1e-5 * number_after("largest logit", printed)
    loaded = AutoModelForCausalLM.from_pretrained(output)
    assert loaded.config.mixers()[0][1]["b_scale"] == 0.5
    random_tokens = torch.randint(40, (1, 64), generator=torch.Generator().manual_seed(0))
    difference = (loaded(random_tokens).logits - original(random_tokens).logits).abs().max().item()
    assert number_after("as saved:", printed) == pytest.approx(difference, rel=0.01)


def test_palimpsa_draws_the_scale_of_every_head(tmp_path):
    """In (0.1, 1) as released, by default and after saving and loading; an interval of one's own is taken too."""
    mamba2(n_groups=2).save_pretrained(tmp_path / "source")
    for folder, options, low, high in (("new", (), 0.1, 1.0), ("own", ("--option", "b_scale=[2.0, 3.0]"), 2.0, 3.0)):
        assert convert(tmp_path / "source", "palimpsa-m", tmp_path / folder, "--tokens", "8", *options) == 0
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        scales = torch.cat([layer.mixer.importance.b_scale.detach() for layer in loaded.model.layers])
        assert len(scales) > 4 and len(scales.unique()) == len(scales)
        assert low < scales.min() and scales.max() < high
        assert scales.max() - scales.min() > 0.3 * (high - low)


def test_a_full_disk_is_one_line(source, tmp_path, capsys):
    with largest_file(4000):
        assert convert(source, "gka", tmp_path / "new", "--option", "solver=exact") == 1
    error = capsys.readouterr().err
    assert f"fastweights: error: the converted model could not be written to {tmp_path / 'new'}: " in error
    assert error.count("\n") == 1 and sorted(path.name for path in tmp_path.iterdir()) == ["source"]


def test_a_hybrid_and_a_pair_without_equality(source, tmp_path, capsys):
    assert convert(source, "gka", tmp_path / "new", "--option", "solver=exact") == 0
    printed = capsys.readouterr().out
    assert "gdn -> gka in 3 of 4 layers: 0, 2-3\n" in printed
    assert "same logits: nowhere" in printed and "where they should be equal: no such setting" in printed
    assert number_after("as saved:", printed) > 0
    mixers = AutoModelForCausalLM.from_pretrained(tmp_path / "new").config.mixers()
    assert [name for name, _ in mixers] == ["gka", "softmax", "gka", "gka"] and mixers[0][1]["solver"] == "exact"


def test_the_list_names_every_pair(capsys):
    assert main(["convert", "--list"]) == 0
    printed = capsys.readouterr().out
    for (before, after), conversion in CONVERSIONS.items():
        assert f"{before} -> {after}\n" in printed and conversion.equality in printed
    assert "gla -> palimpsa-d\n    only where the layers of the source have decay='head'" in printed
    assert printed.count("only where") == 5  # linear, gla, pmamba2 and both of palimpsa


def test_errors_are_one_line_and_exit_code_2(source, tmp_path, capsys):
    def refused(arguments: tuple, *words: str) -> None:
        capsys.readouterr()
        assert convert(*arguments) == 2
        captured = capsys.readouterr()
        (error,) = captured.err.splitlines()
        assert error.startswith("fastweights: error: ") and all(word in error for word in words), error
        assert not captured.out and not new.exists()

    new = tmp_path / "new"
    refused((source, "pgnd", new), "'pgnd'", "did you mean 'pgdn'", "mamba2 -> palimpsa-m", "kda -> pkda")
    refused((source, "palimpsa-d", new), "no conversion from gdn, softmax", "linear with decay='head' -> palimpsa-d")
    refused((tmp_path / "nowhere", "pgdn", new), "there is no folder", "nowhere")
    OPTConfig().save_pretrained(tmp_path / "opt")
    refused((tmp_path / "opt", "pgdn", new), "'opt'", "replace attention in llama, mistral")
    model({"name": "gdn", "negative_eigenvalues": True}).save_pretrained(tmp_path / "negative")
    refused((tmp_path / "negative", "gka", new), "layer 0", "negative_eigenvalues must be False")
    config = model({"name": "gdn"}).config.to_dict()
    (tmp_path / "kind").mkdir()
    (tmp_path / "kind" / "config.json").write_text(json.dumps({**config, "num_heads": "four"}))
    refused((tmp_path / "kind", "pgdn", new), "cannot be loaded", "num_heads must be", "'four'")
    refused((source, "pgdn", new, "--option", "bound"), "NAME=VALUE", "'bound'")
    refused((source, "pgdn", new, "--option", "bound=big"), "bound must be a number", "'big'")
    refused((source, "pgdn", new, "--option", "name=gka"), "no option 'name'")
    refused((source, "pgdn", new, "--option", "head_dim=7"), "do not fit head_dim=7")
    refused((source, "pgdn", new, "--seed", "-1"), "seed must be a whole number of at least 0")
    refused((source, "pgdn", source / "config.json" / "new"), "config.json is none")
    refused((source, "pgdn", new, "--tokens", "0"), "tokens must be a positive whole number")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    refused((source, "pgdn", tmp_path / "full"), "must not exist or be an empty folder")
    assert main(["convert", str(source), "--to", "pgdn"]) == 2
    assert "--output" in capsys.readouterr().err


def test_a_disk_error_is_one_line_and_exit_code_1(source, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fastweights.conversion.folder.write_bytes", full)
    assert convert(source, "pgdn", tmp_path / "new") == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("No space left on device")
    assert [file.name for file in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_same_arguments_same_model(source, tmp_path):
    assert convert(source, "pgdn", tmp_path / "a") == convert(source, "pgdn", tmp_path / "b") == 0
    first, second = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab")
    assert torch.equal(first(tokens()).logits, second(tokens()).logits)
