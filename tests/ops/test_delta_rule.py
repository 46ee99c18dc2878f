"""The delta rule: a write corrects the memory's answer to its key, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import delta_rule, linear_attention
from fastweights.testing import CASES

backends = pytest.mark.parametrize("backend", ["reference", "torch"])
EXACT = {"rtol": 1e-10, "atol": 1e-11}


def draw(form: str = "none", **sizes: int) -> dict[str, Tensor]:
    return dict(CASES[f"delta_rule-{form}"].draw(**sizes).tokens)


def draw_state(heads: int = 2) -> Tensor:
    return torch.randn(2, heads, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def numbers(*rows: object) -> Tensor:
    """One sequence and one head: [1, T, 1, ...]."""
    return torch.tensor(rows, dtype=torch.float64)[None, :, None]


def run(x: dict[str, Tensor], backend: str, **options: object) -> tuple[Tensor, Tensor]:
    o, S = delta_rule(**x, output_final_state=True, backend=backend, **options)
    assert S is not None
    return o, S


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    x = {
        "q": numbers([1.0, 1.0], [1.0, 0.0]),
        "k": numbers([1.0, 0.0], [0.0, 2.0]),
        "v": numbers([6.0], [1.0]),
        "beta": numbers(0.5, 0.25),
    }
    start = torch.tensor([[[[4.0], [8.0]]]], dtype=torch.float64)

    def expect(o: tuple[float, float], S: tuple[float, float], **more: Tensor) -> None:
        got = run({**x, **more}, backend, scale=1.0, initial_state=start)
        wanted = numbers(*([y] for y in o)), torch.tensor(S, dtype=torch.float64)[None, None, :, None]
        torch.testing.assert_close(got, wanted)

    # (4, 8) answers 4 to key 1 and is corrected to (5, 8); this answers 16 and is corrected by 0.25 * -15 * (0, 2)
    expect((13.0, 5.0), (5.0, 0.5))
    # halved first: (2, 4) answers 2 -> (4, 4); (2, 2) answers 4 -> 0.25 * -3 * (0, 2)
    expect((8.0, 2.0), (2.0, 0.5), g=numbers(math.log(0.5), math.log(0.5)))
    # channel 1 is halved, channel 2 forgotten: (2, 0) -> (4, 0); (2, 0) answers 0 -> 0.25 * 1 * (0, 2)
    expect((4.0, 2.0), (2.0, 0.5), g=numbers(*[[math.log(0.5), -math.inf]] * 2))
    # the same errors 2 and -15 written along other keys: (4, 8) + (1, 3), then (5, 11) answers 22: 0.25 * -21 * (4, 0)
    expect((16.0, -16.0), (-16.0, 11.0), write_key=numbers([1.0, 3.0], [4.0, 0.0]))


@backends
@pytest.mark.parametrize("form", ["none", "head", "channel"])
def test_gain_0_writes_nothing(form: str, backend: str) -> None:
    x, start = draw(form, time=70), draw_state()
    x["beta"] = torch.zeros_like(x["beta"])
    g = x.get("g", torch.zeros(2, 70, 2, dtype=torch.float64))
    kept = (g if form == "channel" else g[..., None]).cumsum(1).exp()
    o, S = run(x, backend, scale=1.0, initial_state=start)
    torch.testing.assert_close(o, torch.einsum("bthk,bhkv->bthv", x["q"] * kept, start), **EXACT)
    torch.testing.assert_close(S, kept[:, -1, ..., None] * start, **EXACT)


@backends
def test_gain_1_and_unit_keys_store_the_value(backend: str) -> None:
    x = draw("channel", time=70)
    x["q"], x["beta"] = x["k"], torch.ones_like(x["beta"])
    o, _ = run(x, backend, scale=1.0, initial_state=draw_state())
    torch.testing.assert_close(o, x["v"], **EXACT)


@backends
def test_gain_2_and_unit_keys_reflect_the_memory(backend: str) -> None:
    x, start = draw(time=1), draw_state()
    x["v"], x["beta"] = torch.zeros_like(x["v"]), torch.full_like(x["beta"], 2.0)
    _, S = run(x, backend, initial_state=start)
    k = x["k"][:, 0, :, :, None]
    torch.testing.assert_close(S, start - 2 * k @ (k.mT @ start), **EXACT)
    torch.testing.assert_close(S.norm(dim=(-2, -1)), start.norm(dim=(-2, -1)))


@backends
def test_a_right_answer_is_left_alone(backend: str) -> None:
    x, start = draw("none-write", time=70), draw_state()
    x["v"] = torch.einsum("bthk,bhkv->bthv", x["k"], start)
    _, S = run(x, backend, initial_state=start)
    torch.testing.assert_close(S, start, **EXACT)


@backends
@pytest.mark.parametrize("form", ["none", "head", "channel"])
def test_the_key_as_write_key_changes_nothing(form: str, backend: str) -> None:
    x = draw(form, time=70)
    torch.testing.assert_close(run({**x, "write_key": x["k"]}, backend), run(x, backend), **EXACT)
    per_value_head = draw(form, time=70, value_heads=4)
    write_key = per_value_head["k"].repeat_interleave(2, 2)
    torch.testing.assert_close(
        run({**per_value_head, "write_key": write_key}, backend), run(per_value_head, backend), **EXACT
    )


@backends
def test_a_write_is_of_rank_one_along_the_write_key(backend: str) -> None:
    x, start = draw("none-write", time=1), draw_state()
    _, S = run(x, backend, initial_state=start)
    k, v, w, beta = x["k"][:, 0], x["v"][:, 0], x["write_key"][:, 0], x["beta"][:, 0]
    error = v - torch.einsum("bhk,bhkv->bhv", k, start)
    torch.testing.assert_close(S - start, w[..., None] * (beta[..., None] * error)[..., None, :], **EXACT)


@backends
def test_a_write_key_orthogonal_to_the_key_leaves_the_answer(backend: str) -> None:
    x, start = draw("none-write", time=70), draw_state()
    x["k"] = torch.ones_like(x["k"])
    x["write_key"] = x["write_key"] - x["write_key"].mean(-1, keepdim=True)
    _, S = run(x, backend, initial_state=start)
    torch.testing.assert_close(S.sum(-2), start.sum(-2), **EXACT)
    assert (S - start).norm() > 1


@backends
def test_orthonormal_keys_are_linear_attention(backend: str) -> None:
    """None of them finds anything to correct."""
    x = draw("head", time=8)
    x["k"] = torch.eye(8, dtype=torch.float64)[None, :, None].expand(2, 8, 2, 8)
    wanted = linear_attention(x["q"], x["k"], x["beta"][..., None] * x["v"], x["g"], output_final_state=True)
    torch.testing.assert_close(run(x, backend), wanted, **EXACT)


@backends
def test_equal_decays_of_all_channels_are_one_decay_per_head(backend: str) -> None:
    x = draw("head-write", time=70)
    per_channel = {**x, "g": x["g"][..., None].expand(2, 70, 2, 8)}
    torch.testing.assert_close(run(per_channel, backend), run(x, backend), **EXACT)
    without = {name: y for name, y in x.items() if name != "g"}
    torch.testing.assert_close(run({**x, "g": torch.zeros_like(x["g"])}, backend), run(without, backend), **EXACT)


@backends
@pytest.mark.parametrize("form", ["head", "channel"])
def test_decay_0_leaves_the_current_token(form: str, backend: str) -> None:
    x = draw(f"{form}-write", time=70)
    x["g"] = torch.full_like(x["g"], -math.inf)
    o, S = run(x, backend, scale=1.0, initial_state=draw_state())
    written = x["beta"][..., None] * x["v"]
    torch.testing.assert_close(o, (x["q"] * x["write_key"]).sum(-1, keepdim=True) * written, **EXACT)
    torch.testing.assert_close(S, x["write_key"][:, -1, :, :, None] * written[:, -1, :, None], **EXACT)


@backends
def test_one_token_many_times_is_learned_at_a_geometric_rate(backend: str) -> None:
    """What is missing shrinks by 1 - beta with every repetition."""
    once = draw(time=1)
    x = {name: y.expand(-1, 70, *y.shape[2:]) for name, y in once.items()}
    x["q"] = x["k"]
    o, _ = run(x, backend, scale=1.0)
    missing = (1 - x["beta"]) ** torch.arange(1, 71)[:, None]
    torch.testing.assert_close(o, (1 - missing)[..., None] * x["v"], **EXACT)


@backends
def test_a_key_head_serves_the_value_heads_beside_each_other(backend: str) -> None:
    x = draw("channel-write", time=20, heads=2, value_heads=6)
    o, S = run(x, backend)
    assert o.shape == (2, 20, 6, 6) and S.shape == (2, 6, 8, 6)
    for head, key_head in enumerate([0, 0, 0, 1, 1, 1]):
        own = {n: y[:, :, [key_head if n in ("q", "k", "write_key") else head]] for n, y in x.items()}
        torch.testing.assert_close((o[:, :, [head]], S[:, [head]]), run(own, backend), **EXACT)


@backends
def test_scale_is_on_the_query_alone(backend: str) -> None:
    x, start = draw("head-write", time=20), draw_state()
    o, S = run(x, backend, initial_state=start)
    scaled, same = run(x, backend, initial_state=start, scale=2.0)
    torch.testing.assert_close((scaled, same), (o * 2 * 8**0.5, S), **EXACT)
