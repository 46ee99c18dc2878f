"""Bad input is refused before any work, by a message that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ..cases import OpCase


def call(case: OpCase, **changed: Any) -> None:
    case.op(**{**case.draw(time=6).arguments(), **changed})


def names(case: OpCase, *kinds: str) -> list[str]:
    return [name for name, kind in case.tokens.items() if kind in kinds]


def test_positive_decay(case: OpCase) -> None:
    for name in names(case, "decay", "slow decay", "channel decay"):
        g = case.draw(time=6).tokens[name].clone()
        g[0, 3, 1] = 0.5
        with pytest.raises(ValueError, match=rf"^{name} must be a log decay, at most 0, got 0.5"):
            call(case, **{name: g})


def test_shapes(case: OpCase) -> None:
    for name, x in case.draw(time=6).tokens.items():
        narrower = () if case.tokens[name].endswith("value") or len(names(case, "query", "key")) < 2 else (x[..., :-1],)
        for bad in (x[:, :5], x[:1], x[..., None], x[0], *narrower):
            with pytest.raises(ValueError, match=r"must (have|be)"):
                call(case, **{name: bad})


def test_wrong_dtypes(case: OpCase) -> None:
    for name, x in {**case.draw(time=6).tokens, **case.draw().parameters}.items():
        with pytest.raises(ValueError, match=rf"{name} must be float16"):
            call(case, **{name: (10 * x).long()})
        with pytest.raises(TypeError, match=rf"{name} must be a"):
            call(case, **{name: [1.0]})
    for name in names(case, "key", "value")[-1:]:
        if len(names(case, "query", "key", "value")) > 1:
            with pytest.raises(ValueError, match="must have the dtype of"):
                call(case, **{name: case.draw(time=6).tokens[name].float()})


def test_devices(case: OpCase) -> None:
    for name, x in list(case.draw(time=6).tokens.items())[1:]:
        with pytest.raises(ValueError, match=rf"{name} must be on the device"):
            call(case, **{name: x.to("meta")})


def test_heads_that_do_not_divide(case: OpCase) -> None:
    inputs = case.draw(time=6, heads=2, value_heads=3)
    if all(kind in ("query", "key") for kind in case.tokens.values()):
        pytest.skip("nothing has other heads")
    with pytest.raises(ValueError, match="heads"):
        case.op(**inputs.arguments())


def test_too_many_channels(case: OpCase) -> None:
    with pytest.raises(ValueError, match="1 to 256 channels"):
        case.op(**case.draw(time=1, key=257, value=257).arguments())


def test_states(case: OpCase) -> None:
    _, states = case(case.draw(time=6))
    for index, state in enumerate(states):
        for bad in (state[:1], state[:, :1], state[..., :-1]) if state.ndim > 1 else (state[:1], state.float()):
            given = case.initial_state(tuple(bad if i == index else s for i, s in enumerate(states)))
            with pytest.raises(ValueError, match="initial_state"):
                call(case, initial_state=given)
    with pytest.raises(ValueError, match=r"initial_state must be \("):
        call(case, initial_state=(*states, states[0]))
    with pytest.raises(TypeError, match="initial_state"):
        call(case, initial_state=(1.0,) * len(states))


@pytest.mark.parametrize(
    ("cu_seqlens", "message"),
    [
        (torch.tensor([0, 3, 5]), "rise from 0 to the length 6"),
        (torch.tensor([1, 6]), "rise from 0"),
        (torch.tensor([0, 4, 3, 6]), "rise from 0"),
        (torch.tensor([0.0, 6.0]), "int32 or int64"),
        (torch.tensor([[0, 6]]), "int32 or int64"),
        (torch.tensor([0]), "N >= 1"),
    ],
)
def test_cu_seqlens(case: OpCase, cu_seqlens: torch.Tensor, message: str) -> None:
    one_row = case.draw(batch=1, time=6).arguments()
    with pytest.raises(ValueError, match=message):
        case.op(**one_row, cu_seqlens=cu_seqlens)


def test_packing_needs_one_row_and_a_tensor(case: OpCase) -> None:
    with pytest.raises(ValueError, match="the batch must be 1, got 2"):
        call(case, cu_seqlens=torch.tensor([0, 6]))
    with pytest.raises(TypeError, match="cu_seqlens must be an integer tensor"):
        call(case, cu_seqlens=[0, 6])


def test_backends(case: OpCase) -> None:
    with pytest.raises(ValueError, match="backend must be one of auto, reference, torch, triton, got 'cuda'"):
        call(case, backend="cuda")
    refusal = "in float32|package triton|CUDA device" if case.has_kernels else "backend 'triton'( is missing|, whose)"
    with pytest.raises(ValueError, match=refusal):
        call(case, backend="triton")


def test_misspelt_option(case: OpCase) -> None:
    with pytest.raises(TypeError, match="initial_sate"):
        call(case, initial_sate=None)


def test_flag(case: OpCase) -> None:
    with pytest.raises(TypeError, match="output_final_state must be True or False"):
        call(case, output_final_state=1)


def test_scale(case: OpCase) -> None:
    import inspect

    if "scale" not in inspect.signature(case.op).parameters:
        pytest.skip("the rule has no scale")
    with pytest.raises(ValueError, match="scale must be a finite number"):
        call(case, scale=float("nan"))
    with pytest.raises(TypeError, match="scale must be a number"):
        call(case, scale="big")
    inputs = case.draw(time=6)
    o, _ = case(inputs, scale=0.25)
    plain, _ = case(inputs, scale=1.0)
    torch.testing.assert_close(o, 0.25 * plain)
