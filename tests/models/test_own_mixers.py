"""generate() with mixers from elsewhere, as on a GPU but without graphs: the tokens are those of ordinary calls."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.layers import LayerCache, MemoryLayer, MemoryOptions, Mixer, option, register_mixer, registry
from fastweights.models import FastWeightsModel, assisted, decoding, generation, prompt_graphs
from fastweights.models.draft_graphs import DraftReader
from fastweights.models.kept_graphs import describe_model, graphs_of
from fastweights.ops import linear_attention

from .small import model, tokens

OPTIONS = {"max_new_tokens": 12, "do_sample": False}
ABOUT = {"summary": "a test", "equation": "none", "source": "a test"}


class Gains(torch.nn.Module):
    """A module of its own within a mixer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.settings = torch.nn.Parameter(torch.ones(2)), {"scale": [1.0, 2.0]}

    def forward(self, v: Tensor) -> Tensor:
        return v * (self.weight * self.settings["scale"][0])[:, None]


@dataclass(frozen=True, kw_only=True)
class OwnOptions(MemoryOptions):
    power: int = option(1, lambda name, value: value)


class Own(MemoryLayer):
    """Linear attention with an option, a module and a plain tensor of its own."""

    Options = OwnOptions
    op = linear_attention

    def build(self) -> None:
        self.gains, self.shift = Gains(), torch.zeros(1)

    def rule(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, run: Any) -> Any:
        return run(linear_attention, q, k, self.gains(v**self.options.power) + self.shift)


class Unpacked(Own):
    """The same, for rows of one sequence each."""

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is not None:
            raise ValueError("packed rows")
        return super().forward(x_BTD, cache)


class Growing(Mixer):
    """A mean over all past tokens, which it keeps; it takes no packed rows. With `late` also a count, from its second call on."""

    def __init__(self, *, hidden_size: int, num_heads: int, late: bool = False) -> None:
        super().__init__()
        self.hidden_size, self.late = hidden_size, late
        self.proj = torch.nn.Linear(hidden_size, hidden_size)

    def forward(self, x_BTD: Tensor, cache: LayerCache | None = None, cu_seqlens: Tensor | None = None) -> Tensor:
        if cu_seqlens is not None:
            raise NotImplementedError("packed rows")
        before = None if cache is None else cache.memory.get("tokens")
        v = self.proj(x_BTD)
        whole = v if before is None else torch.cat([before, v], 1)
        if cache is not None:
            count = {"count": torch.full((len(v),), whole.shape[1])} if self.late and before is not None else {}
            cache.update({"tokens": whole[:, -8:] if self.late else whole}, count)
        means = whole.cumsum(1) / torch.arange(1, whole.shape[1] + 1)[:, None]
        return means[:, -x_BTD.shape[1] :]

    def state_size(self, length: int = 1) -> int:
        return self.hidden_size * length


@pytest.fixture(autouse=True)
def mixers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    register_mixer("own", layer=Own, **ABOUT)
    register_mixer("unpacked", layer=Unpacked, **ABOUT)
    register_mixer("growing", layer=Growing, state="T D", **ABOUT)


@pytest.fixture
def by_steps(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Steps and readings of prompts are called here, where a GPU has graphs. What is begun and called, in turn."""
    done: list[str] = []
    for owner, name in (
        (decoding.DecodeSteps, "begin"),
        (decoding.DecodeSteps, "__call__"),
        (prompt_graphs.PromptReader, "_call"),
    ):
        before = getattr(owner, name)

        def noted(self: Any, *given: Any, before: Any = before, name: str = name) -> Any:
            done.append(name)
            return before(self, *given)

        monkeypatch.setattr(owner, name, noted)
    monkeypatch.setattr(generation, "can_replay", lambda lm: True)
    monkeypatch.setattr(generation, "DecodeSteps", partial(decoding.DecodeSteps, replayed=False))
    return done


def called(lm: Any, ids: Tensor) -> Tensor:
    return lm.generate(ids, **OPTIONS, disable_compile=True)


@pytest.mark.parametrize("late", [False, True])
def test_a_memory_that_changes_its_form_is_called_token_by_token(by_steps: list[str], late: bool) -> None:
    """It has no fixed cache: the first try shows it, and the tokens are those of ordinary calls."""
    lm, ids = model([{"name": "growing", "late": late}, "gdn"], initializer_range=0.5), tokens(2, 9)
    for _ in range(2):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert by_steps.count("begin") == 1 and "__call__" not in by_steps  # refused since


def test_prompts_that_a_mixer_does_not_take_packed_are_read_plainly(by_steps: list[str]) -> None:
    lm, ids = model(["growing", "gdn"], initializer_range=0.5), tokens(2, 9)
    for _ in range(2):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert by_steps.count("_call") == 1  # refused since


def test_a_mixer_with_modules_and_options_of_its_own_takes_the_step_of_an_earlier_call(by_steps: list[str]) -> None:
    lm, ids = model(["own", "gdn"], initializer_range=0.5), tokens(2, 9)
    for _ in range(3):
        assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids))
    assert by_steps.count("begin") == 1


CHANGES = {
    "an entry of a list": lambda own: own.gains.settings["scale"].__setitem__(0, 3.0),
    "a weight of its module": lambda own: own.gains.weight.add_(0.25),
    "a tensor in place": lambda own: own.shift.add_(1),
    "another tensor": lambda own: setattr(own, "shift", torch.ones(1)),
    "its options": lambda own: setattr(own, "options", replace(own.options, power=3)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_a_mixer_holds_is_seen_to_change(by_steps: list[str], change: str) -> None:
    lm, ids = model(["own", "gdn"], initializer_range=0.5), tokens(2, 9)
    lm.generate(ids, **OPTIONS)
    before = describe_model(lm)
    assert before is not None and describe_model(lm) == before
    with torch.no_grad():
        CHANGES[change](lm.model.layers[0].mixer)
    assert describe_model(lm) != before
    assert torch.equal(lm.generate(ids, **OPTIONS), called(lm, ids)) and by_steps.count("begin") == 2


def test_a_mixer_that_holds_what_cannot_be_compared_has_no_key() -> None:
    lm = model(["own", "gdn"])
    lm.model.layers[0].mixer.random = torch.Generator()
    assert describe_model(lm) is None


def test_tensors_without_a_version_have_no_key() -> None:
    lm = model(["own", "gdn"])
    with torch.inference_mode():
        lm.model.layers[0].mixer.shift = torch.zeros(1)
    assert describe_model(lm) is None


def test_drafts_that_a_mixer_does_not_take_packed_are_read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, ids = model(["unpacked", "gdn"], initializer_range=0.5), tokens(1, 9)
    wanted = called(lm, ids)
    monkeypatch.setattr(assisted, "can_replay", lambda lm: True)
    monkeypatch.setattr(assisted, "DraftReader", partial(DraftReader, replayed=False))
    assert torch.equal(lm.generate(ids, **OPTIONS, prompt_lookup_num_tokens=3), wanted)


def test_a_body_with_a_forward_of_its_own_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(FastWeightsModel):
        def forward(self, *inputs: Any, **more: Any) -> Any:
            return super().forward(*inputs, **more)

    lm = model()
    monkeypatch.setattr(type(lm), "device", property(lambda self: torch.device("cuda")))
    assert decoding.can_replay(lm)
    lm.model.__class__ = Scaled
    assert not decoding.can_replay(lm)


def test_weights_that_move_or_change_their_dtype_leave_no_graphs(by_steps: list[str]) -> None:
    lm = model(initializer_range=0.5)
    lm.generate(tokens(2, 9), **OPTIONS)
    assert len(graphs_of(lm)) == 2  # of prompts and of a step
    lm.to("cpu")  # where it is
    assert len(graphs_of(lm)) == 2
    lm.to(torch.float64)
    assert not len(graphs_of(lm))


@pytest.mark.slow
def test_the_precision_of_products_is_read_whichever_way_it_was_set() -> None:
    """torch refuses the older question after some of the newer settings, which a process keeps."""
    code = """
import torch
from fastweights.private_torch import product_precision
before = product_precision()
torch.backends.fp32_precision = "tf32"
after = product_precision()
assert before != after and after is not None, (before, after)
torch.backends.cuda.matmul.fp32_precision = "ieee"
assert product_precision() not in (None, after)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
