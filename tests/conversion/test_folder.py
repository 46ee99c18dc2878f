"""Saved models to saved models: what is read, what is written, and what is never left half-written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from fastweights.conversion import convert, convert_folder, folder
from fastweights.conversion.training import RecordedTraining, run_file, usual_peak
from fastweights.training.language import load_run

from .small import VOCABULARY, mamba2, model, tokens

WORDS = ["[UNK]", *"abcdefghij", "and", "so", "on"]


@pytest.fixture
def source(tmp_path) -> str:
    """A Gated DeltaNet with a tokenizer."""
    path = str(tmp_path / "source")
    model("gdn").save_pretrained(path)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(path)
    return path


def files(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def test_the_folder_is_the_converted_model(source, tmp_path):
    report = convert_folder(source, tmp_path / "new", to="pgdn", options={"bound": 1.25}, seed=5)
    expected = convert(AutoModelForCausalLM.from_pretrained(source), to="pgdn", seed=5, bound=1.25)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert loaded.config.mixers() == [("pgdn", {"bound": 1.25})] * 2
    assert torch.equal(loaded(tokens()).logits, expected(tokens()).logits)
    assert report.check.neutral == 0 < report.check.saved
    assert report.parameters == loaded.num_parameters()
    assert report.new_parameters == sum(p.numel() for name, p in loaded.named_parameters() if "preconditioner" in name)
    assert list(report.conversions) == [0, 1]
    recorded = json.loads((tmp_path / "new" / "conversion.json").read_text())
    assert (recorded["to"], recorded["seed"], recorded["saved"]) == ("pgdn", 5, report.check.saved)
    assert not list(tmp_path.glob(".*.partial"))
    card = (tmp_path / "new" / "README.md").read_text()
    assert "| Converted from | source |" in card and "AutoTokenizer" in card and str(tmp_path) not in card


def test_a_source_without_a_cache_gets_one(source, tmp_path):
    """Trainings of earlier versions saved use_cache false."""
    path = Path(source) / "config.json"
    path.write_text(path.read_text().replace('"use_cache": true', '"use_cache": false'))
    convert_folder(source, tmp_path / "new", to="pgdn")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "new")(tokens()).past_key_values is not None


def test_a_name_on_the_hub(source, tmp_path, monkeypatch):
    """Without the network, from the cache of what was downloaded before."""
    repository = tmp_path / "hub" / "models--owner--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("f" * 40)
    (repository / "snapshots").mkdir()
    Path(source).rename(repository / "snapshots" / ("f" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    report = convert_folder("owner/name", tmp_path / "new", to="pgdn", prompt="a b")
    assert report.check.neutral == 0 and report.tokenizer
    assert json.loads((tmp_path / "new" / "conversion.json").read_text())["from"] == "owner/name"
    with pytest.raises(ValueError, match="owner/none cannot be loaded"):
        convert_folder("owner/none", tmp_path / "newer", to="pgdn")


def test_the_tokenizer_comes_along_and_reads_the_prompt(source, tmp_path):
    report = convert_folder(source, tmp_path / "new", to="pgdn", prompt="a b c and so on")
    assert report.check.tokens == 6
    assert set(report.tokenizer) == {"tokenizer.json", "tokenizer_config.json"}
    for name in report.tokenizer:
        assert (tmp_path / "new" / name).read_bytes() == (Path(source) / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "new")("d and e").input_ids == [4, 11, 5]


def test_sharded_and_tied_mamba2(tmp_path):
    original = mamba2(n_groups=2, tie_word_embeddings=True, time_step_limit=(0.0, float("inf")))
    original.save_pretrained(tmp_path / "source", max_shard_size="8KB")
    assert len(list((tmp_path / "source").glob("*.safetensors"))) > 2
    report = convert_folder(str(tmp_path / "source"), tmp_path / "new", to="mamba2")
    assert report.new_parameters == 0 and report.tokenizer == []
    assert report.check.saved < 1e-5 * report.check.largest_logit
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "new")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    expected = original(tokens()).logits
    assert torch.allclose(loaded(tokens()).logits, expected, atol=1e-5 * expected.abs().max().item())
    again = convert_folder(str(tmp_path / "new"), tmp_path / "newest", to="palimpsa-m", options={"b_scale": 0.5})
    assert again.check.neutral < 1e-5 * again.check.largest_logit < again.check.saved


def test_stored_in_bfloat16_compared_in_float32(tmp_path):
    model("gla").bfloat16().save_pretrained(tmp_path / "source")
    report = convert_folder(str(tmp_path / "source"), tmp_path / "new", to="pgla")
    assert report.check.neutral < 1e-5 * report.check.largest_logit
    old, new = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "new"))
    assert {tensor.dtype for tensor in new.values()} == {torch.bfloat16}
    assert all(torch.equal(new[name], tensor) for name, tensor in old.items())


@pytest.mark.parametrize("steps, warmup", [(2000, 0.1), (20000, 0.01), (10, 0.1)])
def test_the_run_file_continues_the_model_gently(source, tmp_path, steps, warmup):
    convert_folder(source, tmp_path / "new", to="pgdn", peak=0.004, steps=steps)
    run = load_run(tmp_path / "new" / "train.toml")
    assert run.model == {"path": str(tmp_path / "new")} and run.output == str(tmp_path / "new-trained")
    assert (run.learning_rate, run.max_steps, run.warmup_fraction) == (0.0004, steps, warmup)


def test_without_a_tokenizer_the_run_file_says_so(tmp_path):
    mamba2().save_pretrained(tmp_path / "source")
    convert_folder(str(tmp_path / "source"), tmp_path / "new", to="mamba2")
    assert "[tokenizer]" in (tmp_path / "new" / "train.toml").read_text()
    assert load_run(tmp_path / "new" / "train.toml").learning_rate == 0.0003


def test_only_files_that_make_a_tokenizer_count(source, tmp_path):
    (Path(source) / "tokenizer_config.json").unlink()
    report = convert_folder(source, tmp_path / "new", to="pgdn", prompt="a b c and so on")
    assert report.tokenizer == ["tokenizer.json"] and report.check.tokens == 6
    (Path(source) / "tokenizer.json").rename(Path(source) / "added_tokens.json")
    assert convert_folder(source, tmp_path / "newer", to="pgdn").tokenizer == []
    assert "[tokenizer]" in (tmp_path / "newer" / "train.toml").read_text()


def test_a_run_folder_is_a_source_and_tells_its_peak(source, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    Path(source).rename(run / "model")
    (run / "run.json").write_text('{"learning_rate": 0.002}')
    for index, (place, options, peak) in enumerate(
        [(run, {}, 0.002), (run / "model", {}, 0.002), (run, {"peak": 0.1}, 0.1)]
    ):
        report = convert_folder(str(place), tmp_path / str(index), to="pgdn", prompt="a b", **options)
        assert report.tokenizer
        assert load_run(tmp_path / str(index) / "train.toml").learning_rate == pytest.approx(peak / 10)
    (run / "run.json").write_text("{}")
    convert_folder(str(run), tmp_path / "3", to="pgdn")
    assert load_run(tmp_path / "3" / "train.toml").learning_rate == pytest.approx(usual_peak(1) / 10)


@pytest.mark.parametrize("name", ["\U0001f9e0", 'quo"te\\', "line\nbreak", "del\x7f"])
def test_a_run_file_for_any_name(tmp_path, name):
    written = run_file(tmp_path / name, training=RecordedTraining(), peak=None, parameters=1, steps=10, tokenizer=False)
    (tmp_path / "train.toml").write_bytes(written.encode())
    assert load_run(tmp_path / "train.toml").model == {"path": str(tmp_path / name)}


def test_the_papers_peaks():
    assert usual_peak(170_000_000) == 3e-3 and usual_peak(760_000_000) == 1.25e-3


def test_an_empty_output_folder_is_filled(source, tmp_path):
    (tmp_path / "new").mkdir()
    convert_folder(source, tmp_path / "new", to="pgdn")
    assert "model.safetensors" in files(tmp_path / "new")


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_output_with_content_is_refused_and_kept(source, tmp_path, kind):
    present = tmp_path / "new" / "thesis.txt" if kind == "folder" else tmp_path / "new"
    present.parent.mkdir(exist_ok=True)
    present.write_text("years of work")
    with pytest.raises(ValueError, match="must not exist or be an empty folder"):
        convert_folder(source, tmp_path / "new", to="pgdn")
    assert present.read_text() == "years of work"


@pytest.mark.parametrize("error", [OSError("No space left on device"), KeyboardInterrupt()])
def test_nothing_half_written_stays(source, tmp_path, monkeypatch, error):
    def fails(*_):
        raise error

    monkeypatch.setattr(folder, "copy_tokenizer", fails)
    with pytest.raises(type(error)):
        convert_folder(source, tmp_path / "new", to="pgdn")
    assert files(tmp_path) == ["source"]


def test_logits_that_should_agree_and_do_not_are_refused(source, tmp_path):
    with pytest.raises(ValueError, match="must agree at the neutral setting"):
        convert_folder(source, tmp_path / "new", to="pgdn", options={"activation": "none"})
    assert files(tmp_path) == ["source"]


def test_weights_that_are_not_finite_are_refused(source, tmp_path):
    damage(source, lambda weights: weights["lm_head.weight"].fill_(float("nan")))
    with pytest.raises(ValueError, match="not finite"):
        convert_folder(source, tmp_path / "new", to="pgdn")


def damage(source: str, change) -> None:
    path = Path(source) / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


def test_missing_and_damaged_sources(source, tmp_path):
    def refused(path: str, *words: str) -> None:
        with pytest.raises(ValueError) as error:
            convert_folder(path, tmp_path / "new", to="pgdn")
        assert all(word in str(error.value) for word in words), error.value

    refused(str(tmp_path / "nowhere"), "no folder", "nowhere")
    refused("nowhere", "no folder nowhere")
    (tmp_path / "bare").mkdir()
    refused(str(tmp_path / "bare"), "bare must hold a model", "config.json")
    LlamaConfig().save_pretrained(tmp_path / "llama")
    refused(str(tmp_path / "llama"), "'llama'", "types fastweights, mamba2", "(linearize_folder)")
    damage(source, lambda weights: [weights.pop(name) for name in list(weights) if "layers.1.mlp" in name])
    refused(source, "not those of its config.json", "they lack model.layers.1.mlp.", "model.layers.1.mlp.up_proj")
    damage(source, lambda weights: [weights.pop(name) for name in list(weights) if "layers.1" in name])
    refused(source, "not those of its config.json", "num_hidden_layers is 2, and the weights are of 1")
    damage(source, lambda weights: weights.update({"lm_head.weight": torch.zeros(VOCABULARY, 3)}))
    refused(source, "not those of its config.json")
    (Path(source) / "model.safetensors").write_bytes(b"\x00" * 100)
    refused(source, "model.safetensors is no safetensors file")
    (Path(source) / "model.safetensors").unlink()
    refused(source, "holds no weights", "model.safetensors")
    for damaged in ("{", "[]", "3"):
        (Path(source) / "config.json").write_text(damaged)
        refused(source, "config.json is damaged")
    assert not (tmp_path / "new").exists()


def test_a_mamba2_without_all_its_weights(tmp_path):
    mamba2().save_pretrained(tmp_path / "source")
    damage(str(tmp_path / "source"), lambda weights: [weights.pop(name) for name in list(weights) if "1.norm" in name])
    with pytest.raises(ValueError, match="config.json, missing_keys: .*backbone.layers.1.norm.weight"):
        convert_folder(str(tmp_path / "source"), tmp_path / "new", to="mamba2")


def test_an_inconsistent_configuration_is_told(tmp_path):
    mamba2().save_pretrained(tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    path.write_text(path.read_text().replace('"num_heads": 4', '"num_heads": 5'))
    with pytest.raises(ValueError, match="source cannot be loaded: .*num_heads"):
        convert_folder(str(tmp_path / "source"), tmp_path / "new", to="mamba2")


def test_what_does_not_fit_is_refused_before_weights_are_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "load_model", None)
    with pytest.raises(ValueError, match="no conversion from gdn"):
        convert_folder(source, tmp_path / "new", to="palimpsa-m")
    with pytest.raises(ValueError, match="bound must be in"):
        convert_folder(source, tmp_path / "new", to="pgdn", options={"bound": 3})
    with pytest.raises(ValueError, match="no option 'name'"):
        convert_folder(source, tmp_path / "new", to="pgdn", options={"name": "gka"})
    with pytest.raises(ValueError) as error:
        convert_folder(source, tmp_path / "new", to="pgdn", options={"head_dim": 7})
    assert "do not fit head_dim=7: model" in str(error.value) and len(str(error.value)) < 200
    with pytest.raises(ValueError, match="seed must be a whole number from 0 to"):
        convert_folder(source, tmp_path / "new", to="pgdn", seed=10**30)


def test_an_output_that_cannot_be_made_is_refused_before_weights_are_read(source, tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "load_model", None)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="must be in a folder that can be written to, and .*file is none"):
        convert_folder(source, tmp_path / "file" / "below" / "new", to="pgdn")
    with pytest.raises(ValueError, match="UTF-8"):
        convert_folder(source, tmp_path / "new\udcff", to="pgdn")
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    with pytest.raises(ValueError, match="must be in a folder that can be written to"):
        convert_folder(source, tmp_path / "new", to="pgdn")
    assert files(tmp_path) == ["file", "source"]


@pytest.mark.parametrize("option", [{"tokens": 0}, {"steps": 0}, {"peak": -1.0}])
def test_numbers_are_checked(source, tmp_path, option):
    with pytest.raises(ValueError, match=next(iter(option))):
        convert_folder(source, tmp_path / "new", to="pgdn", **option)


def test_a_prompt_without_tokenizer_is_refused(tmp_path):
    model("gdn").save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="prompt needs the tokenizer"):
        convert_folder(str(tmp_path / "source"), tmp_path / "new", to="pgdn", prompt="a")


def test_trust_in_a_tokenizers_code_is_not_taken_over(source, tmp_path):
    """run.json may be a stranger's, and nobody reads train.toml before it is given to the training."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (Path(source) / name).unlink()
    run = {"tokenizer": {"path": "evil", "trust_remote_code": True}}
    (Path(source) / "run.json").write_text(json.dumps(run))
    convert_folder(source, tmp_path / "new", to="pgdn")
    written = (tmp_path / "new" / "train.toml").read_text()
    assert "evil" in written and "trust_remote_code" not in written
    assert not load_run(tmp_path / "new" / "train.toml").tokenizer.trust_remote_code
