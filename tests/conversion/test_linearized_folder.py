"""`fastweights convert` of a pretrained Transformer: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.cli import main
from fastweights.conversion import linearize_folder
from fastweights.conversion.linearized_folder import plan_linearization
from fastweights.data.text import TextCorpus
from fastweights.distillation import DistillRun, choice
from fastweights.models.loading import load_language_model, load_tokenizer
from fastweights.results.distillation import load_ranking
from fastweights.training.language import load_run

from ..evaluation.small import tokenizer
from ..models.hybrid.small import teacher, tokens


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "teacher"
    words = tokenizer()
    teacher("qwen3", vocab_size=len(words)).bfloat16().save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def convert(source: Path, output: Path, *more: str) -> int:
    return main(["convert", str(source), "--output", str(output), *more])


def test_the_command_writes_a_hybrid_with_all_that_it_needs(source, tmp_path, capsys):
    output = tmp_path / "hybrid"
    arguments = ("--to", "gka", "--keep", "every:2", "--keys", "repeated", "--option", "conv_size=4", "--steps", "30")
    assert convert(source, output, *arguments, "--dry-run") == 0
    planned = capsys.readouterr().out
    assert not output.exists() and "layers with attention: [1, 3]\n" in planned
    assert convert(source, output, *arguments) == 0
    printed = capsys.readouterr().out
    lm, words = load_language_model(output)
    original = AutoModelForCausalLM.from_pretrained(source)
    assert "attention -> gka in 2 of 4 layers: 0, 2\nattention kept in 2 of 4 layers: 1, 3\n" in printed
    for line in ("once per query head", "rotated as", "convolutions: the identity", "gate: 0.5", "as in a new layer"):
        assert line in printed
    new = lm.num_parameters() - original.num_parameters()
    assert f"{lm.num_parameters():,} parameters, {new:,} of them new\n" in printed
    assert f"parameters: {lm.num_parameters():,}\nnew parameters: {new:,}\n" in planned
    memories, keys = 2 * 4 * (12 * 12 + 12 * 12), 2 * 2 * 12
    for length in (2_048, 65_536):
        own, other = memories + 2 * length * keys, 4 * length * keys
        assert f"{length:,} tokens: {own:,} numbers per sequence, the source's {other:,}\n" in printed
    assert f"fastweights distill {output / 'distill.toml'}" in printed and "tokenizer.json" in printed
    assert lm.dtype == torch.bfloat16 and lm.config.teacher == "teacher" and len(words) == lm.config.vocab_size
    assert "| Converted from | teacher |" in (output / "README.md").read_text()
    run = load_run(output / "distill.toml", kind=DistillRun)
    assert [stage.objective for stage in run.stage_runs()] == ["attention", "logits"]
    assert run.model == {"path": str(output)} and run.teacher == str(source) and run.stages[0]["max_steps"] == 30


def test_layers_are_chosen_by_what_their_attention_is_worth(source, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog in the garden. " * 60)
    output = tmp_path / "hybrid"
    arguments = ("--to", "gdn", "--keep", "auto:1", "--text", str(text), "--budget", "600")
    assert convert(source, output, *arguments, "--dry-run") == 0
    assert "layers with attention: auto:1, ranked on held-out text" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("hybrid")] == []
    assert convert(source, output, *arguments) == 0
    printed = capsys.readouterr().out
    ranking = load_ranking(tmp_path / "hybrid-layers" / "layers.json")
    (best,) = ranking.best(1)
    assert ranking.rows == 1 and len(ranking.layers) == 4 and f"attention kept in 1 of 4 layers: {best}\n" in printed
    kept = [layer for layer, entry in enumerate(load_language_model(output)[0].config.memory) if entry is None]
    assert kept == [best] and "Layers by what their attention is" in printed
    run = load_run(output / "distill.toml", kind=DistillRun)
    assert run.model == {"path": str(output)}
    assert run.selection == {"tokens": 600, "batch_size": 1, "training_steps": 0}
    picture = tmp_path / "hybrid-layers" / "layers.png"
    assert f"Ranking of layers: {picture}\n" in printed and picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_file_has_the_budget_of_the_ranking(source, tmp_path, capsys):
    text, file = tmp_path / "text.txt", tmp_path / "budget.toml"
    text.write_text("the cat sat on the mat and looked at the dog in the garden. " * 400)
    file.write_text("[selection]\ntokens = 1600\nbatch_size = 2\n")
    arguments = ("--to", "gdn", "--keep", "auto:1", "--text", str(text), "--run-file")
    for name, given, more, read in (
        ("a", file, (), 1600),
        ("b", tmp_path / "a" / "distill.toml", ("--budget", "1100"), 1100),
    ):
        assert convert(source, tmp_path / name, *arguments, str(given), *more) == 0
        run = load_run(tmp_path / name / "distill.toml", kind=DistillRun)
        assert run.selection == {"tokens": read, "batch_size": 2, "training_steps": 0}
        assert load_ranking(tmp_path / f"{name}-layers" / "layers.json").rows == read // 512
    capsys.readouterr()
    for content, words in (
        ("[selection]\ntoken = 1600\n", ("selection: the table has no key 'token'", "did you mean 'tokens'")),
        ("[selection]\ntokens = 0\n", ("selection: tokens must be",)),
        ("selection = 4\n", ("selection must be a table",)),
        ("[model]\n", ("must have a table [selection]",)),
    ):
        file.write_text(content)
        assert convert(source, tmp_path / "new", *arguments, str(file), "--dry-run") == 2
        (error,) = capsys.readouterr().err.splitlines()
        assert str(file) in error and all(word in error for word in words), error


@pytest.mark.slow
def test_memories_may_learn_before_layers_are_ranked(source, tmp_path, monkeypatch):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the dog in the garden. " * 800)

    def on_that_text(file, **options):
        run = load_run(file, **options)
        small = {"length": 32, "batch_size": 2, "evaluate_every": 0, "checkpoint_every": 100}
        return dataclasses.replace(run, corpus=TextCorpus(paths=(str(text),)), cache=str(tmp_path / "tokens"), **small)

    monkeypatch.setattr(choice, "load_run", on_that_text)
    arguments = ("--to", "gdn", "--keep", "auto:1", "--text", str(text), "--budget", "600")
    rankings = []
    for steps in ("0", "20"):
        assert convert(source, tmp_path / f"after{steps}", *arguments, "--rank-after", steps) == 0
        rankings.append(load_ranking(tmp_path / f"after{steps}-layers" / "layers.json"))
    plain, after = rankings
    assert after.settings["training_steps"] == 20 and after.base_kl < 0.95 * plain.base_kl
    run = load_run(tmp_path / "after20-layers" / "hybrid" / "distill.toml", kind=DistillRun)
    assert run.stages[0]["objective"] == "attention" and run.stages[0]["max_steps"] == 20


def test_with_all_attention_kept_nothing_differs(source, tmp_path):
    report = linearize_folder(source, tmp_path / "hybrid", to="gdn", keep="all", tokens=20)
    assert report.check.saved == report.check.neutral == 0 and report.check.largest_logit > 0
    assert report.converted == () and report.new_parameters == 0 and report.first_values == []
    loaded, original = (AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "hybrid", source))
    assert torch.equal(loaded(tokens()).logits, original(tokens()).logits)


def test_an_earlier_conversion_is_replaced_only_when_asked(source, tmp_path):
    output = tmp_path / "hybrid"
    linearize_folder(source, output, to="gdn", tokens=4)
    with pytest.raises(ValueError, match="holds a conversion; name another folder, or pass overwrite"):
        linearize_folder(source, output, to="kda", tokens=4)
    linearize_folder(source, output, to="kda", tokens=4, overwrite=True)
    assert AutoModelForCausalLM.from_pretrained(output).config.mixers()[0][0] == "kda"


def test_the_tokenizer_is_the_teachers_beside_the_hybrid(tmp_path):
    """transformers makes another one of the same files where they are not beside a Qwen2."""
    words = tokenizer()
    teacher("qwen2", vocab_size=len(words) + 8).save_pretrained(tmp_path / "qwen2")
    words.save_pretrained(tmp_path / "qwen2")
    report = linearize_folder(tmp_path / "qwen2", tmp_path / "hybrid", to="gdn", tokens=4)
    wanted, found = (load_tokenizer(tmp_path / name) for name in ("qwen2", "hybrid"))
    assert len(wanted) > len(words) and found.get_vocab() == wanted.get_vocab()
    assert found.backend_tokenizer.to_str() == wanted.backend_tokenizer.to_str()
    assert all((tmp_path / "hybrid" / name).is_file() for name in report.tokenizer) and report.tokenizer


def test_the_source_may_be_in_parts(source, tmp_path):
    AutoModelForCausalLM.from_pretrained(source).save_pretrained(tmp_path / "parts", max_shard_size="30KB")
    linearize_folder(tmp_path / "parts", tmp_path / "hybrid", to="gdn", tokens=4)
    plan = plan_linearization(tmp_path / "parts", tmp_path / "other", to="gdn")
    assert plan["layers with a memory"] == [0, 1, 2, 3]
    assert "[tokenizer]" in (tmp_path / "hybrid" / "distill.toml").read_text()  # to be filled in


def test_refused_in_one_line(source, tmp_path, capsys):
    def refused(*arguments: str, words: tuple[str, ...], model: Path = source) -> None:
        capsys.readouterr()
        assert convert(model, tmp_path / "new", *arguments) == 2
        captured = capsys.readouterr()
        (error,) = captured.err.splitlines()
        assert error.startswith("fastweights: error: ") and all(word in error for word in words), error
        assert not captured.out and not (tmp_path / "new").exists()

    refused("--to", "gdnn", words=("did you mean 'gdn'",))
    refused("--to", "gdn", "--keep", "1,4", words=("keep must be a whole number from 0 to 3", "4"))
    refused("--to", "gdn", "--keep", "auto:5", words=('"auto:N"', "4 layers", "auto:5"))
    refused("--to", "gdn", "--keep", "auto:1", "--budget", "500", words=("tokens must be at least 512", "500"))
    refused("--to", "gdn", "--keep", "auto:1", "--budget", "0", "--dry-run", words=("tokens must be",))
    refused("--to", "gdn", "--keep", "every:5", words=('"every:N"', "4 layers", "every:5"))
    refused("--to", "gdn", "--keep", "", words=("keep must be numbers of layers",))
    for name, value in (("--text", str(source)), ("--budget", "600"), ("--rank-after", "0"), ("--run-file", "a.toml")):
        refused("--to", "gdn", name, value, words=(name, "unless --keep is auto:N", value))
    refused("--to", "gdn", "--option", "head_dim=8", words=("layer 0", "head_dim", "12"))
    refused("--to", "gka", "--option", "output_gate=none", words=("error: layer 0: output_gate must be one of None",))
    refused("--to", "softmax", words=("must have a window", "keep the attention"))
    refused("--to", "gdn", "--peak", "1e-3", words=("--peak must be left out",))
    linearize_folder(source, tmp_path / "hybrid", to="gdn", tokens=4)
    refused(
        "--to", "gka", model=tmp_path / "hybrid", words=("fastweights_qwen3", "convert the model that it was made of")
    )
    assert main(["serve", str(tmp_path / "hybrid")]) == 2
    assert "takes no hybrids" in capsys.readouterr().err
