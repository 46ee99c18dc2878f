"""The forward in one pass over the chunks: its algebra, step by step in float64, and which calls take it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.kernels.chunk.one_pass.launches import MOST_LOST, segments_kept
from fastweights.ops import delta_rule, linear_attention, preconditioned_delta_rule
from tests.fast_set import fast_where
from tests.ops.kernel_launches import Compilation, recorded

from .described_gpu import on_hopper_in
from .scoreboards import register_hazards

SCALE = 0.3


def solve_chunk(q: Tensor, k: Tensor, w: Tensor, beta: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """T, P, and what remains at each token of the chunk's start, and at its end of each token. g [tokens, 1 or channels]."""
    A = (beta[:, None] * ((k[:, None] * w) * pair_decays(g)).sum(2)).tril(-1)
    P = SCALE * ((q[:, None] * w) * pair_decays(g)).sum(2)
    G = g.cumsum(0)
    return inverse_by_blocks(A), P, G.exp(), (G[-1] - G).exp()


def pair_decays(g: Tensor) -> Tensor:
    """[tokens, tokens, 1 or channels]"""
    G = g.cumsum(0)
    later = torch.ones(len(G), len(G), dtype=torch.bool).tril()[:, :, None]
    return torch.where(later, G[:, None] - G, -torch.inf).exp()


def inverse_by_blocks(A: Tensor) -> Tensor:
    """(I + A)^-1 as `inverse_transposed` and `blocks_inverse` compute it."""
    size = A.shape[0]
    block = torch.arange(size) // 16
    own = block[:, None] == block[None, :]
    X = torch.eye(size, dtype=A.dtype)
    for row in range(size):  # a row is solved once those before it in its block are taken from it
        X = X - (A * own)[:, row, None] * X[None, row]
    N = X @ (A * ~own)
    T = X.clone()
    for b in range(1, -(-size // 16)):
        rows = slice(16 * b, 16 * b + 16)
        T[rows] -= N[rows, : 16 * b] @ T[: 16 * b]
    return T


class Chunk(NamedTuple):
    """A chunk of one head, and what `solve_chunk` finds."""

    q: Tensor
    k: Tensor
    w: Tensor
    v: Tensor
    beta: Tensor
    g: Tensor
    T: Tensor
    P: Tensor
    since: Tensor
    until: Tensor

    def read(self, S: Tensor) -> Tensor:
        """What the queries read of S [V, K], as the kernels hold it, at the chunk's start."""
        return SCALE * S @ (self.since * self.q).T

    def after(self, S: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """u^T, and S after the chunk."""
        x = v.T - S @ (self.since * self.k).T
        u = x @ (self.T * self.beta).T
        return u, self.since[-1] * S + u @ (self.until * self.w)

    def before(self, dS: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
        """z^T, and the gradient [V, K] of the state at the chunk's start from that at its end."""
        du = dS @ (self.until * self.w).T + do.T @ self.P
        z = du @ self.T
        return z, self.since[-1] * dS + SCALE * do.T @ (self.since * self.q) - (z * self.beta) @ (self.since * self.k)

    def gradients(self, u: Tensor, z: Tensor, do: Tensor, S: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
        """Those of q, k, w, v, beta and g. S, dS [V, K] at the chunk's start and end."""
        pairs = pair_decays(self.g)
        dP, dA = SCALE * (do @ u.T)[:, :, None] * pairs, -(z @ u.T).tril(-1)[:, :, None] * pairs
        dq = (do @ S) * self.since * SCALE + (dP * self.w).sum(1)
        dk = (dA * self.w).sum(1) - (z @ S) * self.since
        dw = (u @ dS) * self.until
        last = self.since[-1] * (S * dS).sum(0) + (dw * self.w).sum(0)
        beta = self.beta[:, None]
        dw = dw + (dP * self.q[:, None]).sum(0) + (dA * (beta * self.k)[:, None]).sum(0)
        dG = self.q * dq + beta * self.k * dk - self.w * dw
        dG[-1] += last
        dg = dG.flip(0).cumsum(0).flip(0).sum(1)
        return dq, beta * dk, dw, beta * z, (z * self.v).sum(1) + (self.k * dk).sum(1), dg


class ChunkOfChannels(Chunk):
    """With one decay per channel: everything decays from or to the middle of the chunk."""

    @property
    def middle(self) -> Tensor:
        return self.g.sum(0).clamp_min(-MOST_LOST * math.log(2)) / 2

    @property
    def scaled(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and write keys."""
        G = self.g.cumsum(0)
        since, until = (G - self.middle).exp(), (G[-1] - self.middle - G).exp()
        return SCALE * since * self.q, since * self.k, until * self.w

    def read(self, S: Tensor) -> Tensor:
        return self.middle.exp() * S @ self.scaled[0].T

    def after(self, S: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        _, k, w = self.scaled
        S = self.middle.exp() * S
        u = (v.T - S @ k.T) @ (self.T * self.beta).T
        return u, self.middle.exp() * (S + u @ w)

    def before(self, dS: Tensor, do: Tensor) -> tuple[Tensor, Tensor]:
        q, k, w = self.scaled
        dS = self.middle.exp() * dS
        z = (dS @ w.T + do.T @ self.P) @ self.T
        return z, self.middle.exp() * (dS + do.T @ q - (z * self.beta) @ k)

    def gradients(self, u: Tensor, z: Tensor, do: Tensor, S: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
        q, k, w = self.scaled
        S, dS, beta = self.middle.exp() * S, self.middle.exp() * dS, self.beta[:, None]
        dP, dA = (do @ u.T).tril(), -(z @ u.T).tril(-1)
        last = (S * dS).sum(0) + (u @ dS * w).sum(0)
        dq, dk, dw = do @ S + dP @ w, dA @ w - z @ S, u @ dS + dP.T @ q + (beta * dA).T @ k
        dG = q * dq + beta * k * dk - w * dw
        dg = dG.flip(0).cumsum(0).flip(0) + last
        since = (self.g.cumsum(0) - self.middle).exp()
        return SCALE * since * dq, since * beta * dk, dw / since, beta * z, (z * self.v).sum(1) + (k * dk).sum(1), dg


def split(*tokens: Tensor) -> list[Chunk]:
    """Of one head's q, k, w, v, beta and g [tokens] or [tokens, channels]."""
    tokens = (*tokens[:5], tokens[5].reshape(len(tokens[5]), -1))
    kind = Chunk if tokens[5].shape[1] == 1 else ChunkOfChannels
    chunks = zip(*(x.split(64) for x in tokens))
    return [kind(q, k, w, v, beta, g, *solve_chunk(q, k, w, beta, g)) for q, k, w, v, beta, g in chunks]


def segments(chunks: list[Chunk], length: int) -> list[range]:
    return [range(i, min(i + length, len(chunks))) for i in range(0, len(chunks), length)]


def transition(chunks: list[Chunk], part: range) -> Tensor:
    """What a segment does to a state [V, K], from the right."""
    through = torch.eye(128, dtype=torch.float64)
    for i in part:
        _, through = chunks[i].after(through, torch.zeros_like(chunks[i].k))
    return through


def segments_needed(transitions: list[Tensor]) -> int:
    """Of the segments before a place, the nearest first, how many its state is found from."""
    through, needed = 1.0, 1
    for i, T in enumerate(transitions):
        through *= T.abs().sum(1).max().item()
        needed = i + 2 if through >= 2.0**-126 else needed
    return min(needed, len(transitions))


def forward(chunks: list[Chunk], S: Tensor, length: int) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """One head; S [V, K]. o, the state after the last chunk, u of every chunk and the states at their starts; segments of so
    many chunks."""
    parts = segments(chunks, length)
    starts = [S]
    for part in parts[:-1]:
        R = torch.zeros_like(S)
        for i in part:
            _, R = chunks[i].after(R, chunks[i].v)
        starts.append(starts[-1] @ transition(chunks, part) + R)
    o, us, states = [], [], []
    for part, S in zip(parts, starts):
        for one in (chunks[i] for i in part):
            states.append(S)
            read = one.read(S)
            u, S = one.after(S, one.v)
            us.append(u.T)
            o.append((read + u @ one.P.T).T)
    return torch.cat(o), S, us, states


def backward(chunks: list[Chunk], do: Tensor, dS: Tensor, length: int) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """z of every chunk, the gradients of the states at their ends, and of the first state."""
    grads, parts = do.split(64), segments(chunks, length)
    ends = [dS]
    for part in reversed(parts[1:]):
        R = torch.zeros_like(dS)
        for i in reversed(part):
            _, R = chunks[i].before(R, grads[i])
        ends.append(ends[-1] @ transition(chunks, part).T + R)
    zs: list[Tensor] = []
    found: list[Tensor] = []
    for part, dS in zip(parts, reversed(ends)):
        of_part = []
        for i in reversed(part):
            z, before = chunks[i].before(dS, grads[i])
            of_part.append((z.T, dS))
            dS = before
        zs += [z for z, _ in reversed(of_part)]
        found += [end for _, end in reversed(of_part)]
        if part.start == 0:
            first = dS
    return zs, found, first


def draw(time: int, heads: int = 1, value_heads: int = 1) -> tuple[Tensor, ...]:
    torch.manual_seed(time)
    q, k = (F.normalize(torch.randn(1, time, heads, 128, dtype=torch.float64), dim=-1) for _ in range(2))
    v = torch.randn(1, time, value_heads, 128, dtype=torch.float64)
    beta, g = (torch.rand(1, time, value_heads, dtype=torch.float64) for _ in range(2))
    return q, k, v, beta, -g


def call(rule: str, leaves: dict[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    op: Any = delta_rule
    if rule == "linear attention":
        op, leaves = linear_attention, {name: leaves[name] for name in "qkvg"}
    o, end = op(**leaves, scale=SCALE, initial_state=S, output_final_state=True, backend="reference")
    assert end is not None
    return o, end


def draw_rule(rule: str, time: int) -> tuple[dict[str, Tensor], list[str], Tensor]:
    """The inputs, which of them chunks take as q, k, w, v, beta and g, and a first state. Linear attention is the delta rule
    whose read keys are 0."""
    leaves = dict(zip(("q", "k", "v", "beta", "g"), draw(time)))
    write = "k"
    if rule == "one decay per channel":
        leaves["g"] = -torch.rand(1, time, 1, 128, dtype=torch.float64)
    elif rule == "write keys":
        leaves["write_key"], write = leaves["k"] * torch.rand_like(leaves["k"]), "write_key"
    return leaves, ["q", "k", write, "v", "beta", "g"], torch.randn(1, 1, 128, 128, dtype=torch.float64)


def chunks_of(rule: str, leaves: dict[str, Tensor], order: list[str]) -> list[Chunk]:
    q, k, w, v, beta, g = (leaves[name][0, :, 0].detach() for name in order)
    if rule == "linear attention":
        k, beta = torch.zeros_like(k), torch.ones_like(beta)
    return split(q, k, w, v, beta, g)


OPS: dict[str, Any] = {
    "delta rule": delta_rule, "write keys": preconditioned_delta_rule, "linear attention": linear_attention,
    "one decay per channel": delta_rule,
}  # fmt: skip
RULES = list(OPS)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("time", [1, 64, 100, 500])
def test_the_algebra(time: int, rule: str) -> None:
    leaves, order, S = draw_rule(rule, time)
    wanted, end = call(rule, leaves, S)
    o, found, _, _ = forward(chunks_of(rule, leaves, order), S[0, 0].T, length=3)
    assert (o - wanted[0, :, 0]).abs().max() < 1e-10
    assert (found.T - end[0, 0]).abs().max() < 1e-10


def test_the_algebra_where_channels_lose_much() -> None:
    leaves, order, S = draw_rule("one decay per channel", 200)
    leaves["g"][..., ::2] *= 8
    chunks = chunks_of("one decay per channel", leaves, order)
    assert (chunks[0].g.sum(0) < -MOST_LOST).any()
    wanted, end = call("one decay per channel", leaves, S)
    o, found, _, _ = forward(chunks, S[0, 0].T, length=3)
    assert (o - wanted[0, :, 0]).abs().max() < 1e-10
    assert (found.T - end[0, 0]).abs().max() < 1e-10


def test_segments_far_away_add_nothing() -> None:
    leaves, order, S = draw_rule("write keys", 500)
    chunks = chunks_of("write keys", leaves, order)
    parts = segments(chunks, 1)
    transitions = [transition(chunks, part) for part in reversed(parts[:-1])]
    needed = segments_needed(transitions)
    assert 1 < needed < len(transitions)
    _, end, _, _ = forward(chunks, S[0, 0].T, 1)
    _, near, _, _ = forward(chunks[-1 - needed :], torch.zeros(128, 128, dtype=torch.float64), 1)
    assert (end - near).abs().max() < 1e-12
    left, before = S[0, 0].T, S[0, 0].T.abs().sum(1)
    for T in transitions[:needed]:
        left = left @ T
    assert (left.abs().sum(1) < 2.0**-126 * before).all()


def test_a_chunk_lets_no_more_through_than_its_number_says() -> None:
    """See `chunk_growth`; some tokens make a row of the state longer."""
    leaves, order, S = draw_rule("delta rule", 500)
    leaves["k"] *= 1.5
    leaves["g"] *= 0.02
    left, growths = S[0, 0].T, []
    for chunk in chunks_of("delta rule", leaves, order):
        longer = (1 - chunk.beta * chunk.k.square().sum(1)).abs().clamp_min(1)
        growths.append((chunk.g.sum().exp() * longer.prod()).item())
        _, after = chunk.after(left, torch.zeros_like(chunk.v))
        assert (after.norm(dim=1) <= (1 + 1e-9) * growths[-1] * left.norm(dim=1)).all()
        left = after
    assert min(growths) < 1 < max(growths)


@fast_where(lambda given: given["time"] in (64, 100))
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("time", [1, 64, 100, 500])
def test_the_algebra_of_the_backward(time: int, rule: str) -> None:
    leaves, order, S = draw_rule(rule, time)
    for x in (*leaves.values(), S):
        x.requires_grad_()
    o, end = call(rule, leaves, S)
    do, dS = torch.randn_like(o), torch.randn_like(end)
    used = [*leaves.values(), S]
    *wanted, first = torch.autograd.grad((o, end), used, (do, dS), allow_unused=True)
    with torch.no_grad():
        chunks = chunks_of(rule, leaves, order)
        _, _, us, states = forward(chunks, S[0, 0].T, length=3)
        zs, ends, found = backward(chunks, do[0, :, 0], dS[0, 0].T, length=3)
        each = [
            one.gradients(u, z, grad, state, end)
            for one, u, z, grad, state, end in zip(chunks, us, zs, do[0, :, 0].split(64), states, ends, strict=True)
        ]
    dq, dk, dw, dv, dbeta, dg = map(torch.cat, zip(*each))
    if rule in ("delta rule", "one decay per channel"):
        dk = dk + dw
    elif rule == "linear attention":
        dk = dw
    grads = {"q": dq, "k": dk, "v": dv, "beta": dbeta, "g": dg, "write_key": dw}
    for name, right in zip(leaves, wanted, strict=True):
        if right is not None:
            assert (grads[name] - right[0, :, 0]).abs().max() < 1e-9
    assert (found.T - first[0, 0]).abs().max() < 1e-9


def test_the_algebra_of_the_gradients_of_write_keys() -> None:
    """See `write_key_grads` and `add_later_grads`: one chunk, whose energy at the end has a gradient of its own."""
    power, eps, K = math.log(1.5), 1e-2, 8
    k, dw = (torch.randn(64, K, dtype=torch.float64) for _ in range(2))
    g, beta = -torch.rand(64, dtype=torch.float64) / 4, torch.rand(64, dtype=torch.float64)
    begin, after = torch.rand(K, dtype=torch.float64), torch.randn(K, dtype=torch.float64)
    center = torch.tensor(-0.3, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (k, g, beta, center, begin)]

    def energy() -> Tensor:
        pairs = pair_decays(g[:, None])[..., 0]
        return (pairs * beta) @ k.square() + g.cumsum(0).exp()[:, None] * begin

    A = energy()
    r = (A + eps).log() - center
    w = (-power * r / (1 + r.abs())).exp() * k
    wanted = torch.autograd.grad((w * dw).sum() + (A[-1] * after).sum(), leaves)
    with torch.no_grad():
        closeness = 1 / (1 + r.abs())
        direct = (-power * closeness * r).exp() * dw
        grad_r = -power * closeness.square() * direct * k
        grad_A = grad_r / (A + eps)
        pairs = pair_decays(g[:, None])[..., 0].tril(-1)
        given = pairs.T @ grad_A + grad_A
        grad_gain = (given * k.square()).sum(1)
        grad_upto = (grad_r - eps * grad_A).sum(1) - beta * grad_gain
        since, until = g.cumsum(0).exp(), (g.sum() - g.cumsum(0)).exp()
        met = until * (k.square() * after).sum(1)
        to_end = beta * met
        earlier = to_end.cumsum(0) - to_end + since[-1] * (begin * after).sum()
        found = [
            direct + 2 * beta[:, None] * k * (given + until[:, None] * after),
            grad_upto.flip(0).cumsum(0).flip(0) + earlier,
            grad_gain + met,
            -grad_r.sum(),
            since[0] * given[0] + since[-1] * after,
        ]
    for right, one in zip(wanted, found, strict=True):
        assert (one - right).abs().max() < 1e-12


@pytest.fixture
def on_hopper() -> Iterator[None]:
    with on_hopper_in("chunk.one_pass.launches"):
        yield


def launched(time: int, dtype: torch.dtype = torch.bfloat16, width: int = 128, **given: Any) -> list[Compilation]:
    q, v = torch.zeros(1, time, 8, width, dtype=dtype), torch.zeros(1, time, 16, width, dtype=dtype)
    gate = torch.zeros(1, time, 16)
    arguments = {"q": q, "k": q, "v": v, "beta": gate, "g": gate, **given}
    return list(recorded(lambda: delta_rule(**arguments, backend="triton")))


def names(kernels: list[Compilation]) -> list[str]:
    return [one.kernel.__name__ for one in kernels]


def test_a_forward_takes_one_pass(on_hopper: None) -> None:
    assert names(launched(8192)) == ["solve_chunks", "summarize_chunks", "read_chunks"]
    assert names(launched(300)) == ["solve_chunks", "read_chunks"]
    assert names(launched(300, g=None)) == ["solve_chunks", "read_chunks"]
    assert names(launched(300, torch.float16)) == ["solve_chunks", "read_chunks"]
    assert names(launched(300, width=64)) == ["solve_chunks", "read_chunks"]
    rows = torch.zeros(4, 2048, 8, 64, dtype=torch.bfloat16)  # few segments pay with heads of 64 channels
    few = names(list(recorded(lambda: delta_rule(rows, rows, rows, rows[..., 0], backend="triton"))))
    assert few == ["solve_chunks", "summarize_chunks", "read_chunks"]
    v = torch.zeros(1, 300, 16, 128, dtype=torch.bfloat16, requires_grad=True)
    assert names(launched(300, v=v)) == ["solve_chunks", "read_chunks", *BACK]  # compiled with the forward
    packed = torch.tensor([0, 100, 300], dtype=torch.int32)
    assert names(launched(300, cu_seqlens=packed)) == ["write_tables", "solve_chunks", "read_chunks"]


def test_write_keys_take_one_pass(on_hopper: None) -> None:
    for heads in (8, 16):
        w = torch.zeros(1, 300, heads, 128, dtype=torch.bfloat16)
        assert names(launched(300, write_key=w)) == ["solve_chunks", "read_chunks"]
        assert names(launched(300, g=None, write_key=w)) == ["solve_chunks", "read_chunks"]
    q, v, gate = (torch.zeros(1, 300, *shape, dtype=torch.bfloat16) for shape in ((8, 128), (16, 128), (16,)))

    def preconditioned(dtype: torch.dtype) -> list[str]:
        keys, values = q.to(dtype), v.to(dtype)
        call = partial(preconditioned_delta_rule, keys, keys, values, gate, precond_g=gate, precond_beta=gate)
        return names(list(recorded(lambda: call(center=torch.zeros(16), backend="triton"))))

    energy = ["key_energy_sums", "key_energy_scan"]
    assert preconditioned(torch.bfloat16) == [*energy, "solve_chunks", "read_chunks"]
    assert preconditioned(torch.float16) == [*energy, "precondition", "solve_chunks", "read_chunks"]


def test_linear_attention_takes_one_pass(on_hopper: None) -> None:
    q = torch.zeros(1, 300, 16, 128, dtype=torch.bfloat16)
    for g in (None, torch.zeros(1, 300, 16)):
        kernels = list(recorded(partial(linear_attention, q, q, q, g=g, backend="triton")))
        assert names(kernels) == ["solve_chunks", "read_chunks"]
        assert not any(one.choices["DELTA"] for one in kernels)


def test_one_decay_per_channel_takes_one_pass(on_hopper: None) -> None:
    g = torch.zeros(1, 300, 16, 128)
    assert names(launched(300, g=g)) == ["solve_chunks", "read_chunks"]
    assert names(launched(8192, g=torch.zeros(1, 8192, 16, 128))) == ["solve_chunks", "summarize_chunks", "read_chunks"]
    passes = ["states_again", *CHANNEL_GRADIENTS, *BACK[2:]]
    assert names(with_backward(300, rule="one decay per channel")) == ["solve_chunks", "read_chunks", *passes]
    in_segments = names(with_backward(8192, rule="one decay per channel"))
    assert in_segments[3:] == [passes[0], "summarize_back", *passes[1:]]
    assert names(with_backward(300, rule="one decay per channel", width=64)) == ["solve_chunks", "read_chunks", *passes]


def with_backward(
    time: int,
    gates: torch.dtype = torch.bfloat16,
    heads: int = 16,
    sequences: int = 1,
    rule: str = "delta rule",
    width: int = 128,
    **given: Any,
) -> list[Compilation]:
    """gates: the dtype of beta and g; heads: of the values, half as many of the keys. Write keys are preconditioned ones."""

    def step() -> None:
        keys, values = (heads // 2, width), (heads, width)
        tokens = {"q": keys, "k": keys, "v": values, "beta": (heads,), "g": (heads,)}
        dtypes = {"beta": gates, "g": gates}
        drawn = {name: torch.zeros(1, time, *x, dtype=dtypes.get(name, torch.bfloat16)) for name, x in tokens.items()}
        state = torch.zeros(sequences, heads, width, width)
        begin: Any = state.requires_grad_()
        if rule == "write keys":
            drawn |= {"precond_g": torch.zeros(1, time, heads), "precond_beta": torch.zeros(1, time, heads)}
            begin, given["center"] = (begin, torch.zeros(sequences, heads, width)), torch.zeros(heads)
        elif rule == "linear attention":
            del drawn["beta"]
        elif rule == "one decay per channel":
            drawn["g"] = torch.zeros(1, time, heads, width)
        leaves: Any = {name: x.requires_grad_() for name, x in drawn.items()}
        o, end = OPS[rule](**leaves, **given, initial_state=begin, output_final_state=True, backend="triton")
        S = end[0] if rule == "write keys" else end
        torch.autograd.backward((o, S), (torch.zeros_like(o), torch.zeros_like(S)))

    return list(recorded(step))


def test_transitions_that_nobody_reads_are_left_out(on_hopper: None) -> None:
    """Of first segments without a state before them, and of last segments whose state nobody asks for."""
    v = torch.zeros(1, 8192, 16, 128, dtype=torch.bfloat16, requires_grad=True)
    state = torch.zeros(1, 16, 128, 128)
    for given, read in (({}, False), ({"initial_state": state, "output_final_state": True}, True)):
        kernels = {one.kernel.__name__: one.choices for one in launched(8192, v=v, **given)}
        assert kernels["summarize_chunks"]["STARTED"] is kernels["summarize_chunks"]["LAST"] is read
        assert kernels["summarize_back"]["STARTED"] is read


BACK = ["states_again", "gradients_back", "reduce_gate_grads", "sum_heads"]
CHANNEL_GRADIENTS = ["channel_gradients_back", "strong_gradients_channel"]  # plain Triton where channels lose much


def test_the_backward_passes_back(on_hopper: None) -> None:
    assert names(with_backward(300)) == ["solve_chunks", "read_chunks", *BACK]
    assert names(with_backward(300, width=64)) == ["solve_chunks", "read_chunks", *BACK]
    in_segments = names(with_backward(8192))
    assert in_segments[:3] == ["solve_chunks", "summarize_chunks", "read_chunks"]
    assert in_segments[3:] == ["states_again", "summarize_back", *BACK[1:]]
    assert names(with_backward(300, rule="linear attention")) == ["solve_chunks", "read_chunks", *BACK]
    of_write_keys = ["write_key_grads", "key_energy_scan", "add_later_grads"]
    found = names(with_backward(300, rule="write keys"))
    assert found[4:-1] == [*BACK[:2], *of_write_keys, *BACK[2:]]  # compiled with the forward, as if all had gradients
    assert found[-1] == "key_energy_scan"  # the last A has none


@pytest.mark.parametrize(
    ("rows", "time", "heads", "chunks", "cut"),
    [(4, 2048, 8, 8, 1), (1, 8192, 16, 16, 1), (2, 8192, 32, 64, 1), (8, 2048, 16, 32, 0), (1, 300, 8, 8, 0)],
)
def test_segments_of_a_training_fill_the_gpu(rows: int, time: int, heads: int, chunks: int, cut: int) -> None:
    call = SimpleNamespace(B=rows, T=time, HV=heads, decay=1)
    assert segments_kept(call) == (chunks, cut)  # type: ignore[arg-type]


def test_every_other_call_takes_the_kernels_in_plain_triton(on_hopper: None) -> None:
    plain = ["wy_transform", "chunk_state", "chunk_output"]
    assert names(launched(300, torch.float32)) == plain
    assert names(launched(300, width=32)) == plain
    q, g = torch.zeros(1, 300, 16, 128, dtype=torch.bfloat16), torch.zeros(1, 300, 16, 128)
    assert names(launched(300, torch.float16, g=g))[0] == "wy_transform_channel"  # float16 has too few exponents
    assert "solve_chunks" not in names(list(recorded(partial(linear_attention, q, q, q, g=g, backend="triton"))))


def test_other_devices_take_the_kernels_in_plain_triton() -> None:
    with mock.patch("fastweights.kernels.availability.INTERPRETED", True):
        assert "solve_chunks" not in names(launched(300))


@pytest.mark.slow  # compiling the kernels of one rule takes ten seconds
@pytest.mark.compiler
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("rule", RULES)
def test_machine_code(on_hopper: None, rule: str, width: int) -> None:
    """Every kernel fits, and products run on while others are issued: where the assembler orders them one by one, it waits for
    each. Every load is waited for."""
    spilled = {"read_chunks": 640, "gradients_back": 64, "solve_chunks": 32}
    if rule == "write keys":
        spilled |= {"solve_chunks": 64, "write_key_grads": 96}
    elif rule == "one decay per channel":  # where channels lose much, more than registers hold
        spilled |= {"solve_chunks": 1120, "channel_gradients_back": 96}
    once = {one.kernel.__name__: one for one in with_backward(8192, rule=rule, width=width) if one.kernel.is_gluon()}
    for name, one in once.items():
        compiled = one.compile(90)
        assert not register_hazards(compiled.sass)
        products = sum(x.startswith("HGMMA") for x in compiled.instructions)
        waits = sum(x.startswith("WARPGROUP.DEPBAR") for x in compiled.instructions)
        if name.startswith("summarize"):  # whose loops the assembler takes for uniform, see `uniform`
            assert sum(x.startswith("R2UR") for x in compiled.instructions) < 16
        assert compiled.shared <= 227 * 1024
        assert compiled.stack <= spilled.get(name, 0)
        assert (products >= 4 or name == "add_later_grads") and waits <= max(1, products / (4 if width == 128 else 3))


@fast_where(lambda given: given["heads"] == 4 and given["gates"] == torch.bfloat16 and given["edges"] is None)
@pytest.mark.compiler
@pytest.mark.parametrize("gates", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("heads", [4, pytest.param(16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("edges", [None, [0, 100, 300]], ids=["rows", "packed"])
def test_every_load_is_waited_for(on_hopper: None, gates: torch.dtype, heads: int, edges: list[int] | None) -> None:
    """The assembler forgot it in some of these forms: see `gradients_back`."""
    given: Any = (
        {} if edges is None else {"cu_seqlens": torch.tensor(edges, dtype=torch.int32), "sequences": len(edges) - 1}
    )
    (one,) = (x for x in with_backward(300, gates, heads, **given) if x.kernel.__name__ == "gradients_back")
    assert not register_hazards(one.compile(90).sass)
