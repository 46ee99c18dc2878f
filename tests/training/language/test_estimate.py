"""What a training is said to need, beside what a small one takes."""

import re

import pytest
import torch

from fastweights.cli import main
from fastweights.data.text.packing import pack_rows
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language import LanguageRun, estimate
from fastweights.training.language.optimizers import build_optimizer
from fastweights.training.language.planning import plan_training

SIZES = {"vocab_size": 50, "hidden_size": 64, "num_hidden_layers": 3, "num_heads": 2}
GROUPS = ("adamw", "muon", "adafactor")


def small(mixer="gdn", **changes):
    torch.manual_seed(0)
    return FastWeightsForCausalLM(FastWeightsConfig(**{**SIZES, "mixer": mixer, **changes})).train()


def batch(rows, length):
    generator = torch.Generator().manual_seed(0)
    starts = torch.zeros(1, dtype=torch.int64).numpy()
    return pack_rows([(torch.randint(50, (length,), generator=generator).numpy(), starts) for _ in range(rows)])


@pytest.mark.parametrize("optimizer", GROUPS)
def test_weights_gradients_and_the_optimizer_are_counted_exactly(optimizer):
    run, model = LanguageRun(optimizer=optimizer, batch_size=1, length=32), small()
    made = build_optimizer(run, model)
    model(**batch(1, 32), use_cache=False).loss.backward()
    made.step()
    state = [x for one in made.state.values() for x in one.values() if torch.is_tensor(x) and x.ndim]
    with torch.device("meta"):
        parts = estimate.memory_parts(run, FastWeightsForCausalLM(model.config))
    assert parts["weights"] == sum(x.nbytes for x in model.parameters())
    assert parts["gradients"] == sum(x.grad.nbytes for x in model.parameters())
    assert parts["optimizer"] == sum(x.nbytes for x in state)


def saved_bytes(model, inputs):
    """Of the tensors that forward keeps for backward, parameters aside, each memory counted once."""
    kept, own = {}, {x.untyped_storage().data_ptr() for x in model.parameters()}

    def keep(x):
        if x.untyped_storage().data_ptr() not in own:
            kept[x.untyped_storage().data_ptr()] = x
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss = model(**inputs, use_cache=False).loss
    total = sum(x.untyped_storage().nbytes() for x in kept.values())
    del loss
    return total


@pytest.mark.parametrize("mixer", ["gdn", "softmax"])
def test_activations_are_about_those_that_torch_keeps(mixer):
    """By size and by length. Forms in PyTorch keep more of a memory than kernels do."""
    for changes in ({}, {"hidden_size": 256, "num_heads": 4}, {"num_hidden_layers": 6}):
        model = small(mixer, **changes)
        found = [saved_bytes(model, batch(2, length)) for length in (128, 256)]
        expected = [estimate.activation_bytes(LanguageRun(batch_size=2, length=length), model) for length in (128, 256)]
        for measured, estimated in zip(found, expected, strict=True):
            assert 0.4 < measured / estimated < 2.5
        assert found[1] / found[0] == pytest.approx(2, rel=0.3) and expected[1] == 2 * expected[0]


def test_what_lowers_the_memory():
    model = small()
    plain = LanguageRun(precision="bf16", batch_size=64)
    parts = estimate.memory_parts(plain, model)
    kept = estimate.memory_parts(LanguageRun(precision="bf16", batch_size=64, gradient_checkpointing=True), model)
    assert kept["activations"] < 0.6 * parts["activations"] and kept["optimizer"] == parts["optimizer"]
    sharded = estimate.memory_parts(LanguageRun(precision="bf16", batch_size=64, fsdp=True), model, 4)
    assert sharded["weights"] == parts["weights"] / 4 and sharded["gradients"] == parts["gradients"] / 4
    assert estimate.memory_parts(plain, model, 4)["gradients"] == parts["gradients"]
    several = estimate.memory_parts(LanguageRun(precision="bf16", batch_size=64, accumulation=2), model, 4)
    assert several["gradients"] == 2 * parts["gradients"]  # buckets of DDP


@pytest.mark.parametrize(
    ("processes", "memory", "fields", "sharded"),
    [
        (4, None, {}, False),
        (1, 1.0, {}, False),
        (4, 1.0, {}, True),
        (4, 1e12, {}, False),
        (4, 1e12, {"fsdp": True}, True),
        (4, 1.0, {"fsdp": False}, False),
        (4, 1.0, {"optimizer": "muon"}, False),
        (4, 1.0, {"compile": True}, False),
    ],
)
def test_parameters_are_sharded_where_copies_might_not_fit(processes, memory, fields, sharded):
    assert estimate.choose_sharding(LanguageRun(**fields), small(), processes, memory) is sharded


def test_room_is_kept_for_the_largest_activations_that_were_measured():
    run, model = LanguageRun(precision="bf16", batch_size=64), small()
    parts = estimate.memory_parts(run, model, 2)
    most = (sum(parts.values()) + 0.53 * parts["activations"]) / 0.94
    assert estimate.choose_sharding(run, model, 2, 0.999 * most)
    assert not estimate.choose_sharding(run, model, 2, 1.001 * most)


def test_a_plan_says_what_is_sharded(make_run):
    plan = plan_training(make_run(fsdp=True), gpu="2xrtx4090")["models"][0]
    assert plan["sharding"] == "parameters, gradients and optimizer over 2 processes (FSDP2)"
    assert "sharding" not in plan_training(make_run(), gpu="2xrtx4090")["models"][0]


def test_operations_by_hand():
    softmax = small("softmax", intermediate_size=0)
    weights = 3 * 4 * 64 * 64 + 50 * 64
    attention = 3 * 2 * 6 * 512 * 64
    assert estimate.step_operations(LanguageRun(length=1024), softmax) == 6 * weights + attention
    windowed = small({"name": "softmax", "window": 100}, intermediate_size=0)
    assert estimate.step_operations(LanguageRun(length=1024), windowed) == 6 * weights + attention * 100 / 512


def test_machines():
    assert estimate.parse_machine("8xH100") == estimate.Machine("h100", 8)
    assert estimate.parse_machine("rtx4090") == estimate.Machine("rtx4090", 1)
    for text in ("v100", "0xh100", "axh100"):
        with pytest.raises(ValueError, match="gpu must be one of|number of GPUs must be"):
            estimate.parse_machine(text)


RUN = """
output = "out"
length = 2048
batch_size = 8
max_tokens = "15B"
precision = "bf16"
[model]
preset = "gdn-1b"
[corpus]
paths = ["text.txt"]
"""


def test_the_command_plans_for_a_gpu_and_refuses_what_cannot_fit(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("a text\n" * 50)
    assert main(["train", "run.toml", "--dry-run", "--gpu", "8xh100"]) == 0
    printed = capsys.readouterr().out
    # Two H100 took 54.6e9 bytes each for these rows (docs/train.md): 51 GiB
    assert "steps: 114,441" in printed and "tokens: 15,000,010,752" in printed and "hours on 8 h100" in printed
    assert "GiB of 70.0 per GPU" in printed
    assert main(["train", "run.toml", "--dry-run", "--gpu", "rtx4090"]) == 2
    assert "must fit into the 21.0 GiB that one rtx4090 has to give, and needs at least" in capsys.readouterr().err
    assert (
        main(["train", "run.toml", "--dry-run", "--gpu", "8xrtx4090", "--set", "fsdp=true", "--batch-size", "1"]) == 0
    )
    assert main(["train", "run.toml", "--gpu", "h100"]) == 2
    assert "--gpu is for a plan" in capsys.readouterr().err and sorted(p.name for p in tmp_path.iterdir()) == [
        "run.toml",
        "text.txt",
    ]


LONG = ["--set", "length=1048576", "--set", "batch_size=1", "--set", "gradient_checkpointing=true"]


def gigabytes(printed):
    return [float(number) for number in re.findall(r"memory: about ([\d.]+) GiB of", printed)]


@pytest.mark.parametrize(
    ("mixer", "least", "most"),
    [
        ("gdn", 40, 55),  # on one GPU 131,072 tokens took 24 GiB, of which DDP's weights, gradients and moments are 5.6
        pytest.param("gka", 40, 60, marks=pytest.mark.slow),
    ],
)
def test_a_million_tokens_over_four_gpus_are_estimated(mixer, least, most, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text\n" * 50)
    (tmp_path / "run.toml").write_text(RUN.replace('preset = "gdn-1b"', f'preset = "gdn-340m"\nmixer = "{mixer}"'))
    command = ["train", "run.toml", "--dry-run", *LONG, "--gpu"]
    assert main([*command, "4xh100", "--set", "context_parallel=4"]) == 0
    printed = capsys.readouterr().out
    (size,) = gigabytes(printed)
    assert least < size < most
    assert "step: 4 processes in 1 context group x 1 row x 1 pass x 1,048,576 tokens = 1,048,576 tokens" in printed
    assert main([*command, "4xh100"]) == 2  # each GPU would have a whole row
    assert "fsdp = true or a larger context_parallel" in capsys.readouterr().err
    assert main([*command, "6xh100", "--set", "context_parallel=4"]) == 2
    assert "context_parallel must divide the number of processes, 6, got 4" in capsys.readouterr().err
