"""Heads divided among processes: the outputs of the parts add up to the layer, or the layer is refused in words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastweights.layers import MIXERS, HeadPart, Mixer, SoftmaxAttention, register_mixer, registry
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, parts
from fastweights.models.parts import (
    Division,
    Meeting,
    check_parts,
    find_divisions,
    measure_error,
    part_of_config,
    take_parts,
)

CLOSE = 1e-11


def config(mixer: Any, **sizes: Any) -> FastWeightsConfig:
    sizes = {"hidden_size": 64, "num_heads": 4, **sizes}
    layers = len(mixer) if isinstance(mixer, list) else 1
    return FastWeightsConfig(vocab_size=64, num_hidden_layers=layers, mixer=mixer, **sizes)


def error_of_last(whole: FastWeightsConfig, count: int) -> float:
    return measure_error(whole, part_of_config(whole, count), whole.num_hidden_layers - 1, count)


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MIXERS)
def test_the_outputs_of_the_parts_add_up(name, count):
    assert error_of_last(config(name), count) < CLOSE


# Two q/k heads, or fewer, of layers that four processes divide.
GROUPED = (
    "gdn",
    "retnet",
    "pkda",
    "deltaproduct",
    "longhorn-elementwise",
    "gla",
    "gka",
    "mesa",
    "lattice",
    "vla",
    "rls",
)


@pytest.mark.parametrize("mixer", [
    *({"name": name, "num_v_heads": 8} for name in GROUPED),
    {"name": "gka", "num_v_heads": 8, "sketch": 4},
    {"name": "gdn", "num_v_heads": 8, "learn_write_key": True},
    {"name": "comba", "num_v_heads": 8},
], ids=str)  # fmt: skip
def test_parts_share_the_heads_of_queries_and_keys(mixer):
    assert error_of_last(config(mixer, num_heads=2), 4) < CLOSE


@pytest.mark.parametrize(("mixer", "count"), [
    ({"name": "softmax", "num_kv_heads": 1}, 2), ({"name": "softmax", "num_kv_heads": 2}, 4),
    ({"name": "mamba2", "num_groups": 1, "bias": True}, 2), ({"name": "mamba2", "num_groups": 2, "norm_groups": 2}, 4),
    ({"name": "mamba2", "num_groups": 2, "norm_groups": 4}, 2), ({"name": "palimpsa-m", "output_gate": None}, 4),
    ({"name": "palimpsa-m", "variance_gate": True, "metaplastic_threshold": 2.0}, 2),
    (["rwkv7", {"name": "rwkv7", "value_residual": True}], 2),
], ids=str)  # fmt: skip
def test_options_that_concern_several_heads(mixer, count):
    assert error_of_last(config(mixer), count) < CLOSE


def test_options_that_count_heads_are_divided():
    whole = config([{"name": "gdn", "num_v_heads": 8}, {"name": "softmax", "num_kv_heads": 2}], intermediate_size=96)
    part = part_of_config(whole, 2)
    assert (part.num_heads, part.intermediate_size, part.hidden_size) == (2, 48, 64)
    assert part.mixers() == [
        ("gdn", {"num_v_heads": 4, "head_dim": 16}),
        ("softmax", {"num_kv_heads": 1, "head_dim": 16}),
    ]
    assert whole.num_heads == 4 and whole.mixer_of(0)[1] == {"num_v_heads": 8}
    check_parts(whole, 2)
    layout = {"softmax_layers": [1], "softmax_options": {"num_kv_heads": 2}}
    hybrid = FastWeightsConfig(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=4,
        mixer={"name": "gdn", "num_v_heads": 8},
        **layout,
    )
    assert part_of_config(hybrid, 2).mixers() == part.mixers()


@pytest.mark.parametrize(
    ("mixer", "sizes", "message"),
    [
        (
            "gdn",
            {"num_heads": 1},
            "mixer of layer 0: num_heads must be a multiple of the number of tensor-parallel proc",
        ),
        (
            "gdn",
            {"intermediate_size": 97},
            "intermediate_size must be a multiple of the number of .* processes, 2, got 97",
        ),
        (
            {"name": "gdn", "num_v_heads": 6},
            {"num_heads": 3, "hidden_size": 48},
            "num_heads must be a multiple or a divisor of the number",
        ),
        (
            {"name": "mamba2", "norm_groups": 3, "head_dim": 12},
            {},
            "norm_groups must be a multiple or a divisor of the",
        ),
    ],
)
def test_sizes_that_cannot_be_divided_are_refused(mixer, sizes, message):
    with pytest.raises(ValueError, match=message):
        check_parts(config(mixer, **sizes), 2)


def test_a_wrong_part_of_the_weights_is_found(monkeypatch):
    take = Division.take
    monkeypatch.setattr(Division, "take", lambda division, x, rank: take(division, x, 0))
    with pytest.raises(ValueError, match="the heads of gdn cannot be divided among 2 processes: the outputs .* add up"):
        check_parts(config("gdn"), 2)


def test_sections_are_divided_one_by_one():
    weight, division = torch.arange(16).view(8, 2), Division(0, ((4, 1), (2, 1), (2, 2)), 4)
    taken = [division.take(weight, rank) for rank in range(4)]
    assert [x[:, 0].tolist() for x in taken] == [[0, 8, 12, 14], [2, 8, 12, 14], [4, 10, 12, 14], [6, 10, 12, 14]]
    assert not division.is_contiguous and not Division(0, ((2, 1),), 4).is_contiguous
    assert Division(0, ((4, 1),), 4).is_contiguous
    assert Division(None, (), 2).take(weight, 1) is weight


def test_dimensions_of_parameters():
    divisions = find_divisions(config(["gdn", {"name": "softmax", "num_kv_heads": 1}]), 2)
    dims = {name: division.dim for name, division in divisions.items()}
    first, second = ({name[21:]: dim for name, dim in dims.items() if name[13] == number} for number in "01")
    assert {first[f"qkv.{name}"] for name in ("q_proj.weight", "k_conv.weight", "v_proj.weight")} == {0}
    assert first["decay.A_log"] == 0 and first["output.norm.weight"] is None and first["output.o_proj.weight"] == 1
    assert second["q_proj.weight"] == 0 and second["k_proj.weight"] is None
    assert dims["model.layers.0.mlp.gate_proj.weight"] == 0 and dims["model.layers.0.mlp.down_proj.weight"] == 1
    assert dims["model.embed_tokens.weight"] is dims["model.norm.weight"] is dims["lm_head.weight"] is None


@torch.no_grad()
def test_a_whole_model_in_two_parts():
    whole = config(["mamba2", "retnet", "vla", {"name": "softmax", "num_kv_heads": 1}, "gdn"], intermediate_size=96)
    model = FastWeightsForCausalLM(whole).double().eval()
    for x in model.parameters():
        x.add_(0.1 * torch.randn_like(x))
    divisions, meeting, bodies = find_divisions(whole, 2), Meeting(2), []
    for rank in range(2):
        part = FastWeightsForCausalLM(part_of_config(whole, 2)).double().eval()
        part.load_state_dict({name: divisions[name].take(x, rank) for name, x in model.state_dict().items()})
        take_parts([one.mixer for one in part.model.layers], whole, rank, 2, partial(meeting.gather, rank))
        bodies.append(part.model)
    ids = torch.randint(64, (2, 20))
    x = bodies[0].embed_tokens(ids)
    for blocks in zip(*(body.layers for body in bodies), strict=True):
        x = x + sum(meeting.run([partial(block.mixer, block.mixer_norm(x)) for block in blocks]))
        x = x + sum(block.mlp(block.mlp_norm(x)) for block in blocks)
    torch.testing.assert_close(bodies[0].norm(x), model.model(ids).last_hidden_state, rtol=1e-10, atol=1e-10)


class Joined(Mixer):
    """A mixer of a user's own: one matrix for values and gates, heads whose sizes depend on their numbers."""

    part = HeadPart()

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int | None = None) -> None:
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.channels = num_heads * (head_dim or hidden_size // num_heads)
        self.both = nn.Linear(hidden_size, 2 * self.channels)
        self.out = nn.Linear(self.channels, hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cache: Any = None, cu_seqlens: Any = None) -> Tensor:
        v, gate = self.both(x_BTD).chunk(2, -1)
        number = self.part.rank * self.num_heads + torch.arange(self.num_heads, dtype=v.dtype)
        return self.out((v.unflatten(2, (self.num_heads, -1)) * number[:, None]).flatten(2) * gate)


class JoinedInSections(Joined):
    def sections(self) -> dict[str, list[int]]:
        return {"both": [self.channels, self.channels]}


class Biased(SoftmaxAttention):
    def forward(self, *inputs: Any, **more: Any) -> Tensor:
        return super().forward(*inputs, **more) + 1


def test_mixers_of_users_say_how_they_are_divided_or_are_refused(monkeypatch):
    monkeypatch.setattr(registry._REGISTRY, "specs", dict(registry._REGISTRY.specs))
    text = {"summary": "a test", "equation": "none", "source": "a test", "state": "none"}
    for name, layer in {"joined": Joined, "sections": JoinedInSections, "biased": Biased}.items():
        register_mixer(name, layer=layer, **text)
    check_parts(config("sections"), 4)
    for name in ("joined", "biased"):
        with pytest.raises(ValueError, match=f"the heads of {name} cannot be divided among 2 processes: the outputs"):
            check_parts(config(name), 2)


def test_the_shapes_of_states_need_no_other_process():
    def refuse(x):
        raise AssertionError("gathered")

    for name in ("vla", "mamba2"):
        (mixer,) = (one.mixer for one in FastWeightsForCausalLM(part_of_config(config(name), 2)).model.layers)
        take_parts([mixer], config(name), 1, 2, refuse)
        assert mixer.state_spec().memory
        with pytest.raises(AssertionError, match="gathered"):
            mixer(torch.randn(1, 2, 64))


def test_a_part_that_fails_ends_the_others(monkeypatch):
    monkeypatch.setattr(parts, "PATIENCE", 0.1)
    meeting = Meeting(2)

    def fail() -> Tensor:
        raise ValueError("no")

    with pytest.raises((ValueError, RuntimeError)):
        meeting.run([fail, partial(meeting.gather, 1, torch.ones(1))])
