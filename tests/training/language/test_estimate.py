"""What a training is said to need, beside what a small one takes."""

import pytest
import torch

from fastweights.cli import main
from fastweights.data.text.packing import pack_rows
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language import LanguageRun, estimate
from fastweights.training.language.optimizers import build_optimizer

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
