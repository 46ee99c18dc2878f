"""Models whose weights accelerate keeps on the host or on a disk, and brings for the call of the module that holds them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch

from fastweights.layers import MIXERS, probe
from fastweights.models import FastWeightsForCausalLM

from .small import model, tokens

CPU = torch.device("cpu")
EVERY = list(MIXERS)  # one model with a layer of each
SOME = ["pgdn", "comba", "palimpsa-d", "mamba2", "kda", "vla"]  # the fast set; tests/layers/test_hooks.py has all


def to_host(lm: Any, folder: Path) -> Any:
    return accelerate.cpu_offload(lm, execution_device=CPU)


def to_disk(lm: Any, folder: Path) -> Any:
    return accelerate.disk_offload(lm, folder, execution_device=CPU)


def placement(lm: Any) -> dict[str, str]:
    """Every second layer on the disk. Tied weights stay together."""
    layers = {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(lm.config.num_hidden_layers)}
    last = "cpu" if lm.config.tie_word_embeddings else "disk"
    return {"model.embed_tokens": "cpu", **layers, "model.norm": "disk", "lm_head": last}


def to_both(lm: Any, folder: Path) -> Any:
    return accelerate.dispatch_model(lm, placement(lm), main_device="cpu", offload_dir=folder, force_hooks=True)


def loaded(lm: Any, folder: Path) -> Any:
    lm.save_pretrained(folder / "model")
    return FastWeightsForCausalLM.from_pretrained(
        folder / "model", device_map=placement(lm), offload_folder=folder / "offloaded"
    ).eval()


@torch.no_grad()
def answers(lm: Any) -> list[torch.Tensor]:
    """Loss and logits of a batch, of a token more, of packed documents, of a padded prompt; and generated tokens."""
    ids = tokens(2, 9)
    whole = lm(ids, labels=ids)
    step = lm(ids[:, :1], past_key_values=whole.past_key_values)
    packed = lm(ids.reshape(1, -1), cu_seqlens=torch.tensor([0, 5, 5, 18]))
    padded = lm(ids, attention_mask=torch.tensor([[0] * 4 + [1] * 5, [1] * 9]))
    generated = lm.generate(ids[:, :6], max_new_tokens=3, do_sample=False)
    return [whole.loss, whole.logits, step.logits, packed.logits, padded.logits, generated]


@pytest.mark.parametrize(
    ("mixers", "tied"),
    [
        pytest.param(SOME, False, id="some"),
        pytest.param(EVERY, False, id="every", marks=pytest.mark.slow),
        pytest.param(EVERY, True, id="tied", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("move", [to_host, pytest.param(to_disk, marks=pytest.mark.slow), to_both, loaded])
def test_offloaded_models_answer_as_before(move: Callable[..., Any], mixers: list[str], tied: bool, tmp_path):
    wanted = answers(model(mixers, tie_word_embeddings=tied))
    lm = move(model(mixers, tie_word_embeddings=tied), tmp_path)
    assert any(parameter.device.type == "meta" for parameter in lm.parameters())
    assert all(x.isfinite().all() for x in wanted)
    torch.testing.assert_close(answers(lm), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_every_module_of_a_model_is_called(training: bool):
    """In a training step, and when it reads a prompt and then a token."""
    lm, ids, seen = model(SOME).train(training), tokens(), set()
    names = {name for name, part in lm.named_modules() if any(True for _ in part.parameters())} - {"model.layers"}
    for name in names:
        lm.get_submodule(name).register_forward_hook(lambda *given, name=name: seen.add(name))
    cache = lm(ids, labels=ids).past_key_values
    assert seen == names
    if not training:
        seen.clear()
        lm(ids[:, :1], past_key_values=cache)
        assert seen == names


def test_states_and_probes_of_offloaded_layers():
    plain, lm = model(SOME), to_host(model(SOME), Path())
    for before, after in zip(plain.model.layers, lm.model.layers, strict=True):
        if before.mixer.state_size(1) == before.mixer.state_size(2):
            for count in (1, 3):
                wanted, found = before.mixer.initial_state(count), after.mixer.initial_state(count)
                assert found.memory.keys() == wanted.memory.keys() and found.context.keys() == wanted.context.keys()
                torch.testing.assert_close([*found.memory.values()], [*wanted.memory.values()])
            wanted, found = before.mixer.state_spec(torch.bfloat16), after.mixer.state_spec(torch.bfloat16)
            assert {name: (x.shape, x.dtype) for name, x in found.memory.items()} == {
                name: (x.shape, x.dtype) for name, x in wanted.memory.items()
            }
    seen = []
    for each in (plain, lm):
        with probe(each, "q", "o", "g", "beta", "output_gate") as one:
            each(tokens())
        seen.append({name: list(found.values()) for name, found in one.items()})
    torch.testing.assert_close(seen[1], seen[0])
