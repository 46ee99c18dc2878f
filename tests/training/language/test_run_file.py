"""Run files: what they say is what is run, and what they misspell is refused."""

from pathlib import Path

import pytest

from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training.language import LanguageRun, load_run
from fastweights.training.language.folder import LanguageFolder
from fastweights.training.language.model import build_model, model_config

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))

TOML = """
output = "runs/a"
mixers = ["gdn", "pgdn"]
learning_rate = 1e-3
context_lengths = [128, 256]
[model]
hidden_size = 64
[corpus]
paths = "texts"
[tokenizer]
vocab_size = 512
"""

RUN = LanguageRun(
    output="runs/a",
    mixers=("gdn", "pgdn"),
    learning_rate=1e-3,
    context_lengths=(128, 256),
    model={"hidden_size": 64},
    corpus=TextCorpus(paths=("texts",)),
    tokenizer=TextTokenizer(vocab_size=512),
)

PYTHON = """
from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training.language import LanguageRun
"""


def write(folder, name, content):
    (folder / name).write_text(content)
    return folder / name


def test_toml(tmp_path):
    file = write(tmp_path, "run.toml", TOML)
    assert load_run(file) == RUN
    assert load_run(file, output="b", seed=3) == LanguageRun(**{**vars(RUN), "output": "b", "seed": 3})


@pytest.mark.parametrize("form", ["run = {run}", "def run():\n    return {run}"])
def test_python(tmp_path, form):
    file = write(tmp_path, "run.py", PYTHON + form.format(run=RUN))
    assert load_run(str(file)) == RUN


FIRST_VALUES = """
warmup_start = 0.1
[model]
vocab_size = 500
hidden_size = 128
num_hidden_layers = 2
num_heads = 4
initializer_range = 0.3
scale_residuals = false
[model.mixer]
name = "palimpsa-m"
beta_init = "uniform"
conv_init = "normal"
skip_init = 0.5
"""


def test_first_values_and_schedule_of_a_run_file(tmp_path):
    """They reach the model's weights; the schedule is that of the file."""
    run = load_run(write(tmp_path, "run.toml", FIRST_VALUES))
    assert run.warmup_start == 0.1
    lm = build_model(run, model_config(run)).requires_grad_(False)
    layer = lm.model.layers[1].mixer
    for weight in (lm.model.embed_tokens.weight, layer.in_proj.weight, layer.out_proj.weight, layer.conv.weight):
        assert weight.std().item() == pytest.approx(0.3, rel=0.1)
    assert 0.3 < layer.importance.beta_proj[1].weight.abs().max() <= 8**-0.5  # of rank 128 / 16
    assert layer.skip.D.tolist() == [0.5] * 4


def test_one_run_a_mixer():
    first, second = RUN.models()
    assert (first.output, first.mixers, first.model) == ("runs/a/gdn", (), {"hidden_size": 64, "mixer": "gdn"})
    assert second.model["mixer"] == "pgdn" and second.models() == [second]
    folder = LanguageFolder(Path(RUN.output))
    assert folder.describe(RUN)["mixers"] == ["gdn", "pgdn"]  # as in the folders of before
    assert "label" not in folder.describe(second) and "context_parallel" not in folder.describe(second)


CHOICES = """
output = "runs/a"
mixers = ["gka", "gdn:conv_size=3@small", { name = "gdn", options = { expand_v = 2 } }]
[model]
preset = "gka-440m"
num_hidden_layers = 2
hidden_size = 64
vocab_size = 64
"""


def test_mixers_with_options_and_labels_keep_the_options_of_a_preset(tmp_path):
    file = write(tmp_path, "run.toml", CHOICES)
    gka, small, wide = load_run(file).models()
    assert [run.output for run in (gka, small)] == ["runs/a/gka", "runs/a/small"]
    assert wide.label == "gdn:expand_v=2" and wide.output.startswith("runs/a/gdn_expand_v=2-")
    assert gka.model["mixer"] == {"name": "gka", "gate_bias": True, "conv_init": "normal", "long_memory": "own"}
    assert small.model["mixer"] == {"name": "gdn", "conv_init": "normal", "long_memory": "own", "conv_size": 3}
    for run in (gka, small, wide):
        layer = build_model(run, model_config(run)).model.layers[0].mixer
        assert layer.qkv.q_conv.weight.std().item() == pytest.approx(0.02, rel=0.2)
    changed = load_run(file, overrides=["mixers.1.options.conv_size=2"])
    assert changed.models()[1].model["mixer"]["conv_size"] == 2 and changed.mixers[0] == "gka"
    assert load_run(file, overrides=['mixers=["gdn@b"]']).models()[0].output == "runs/a/b"


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_examples_can_be_read(file):
    assert load_run(file).max_steps > 0


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("run.yaml", "", "must be a .toml or .py file"),
        ("run.toml", None, "run.toml does not exist"),
        ("run.toml", "a = ", "not valid TOML"),
        ("run.toml", "learning_rat = 1", "no key 'learning_rat' .did you mean 'learning_rate'"),
        ("run.toml", "[corpus]\npath = 'a'", "no key 'path' .did you mean 'paths'"),
        ("run.toml", "[tokenizer]\nvocab = 3", "has no key 'vocab'"),
        ("run.toml", "max_steps = 0", "run.toml: max_steps must be a positive whole number, got 0"),
        ("run.toml", "max_steps = 'ten'", "max_steps must be a positive whole number"),
        ("run.toml", "corpus = 3", "corpus must be a TextCorpus, a table in a run file, got 3"),
        ("run.toml", "model = 'gdn-340m'", "model must be a table"),
        ("run.toml", "mixers = ['gdn', 'gdn']", "mixers must be different"),
        ("run.toml", "mixers = ['gdn']\n[model]\nmixer = 'kda'", "model must have no mixer where mixers are given"),
        ("run.toml", "mixers = ['gdn']\n[model]\npath = 'a'", "model must have nothing beside path"),
        ("run.toml", "precision = 'bf8'", "precision must be one of 'no', 'bf16', 'fp16'"),
        ("run.toml", "warmup_start = 2", "warmup_start must be a finite number, at least 0 and at most 1"),
        ("run.toml", "warmup_fraction = 2", "warmup_fraction must be a finite number, at least 0 and at most 1"),
        ("run.toml", "length = 1", "length must be at least 2"),
        ("run.toml", "beta1 = 1", "beta1 must be a finite number, at least 0 and less than 1, got 1"),
        ("run.toml", "seed = 4294967296", "seed must be a whole number from 0 to 4294967295, got 4294967296"),
        ("run.toml", "seed = -1", "seed must be a whole number from 0"),
        ("run.toml", "fsdp = 1", "fsdp must be True or False"),
        ("run.toml", "output = ''", "output must be the path of a folder"),
        ("run.toml", "context_lengths = [1]", "context_lengths must be a whole number of at least 2, got 1"),
        ("run.toml", "context_lengths = 512", "context_lengths must be a list of whole numbers"),
        ("run.py", "x = 1", "must define `run`"),
        ("run.py", "run = 3", "must define `run`.*got int"),
        ("run.py", "raise SystemExit(3)", "run.py: SystemExit: 3"),
        ("run.py", "raise KeyError('a')", "run.py: KeyError: 'a'"),
    ],
)
def test_bad_run_files(tmp_path, name, content, words):
    file = tmp_path / name if content is None else write(tmp_path, name, content)
    with pytest.raises(ValueError, match=words):
        load_run(file)


def test_an_unknown_change():
    with pytest.raises(TypeError):
        LanguageRun(outputs="a")
