"""What cannot work is refused, with a remedy, before anything is trained."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training.language import texts, train_language
from fastweights.training.language.model import model_tokenizer

from .small import small_run

MODEL = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}


@pytest.fixture(scope="module")
def trained(prepared, tmp_path_factory):
    run = small_run(prepared, output=str(tmp_path_factory.mktemp("trained") / "out"), max_steps=2, context_lengths=())
    return train_language(run)[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"preset": "pgdn-340"}}, "unknown preset 'pgdn-340' .did you mean 'pgdn-340m'"),
        ({"model": {"hiden_size": 16}}, "no key 'hiden_size' .did you mean 'hidden_size'"),
        ({"model": {**MODEL, "mixer": "gdm"}}, "unknown mixer 'gdm'"),
        ({"model": {**MODEL, "num_heads": 3}}, "num_heads"),
        ({"model": {**MODEL, "vocab_size": 299}}, "tokenizer has 300 and vocab_size is 299"),
        ({"model": {"path": "nowhere"}}, "model path must be a folder with a saved model, nowhere is none"),
        pytest.param(
            {"precision": "fp16"},
            'precision "fp16" needs a GPU',
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        ({"length": 100_000}, "train text must have at least one row of length 100000"),
        ({"context_parallel": 2}, "context_parallel must divide the number of processes, 1, got 2: .* 2xNAME"),
        ({"stages": [{"max_steps": 2}, {"context_parallel": 3}]}, "context_parallel must divide .* 1, got 3"),
    ],
)
def test_runs_that_cannot_work(make_run, changes, words):
    run = make_run(**changes)
    with pytest.raises(ValueError, match=words):
        train_language(run)
    assert not Path(run.output).exists()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mixers": ["gdn", "pdgn"]}, "unknown mixer 'pdgn' .did you mean 'pdn'"),
        ({"mixers": ["gdn:conv_sise=2"]}, "no option 'conv_sise' .did you mean 'conv_size'"),
        (
            {"mixers": ["gdn@a", "kda@a"]},
            "mixers must be different from each other, got a, a; give one of them another",
        ),
        ({"mixers": ["gdn"], "model": {"mixer": "gdn"}}, "model must have no mixer where mixers are given"),
        ({"presets": ["gdn-34m"]}, "presets: unknown preset 'gdn-34m' .did you mean 'gdn-340m'"),
        ({"presets": [{"label": "a"}]}, "a table of presets must have the key 'name'"),
        ({"presets": [{"name": "gdn-340m", "layers": 2}]}, "presets: .*layers"),
        ({"presets": ["gdn-340m", "gdn-340m"]}, "presets must be different from each other, got gdn-340m, gdn-340m"),
        ({"presets": [{"name": "gdn-340m", "label": " a"}]}, "presets: label of a m"),
        ({"presets": ["gdn-340m"], "mixers": ["gdn"]}, "presets must be .. beside mixers"),
        ({"presets": ["gdn-340m"], "model": {"preset": "gdn-1b"}}, "presets must be .. beside preset"),
        ({"presets": ["gdn-340m"], "model": {"mixer": "gdn"}}, "presets must be .. beside mixer"),
        ({"presets": ["gdn-340m"], "model": {"path": "a"}}, "presets must be .. beside path"),
        ({"presets": ["gdn-340m"], "stages": [{"presets": ["gdn-1b"]}]}, "presets must stand above the stages"),
        ({"mixers": ["gdn"], "model": {"path": "a"}}, "model must have nothing beside path but mixer"),
        ({"model": {"path": "a", "hidden_size": 3}}, "model must have nothing beside path but mixer"),
    ],
)
def test_models_that_are_refused_when_the_run_is_made(make_run, changes, words):
    with pytest.raises(ValueError, match=words):
        make_run(**{"model": MODEL, **changes})


def test_a_model_continues_as_no_other_mixer(make_run, trained):
    """Before text is read. Its layers are of gdn."""
    for mixer, words in (
        ("kda", "gdn continues as"),
        ({"name": "pgdn", "expand_v": 2.0}, "options must keep the sizes"),
    ):
        run = make_run(model={"path": trained.folder, "mixer": mixer}, tokenizer=TextTokenizer())
        with pytest.raises(ValueError, match=words):
            train_language(run)
        assert not Path(run.output).exists()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [("missing", None, "does not exist"), ("a.txt", b"\0\1", "binary"), ("a.txt", b"", "corpus must hold text")],
)
def test_text_that_cannot_be_read(make_run, tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    run = make_run(corpus=TextCorpus(paths=(str(tmp_path / name),)), cache=str(tmp_path / "cache"))
    with pytest.raises(ValueError, match=words):
        train_language(run)
    assert not Path(run.output).exists()


def test_another_tokenizer_than_the_models(make_run, trained):
    run = make_run(model={"path": trained.folder}, tokenizer=TextTokenizer(vocab_size=290))
    with pytest.raises(ValueError, match="its 290 tokens are not the model's 300; leave .tokenizer. out"):
        train_language(run)


def test_a_model_without_a_tokenizer_needs_one(make_run, trained, tmp_path):
    folder = shutil.copytree(trained.folder, tmp_path / "copy")
    (folder / "tokenizer_config.json").unlink()
    run = make_run(model={"path": str(folder)}, tokenizer=TextTokenizer())
    assert model_tokenizer(run) == TextTokenizer(path=str(folder))  # tokenizer.json is there
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match="tokenizer path must name the tokenizer.*set path in .tokenizer."):
        train_language(run)
    path = str(Path(trained.folder, "tokenizer.json"))
    assert train_language(dataclasses.replace(run, tokenizer=TextTokenizer(path=path)), stop_at=1) is None


@pytest.mark.parametrize("harm", ["missing", "damaged", "lacking", "other shapes"])
def test_weights_that_are_not_the_models(make_run, trained, tmp_path, harm):
    folder = shutil.copytree(trained.folder, tmp_path / "run" / "model")
    weights, config = folder / "model.safetensors", json.loads((folder / "config.json").read_text())
    if harm == "missing":
        weights.unlink()
    elif harm == "damaged":
        weights.write_bytes(weights.read_bytes()[:-9])
    else:
        change = {"num_hidden_layers": 2} if harm == "lacking" else {"hidden_size": 32}
        (folder / "config.json").write_text(json.dumps({**config, **change}))
    run = make_run(model={"path": str(tmp_path / "run")}, tokenizer=TextTokenizer())
    with pytest.raises(
        ValueError, match="model holds no weights|is no safetensors file|the weights in .* are not those"
    ):
        train_language(run)
    assert not Path(run.output).exists()


def test_what_is_known_at_once_is_refused_at_once(make_run, monkeypatch):
    """Before text is read or tokenized."""
    run, taken = make_run(), make_run("taken")
    Path(taken.output).mkdir()
    Path(taken.output, "thesis.tex").write_text("")
    train_language(run, stop_at=1)
    monkeypatch.setattr(texts, "prepare_text", None)
    for changes, words in (
        ({"seed": 1}, "seed is 0 there and 1 here"),
        ({"output": taken.output}, "holds 'thesis.tex'"),
        ({"output": taken.output, "mixers": ("gdn",), "model": MODEL}, "holds 'thesis.tex'"),
        ({"model": {"path": "nowhere"}}, "nowhere is none"),
        ({"model": {"preset": "none"}}, "unknown preset"),
    ):
        with pytest.raises(ValueError, match=words):
            train_language(dataclasses.replace(run, **changes))


def test_the_folder_of_several_mixers_is_theirs(make_run):
    run = make_run(model=MODEL, mixers=("linear", "gdn"), max_steps=1, context_lengths=())
    train_language(run)
    Path(run.output, "notes.png").write_text("mine")
    before = Path(run.output, "results.json").read_bytes()
    other = dataclasses.replace(run, mixers=("linear", "kda"))
    with pytest.raises(ValueError, match='mixers is .*"gdn". there and .*"kda". here'):
        train_language(other)
    assert Path(run.output, "results.json").read_bytes() == before
    train_language(other, overwrite=True)
    assert Path(run.output, "notes.png").exists()


def test_a_model_of_another_architecture(make_run, tmp_path):
    LlamaConfig().save_pretrained(tmp_path / "llama")
    with pytest.raises(ValueError, match="llama must hold a model of type 'fastweights', got 'llama'"):
        train_language(make_run(model={"path": str(tmp_path / "llama")}))


def test_a_checkpoint_of_another_architecture(make_run):
    """Whether the folder still says which training it is of, or the checkpoint was put there."""
    run, wider = make_run(), make_run(model={**MODEL, "hidden_size": 32})
    train_language(run, stop_at=3)
    checkpoint = Path(run.output, "checkpoints/checkpoint-3")
    before = {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match='holds another training: model is .*"hidden_size": 16.*hidden_size": 32'):
        train_language(wider)
    for file in ("run.json", "log.jsonl"):
        Path(run.output, file).unlink()
    with pytest.raises(
        ValueError, match="checkpoint-3 is of another architecture: hidden_size is 16 there and 32 here"
    ):
        train_language(wider)
    assert {path: path.read_bytes() for path in checkpoint.rglob("*") if path.is_file()} == before
    assert len(train_language(wider, overwrite=True)[0].losses) == 8


def test_output_folders(make_run, tmp_path):
    run = make_run()
    Path(run.output).mkdir()
    Path(run.output, "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="holds 'thesis.tex' and no run.json"):
        train_language(run)
    Path(run.output, "thesis.tex").unlink()
    train_language(run, stop_at=1)
    other = dataclasses.replace(run, seed=1, learning_rate=0.5)
    with pytest.raises(ValueError, match="learning_rate is 0.01 there and 0.5 here, seed is 0 there and 1 here"):
        train_language(other)
    assert json.loads(Path(run.output, "run.json").read_text())["seed"] == 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file"):
        train_language(make_run("file"))


def test_tensorboard_is_optional(make_run, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="tensorboard = true needs tensorboard"):
        train_language(make_run(tensorboard=True))
