"""Run files of recall: what they say is what runs; what they say wrong is one message."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

from fastweights.layers import MixerChoice
from fastweights.models import FastWeightsForCausalLM
from fastweights.training import RecallExperiment, Stage, load_recall_file
from fastweights.training.run_files import tomllib

FILE = """
output = "runs/x"
workers = 3
task = "mqar"
vocab_size = 128
layers = 2
softmax_layers = [1]
intermediate_size = 0
tie_word_embeddings = true
beta2 = 0.95
schedule = "constant"
train_examples = 64
seeds = [1, 2]
mixers = ["gdn", { name = "gdn", options = { conv_size = 2 }, label = "small" }]

[task_options]
random_non_queries = false
"""


def write(folder, text):
    file = folder / "run.toml"
    file.write_text(text)
    return file


def test_every_key_reaches_the_experiment(tmp_path):
    read = load_recall_file(write(tmp_path, FILE))
    assert (read.output, read.workers) == ("runs/x", 3)
    assert read.parts == {
        "": RecallExperiment(
            task="mqar", vocab_size=128, layers=2, softmax_layers=(1,), intermediate_size=0, tie_word_embeddings=True,
            beta2=0.95, schedule="constant", train_examples=64, seeds=(1, 2),
            mixers=("gdn", MixerChoice("gdn", {"conv_size": 2}, "small")), task_options={"random_non_queries": False},
        )
    }  # fmt: skip


FIRST_VALUES = """
width = 128
heads = 4
initializer_range = 0.3
scale_residuals = false
warmup_start = 0.1
learning_rates = [0.01]
seeds = [0]
pairs = [2]

[[mixers]]
name = "palimpsa-d"
options = { beta_init = "uniform", conv_init = "normal", long_memory = "release", b_scale = [0.1, 1.0] }
"""


def test_first_values_of_a_file_are_those_of_the_model(tmp_path):
    (run,) = load_recall_file(write(tmp_path, FIRST_VALUES)).parts[""].runs()
    assert run.warmup_start == 0.1
    torch.manual_seed(0)
    layer = FastWeightsForCausalLM(run.model_config()).model.layers[0].mixer.requires_grad_(False)
    for weight in (layer.qkv.q_proj.weight, layer.output.o_proj.weight, layer.qkv.k_conv.weight):
        assert weight.std().item() == pytest.approx(0.3, rel=0.1)
    second = layer.importance.beta_proj[1].weight  # of rank 128 / 16
    assert 0.3 < second.abs().max() <= 8**-0.5
    assert len(layer.importance.b_scale.unique()) == 4
    assert layer.importance.b_scale.min() >= 0.1 and layer.importance.b_scale.max() <= 1
    rates = torch.tensor([0.01 + 0.05 * head for head in range(4)])
    steps = torch.tensor([10 ** (-1 - 2 * head / 3) for head in range(4)])
    torch.testing.assert_close(layer.decay.A_log.exp(), rates)
    torch.testing.assert_close((1 + layer.decay.dt_bias.exp()).log(), steps, rtol=1e-4, atol=0)


# Every field of an experiment, as TOML writes it.
WRITTEN: dict[str, str] = {
    "task": '"mqar"', "task_options": "{ power_a = 0.5, random_non_queries = false }", "length": "64", "vocab_size": "128",
    "width": "64", "heads": "8", "layers": "3", "intermediate_size": "0", "tie_word_embeddings": "true",
    "scale_residuals": "false", "softmax_layers": "[1]", "steps": "90", "batch_size": "8", "train_examples": "64",
    "curriculum": "[{ pairs = 2, steps = 3 }, { pairs = 4, steps = 5, length = 40, batch_size = 2 }]", "beta1": "0.8",
    "beta2": "0.95", "weight_decay": "0.0", "schedule": '"constant"', "warmup_fraction": "0.2", "warmup_start": "0.1",
    "final_fraction": "0.0", "max_gradient_norm": "2.0", "initializer_range": "0.1", "test_examples": "32",
    "evaluations": "3", "device": '"cpu:0"', "mixers": '["gdn", { name = "gdn", options = { conv_size = 2 }, label = "small" }]',
    "pairs": "[2, 8]", "learning_rates": "[0.1, 0.01]", "seeds": "[3, 4]", "watch_every": "30", "save_models": "true",
    "mixture": "[{ pairs = 2, steps = 3 }, { pairs = 4, steps = 5, length = 40 }]", "validation_examples": "16", "stop_at": "0.9",
    "seed_by_name": "true", "block": '"matched"',
}  # fmt: skip


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RecallExperiment)])
def test_a_file_says_what_python_says(name, tmp_path):
    """Every setting can be written in a file, and the same in Python; none is without effect on what is recorded."""
    needed = {"task_options": 'task = "mqar"\n', "softmax_layers": "layers = 3\n"}.get(name, "")
    needed = "validation_examples = 9\n" if name in ("mixture", "stop_at") else needed
    value = tomllib.loads(f"value = {WRITTEN[name]}")["value"]
    if name in ("curriculum", "mixture"):
        value = [Stage(**stage) for stage in value]
    if name == "mixers":
        value = [MixerChoice(**entry) if isinstance(entry, dict) else entry for entry in value]
    (read,) = load_recall_file(write(tmp_path, f"{needed}{name} = {WRITTEN[name]}\n")).parts.values()
    assert read == RecallExperiment(**{**tomllib.loads(needed), name: value})
    (default,) = load_recall_file(write(tmp_path, needed)).parts.values()
    records = [[run.record() for run in experiment.runs()] for experiment in (read, default)]
    assert records[0] != records[1]


def test_parts_change_what_stands_above(tmp_path):
    text = FILE + "[parts.short]\npairs = [2]\n[parts.long]\nlength = 64\ntask_options = {}\n"
    read = load_recall_file(write(tmp_path, text))
    assert [(name, str(folder)) for name, folder in read.folders().items()] == [
        ("short", "runs/x/short"),
        ("long", "runs/x/long"),
    ]
    short, long = read.parts["short"], read.parts["long"]
    assert (short.pairs, short.length, short.task_options) == ((2,), None, {"random_non_queries": False})
    assert (long.pairs, long.length, long.task_options) == ((4, 16), 64, {})
    assert short.mixers == long.mixers


def test_a_curriculum_decides_pairs_length_and_steps(tmp_path):
    text = "[[curriculum]]\npairs = 2\nsteps = 3\n[[curriculum]]\npairs = 4\nsteps = 5\nlength = 40\n"
    (experiment,) = load_recall_file(write(tmp_path, text)).parts.values()
    assert experiment.curriculum == (Stage(pairs=2, steps=3), Stage(pairs=4, steps=5, length=40))
    assert (experiment.pairs, experiment.length, experiment.steps) == ((4,), 40, 8)


def test_without_a_file_the_block_is_the_matched_one_and_with_one_the_published(tmp_path):
    whole = RecallExperiment(block="matched", pairs=(4, 8), validation_examples=256)
    assert load_recall_file(None).parts == {"": whole}
    given = {"block": "published", "pairs": (4, 16), "validation_examples": None}
    assert load_recall_file(None, **given).parts == {"": RecallExperiment()}
    stages = load_recall_file(None, overrides=["curriculum=[{pairs = 2, steps = 3}]"]).parts[""]
    assert (stages.pairs, stages.block) == ((2,), "matched")
    assert load_recall_file(None, curriculum=[Stage(pairs=2, steps=3)]).parts == {"": stages}
    assert load_recall_file(write(tmp_path, FILE)).parts[""].block == "published"
    assert load_recall_file(write(tmp_path, FILE), block="matched").parts[""].block == "matched"


def test_changes_go_over_file_and_parts(tmp_path):
    text = FILE + "[parts.a]\nsteps = 5\n[parts.b]\n"
    read = load_recall_file(write(tmp_path, text), steps=7, output="y", workers=1)
    assert [part.steps for part in read.parts.values()] == [7, 7] and (read.output, read.workers) == ("y", 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step = 3", "run.toml: the file has no key 'step' .did you mean 'steps'"),
        ("a = ", "not valid TOML"),
        ("steps = 'ten'", "run.toml: steps must be a positive whole number"),
        ("steps = 0", "run.toml: steps must be a positive whole number"),
        ("mixers = 'gdn'", "mixers must be a list of at least one value, got 'gdn'"),
        ("mixers = ['gnd']", "did you mean 'gdn'"),
        ("mixers = [{name = 'gdn', conv_size = 2}]", "mixer as a table has no key 'conv_size'"),
        ("mixers = [{name = 'gdn', options = {convsize = 2}}]", "did you mean 'conv_size'"),
        ("curriculum = [3]", "curriculum must be a list of Stage .tables ..curriculum.. in a run file., got .3."),
        ("[[curriculum]]\npairs = 2", "a table of curriculum must have the key 'steps'; add it"),
        ("[[curriculum]]\npairs = 2\nsteps = 0", "steps of a stage must be a positive whole number"),
        ("pairs = [8]\n[[curriculum]]\npairs = 2\nsteps = 3", "pairs must be left out with a curriculum"),
        (
            "steps = 9\n[[curriculum]]\npairs = 2\nsteps = 3",
            "steps must be left out with a curriculum, whose stages say 3",
        ),
        ("softmax_layers = [2]", "softmax_layers must be a whole number from 0 to 1"),
        ("softmax_layers = 1", "softmax_layers must be a list of layer numbers, got 1"),
        ("train_examples = 8", "train_examples must be at least batch_size, 32"),
        ("schedule = 'linar'", "schedule must be one of 'cosine', 'linear', 'wsd', 'constant'"),
        ("beta1 = 1.0", "beta1 must be"),
        ("tie_word_embeddings = 1", "tie_word_embeddings must be True or False"),
        ("intermediate_size = -1", "intermediate_size"),
        ("[task_options]\ngap = 1", "option of task"),
        ("[parts.'a/b']\nsteps = 3", "names that can be folders, got 'a/b'"),
        ("[parts.'..']\nsteps = 3", "names that can be folders, got '..'"),
        ("parts = 3", "parts must be tables"),
        ("[parts.one]\nsteps = 0", "run.toml: part one: steps must be"),
        ("workers = 0", "workers must be"),
        ("output = ''", "output must be"),
        (f"output = '{'a' * 300}'", "output must be the path of a folder of at most 4,095 bytes, and 255 between"),
        (f"[parts.{'a' * 300}]", "output must be the path of a folder of at most 4,095 bytes, and 255 between"),
        ("ouput = 'x'", "the file has no key 'ouput' .did you mean 'output'"),
        ("[[curriculum]]\nsteps = 2", "a table of curriculum must have the key 'pairs'"),
        ("[[mixers]]\nlabel = 'x'", "mixer as a table must have the key 'name'"),
        ("mixers = [{name = 'gdn', options = 3}]", "options of mixer 'gdn' must be a table"),
        ("task_options = 3", "task_options must be a table .in Python a dict. of options by name, got 3"),
        ("task = 'mqra'", "run.toml: task must be one of 'mqar', "),
        ("pairs = []", "pairs must be a list of at least one value, got ..$"),
        ("seeds = [-1]", "seeds must be a whole number of at least 0, got -1"),
        ("learning_rates = [0]", "learning_rates must be positive, got 0"),
    ],
)
def test_what_is_wrong_is_one_message(tmp_path, text, words):
    with pytest.raises(ValueError, match=words):
        load_recall_file(write(tmp_path, text))


def test_the_example_of_the_documentation(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    (text,) = [block for block in re.findall(r"```toml\n(.*?)```", page, re.S) if "curriculum" in block]
    read = load_recall_file(write(tmp_path, text))
    assert [part.width for part in read.parts.values()] == [32, 64]


def test_the_file_itself(tmp_path):
    with pytest.raises(ValueError, match="does not exist"):
        load_recall_file(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="must be a .toml file"):
        load_recall_file(tmp_path / "run.yaml")
