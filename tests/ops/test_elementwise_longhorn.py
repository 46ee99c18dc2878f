"""Elementwise Longhorn: the regression that an element solves, its limits, and what the backward keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fastweights.ops import delta_rule, elementwise_longhorn
from fastweights.ops.elementwise_longhorn import inside
from fastweights.testing import CASES
from tests.kernels.cases import DEVICE

CASE = CASES["elementwise_longhorn"]
backends = pytest.mark.parametrize("backend", ["reference", "torch"])


@backends
def test_two_tokens_by_hand(backend: str) -> None:
    """K = 2, V = 1: e = beta / (1 + beta |k|^2) is 1/2 / (1 + 1/2 * 5) = 1/7, then 2 / (1 + 2 * 1) = 2/3."""
    numbers = {
        "q": [[1.0, 3.0], [1.0, 3.0]],
        "k": [[1.0, 2.0], [0.0, -1.0]],
        "v": [[7.0], [3.0]],
        "beta": [[0.5], [2.0]],
    }
    inputs = {name: torch.tensor(x, dtype=torch.float64)[None, :, None] for name, x in numbers.items()}
    o, S = elementwise_longhorn(**inputs, scale=1.0, output_final_state=True, backend=backend)
    # S_1 = k e v = (1, 2); S_2 = (1, 2 (1 - 2/3) - 2/3 * 3) = (1, -4/3)
    torch.testing.assert_close(o.flatten().tolist(), [1.0 + 6.0, 1.0 - 4.0])
    assert S is not None
    torch.testing.assert_close(S.flatten().tolist(), [1.0, 2 / 3 - 2.0])


@backends
@pytest.mark.parametrize("lengths", [[150], [3, 64, 0, 65]], ids=["one", "packed"])
def test_is_the_printed_update_at_every_element(backend: str, lengths: list[int]) -> None:
    inputs = CASE.draw(batch=1, time=sum(lengths), heads=2, value_heads=4, key=3, value=2).tokens
    q, k, v, beta = (inputs[name] for name in ("q", "k", "v", "beta"))
    start = torch.randn(len(lengths), 4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    o, final = elementwise_longhorn(
        q, k, v, beta, initial_state=start, output_final_state=True, backend=backend,
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0),
    )  # fmt: skip
    edges = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
    for sequence, S in enumerate(start.clone()):
        for t in range(edges[sequence], edges[sequence + 1]):
            for head in range(4):
                key = k[0, t, head // 2]
                for row in range(3):
                    for column in range(2):
                        gain = beta[0, t, head, column] / (1 + beta[0, t, head, column] * key.dot(key))
                        error = v[0, t, head, column] - key[row] * S[head, row, column]
                        S[head, row, column] += gain * key[row] * error
                torch.testing.assert_close(o[0, t, head], q[0, t, head // 2] @ S[head] / 3**0.5)
        torch.testing.assert_close(final[sequence], S)


@backends
def test_one_key_channel_is_longhorn(backend: str) -> None:
    inputs = CASE.draw(time=70, key=1, value=1).tokens
    gain = (inputs["beta"] / (1 + inputs["beta"] * inputs["k"].square()))[..., 0]
    wanted, _ = delta_rule(inputs["q"], inputs["k"], inputs["v"], gain)
    torch.testing.assert_close(elementwise_longhorn(**inputs, backend=backend)[0], wanted, rtol=1e-10, atol=1e-12)


@backends
def test_long_keys_keep_the_decay_in_its_bounds(backend: str) -> None:
    """1 - k^2 e would lose all digits in float32: of keys of length 1e5 a channel that others outweigh keeps nearly all."""
    k = torch.tensor([1e5, 1.0]).expand(1, 100, 1, 2)
    beta = torch.ones(1, 100, 1, 1)
    start = torch.ones(1, 1, 2, 1)
    _, S = elementwise_longhorn(k, k, 0 * beta, beta, initial_state=start, output_final_state=True, backend=backend)
    assert S is not None and S[0, 0, 0, 0] == pytest.approx(0, abs=1e-6)
    assert S[0, 0, 1, 0] == pytest.approx((1 - 1e-10) ** 100, abs=2e-5)


def test_memory_is_kept_by_the_chunk() -> None:
    """The graph holds less than half of what one memory per token would be, most of it vectors of tokens."""
    inputs = CASE.draw(batch=1, time=1024, heads=1, key=64, value=64, dtype=torch.float32).map(Tensor.requires_grad_)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        elementwise_longhorn(**inputs.tokens)
    assert 0 < sum(kept.values()) < 1024 * 64 * 64 * 4 / 2


def test_blocks_of_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = CASE.draw(time=200)
    results = []
    for numbers in (inside.HISTORY["cpu"], 1, 3 * 64 * 8 * 6):
        monkeypatch.setattr(inside, "STATES", {"cpu": numbers})
        monkeypatch.setattr(inside, "HISTORY", {"cpu": numbers})
        leaves = inputs.map(lambda x: x.clone().requires_grad_()).tokens
        o, S = elementwise_longhorn(**leaves, output_final_state=True)
        assert S is not None
        results.append([o, S, *torch.autograd.grad(o.sin().sum() + S.cos().sum(), list(leaves.values()))])
    for other in results[1:]:
        torch.testing.assert_close(other, results[0], rtol=1e-12, atol=1e-13)


def test_refused_arguments() -> None:
    tokens = CASE.draw(time=5).tokens
    with pytest.raises(ValueError, match="beta must be at least 0, got -1 at its smallest"):
        elementwise_longhorn(**{**tokens, "beta": -torch.ones_like(tokens["beta"])})
    with pytest.raises(ValueError, match="beta must have shape"):
        elementwise_longhorn(**{**tokens, "beta": tokens["beta"][..., 0]})


# The kernel of a few tokens, on a GPU or in Triton's interpreter


def few_tokens(batch: int, time: int) -> dict[str, Tensor]:
    return {
        name: x.float().to(DEVICE)
        for name, x in CASE.draw(batch=batch, time=time, heads=1, value_heads=2, key=12, value=40).tokens.items()
    }


def first_states(count: int) -> Tensor:
    return torch.randn(count, 2, 12, 40, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def by_kernel(x: dict[str, Tensor], S: Tensor, edges: Tensor | None = None, rows: Tensor | None = None) -> Tensor:
    """o; S is overwritten."""
    return elementwise_longhorn.in_place(**x, state=S, state_indices=rows, cu_seqlens=edges, backend="triton")


def token_by_token(x: dict[str, Tensor], S: Tensor, edges: list[int] | None = None) -> tuple[Tensor, Tensor | None]:
    return elementwise_longhorn(
        **{name: y.cpu().double() for name, y in x.items()}, initial_state=S.cpu().double(), output_final_state=True,
        backend="reference", cu_seqlens=None if edges is None else torch.tensor(edges),
    )  # fmt: skip


@pytest.mark.kernels
@pytest.mark.parametrize("edges", [None, [0, 2, 2, 3]], ids=["rows", "packed"])
def test_kernel_of_few_tokens(edges: list[int] | None) -> None:
    x, S = few_tokens(2 if edges is None else 1, 3), first_states(2 if edges is None else 3)
    wanted, final = token_by_token(x, S, edges)
    again, places = S.clone(), None if edges is None else torch.tensor(edges, device=DEVICE)
    o = by_kernel(x, S, places)
    torch.testing.assert_close((o.cpu().double(), S.cpu().double()), (wanted, final), rtol=1e-5, atol=1e-5)
    assert torch.equal(by_kernel(x, again, places), o) and torch.equal(again, S)


@pytest.mark.kernels
def test_kernel_on_rows_of_a_pool() -> None:
    """Outputs and states of its own call to the last bit; a sequence without a row answers zeros, other rows stay."""
    x, S, rows = few_tokens(3, 1), first_states(3), torch.tensor([4, -1, 1], device=DEVICE, dtype=torch.int32)
    pool = torch.full((6, 2 * 12 * 40 + 16), 7.0, device=DEVICE)[:, : 2 * 12 * 40].view(6, 2, 12, 40)
    pool[[4, 1]] = S[[0, 2]]
    wanted = by_kernel(x, S)
    wanted[1] = 0
    assert torch.equal(by_kernel(x, pool, rows=rows), wanted)
    assert torch.equal(pool[[4, 1]], S[[0, 2]]) and bool((pool[[0, 2, 3, 5]] == 7).all())


@pytest.mark.kernels
@pytest.mark.parametrize("where", ["q", "k", "v", "beta"])
def test_kernel_keeps_bad_numbers_where_they_belong(where: str) -> None:
    x, S = few_tokens(1, 3), first_states(1)
    x[where][0, 1, 0, 0] = math.nan
    wanted, final = token_by_token(x, S)
    assert final is not None
    assert torch.equal(by_kernel(x, S).isnan().cpu(), wanted.isnan()) and torch.equal(S.isnan().cpu(), final.isnan())
