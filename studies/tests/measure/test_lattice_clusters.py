"""Lattice's decode objective on clusters: exchanges of sums, results of the kernels, their launches and machine code, the cases.
Nothing here shows what barriers and clusters do on a GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from fastweights_studies.measure.environment import describe
from fastweights_studies.measure.lattice_clusters import cases
from fastweights_studies.measure.lattice_clusters.cases import WORK, draw, in_form, results
from fastweights_studies.record import read_rows
from torch import Tensor

from fastweights.ops import lattice
from tests.fast_set import fast_where
from tests.kernels.described_gpu import on_hopper_in
from tests.kernels.gluon_by_tensors import Programs, nothing
from tests.kernels.scoreboards import register_hazards
from tests.ops.kernel_launches import Compilation, recorded

from .ptx_of_clusters import Cluster

BOTH = pytest.mark.parametrize("mbarrier", [False, True])


@fast_where(lambda given: given["mbarrier"] == (given["sums"] == 1))
@BOTH
@pytest.mark.parametrize(("sums", "owned"), [(1, 0), (2, 2)])
@pytest.mark.parametrize(("K", "parts"), [(128, 4), (64, 4), (64, 2)])
def test_exchanges_add_up_the_parts_of_all_warps(K: int, parts: int, sums: int, owned: int, mbarrier: bool) -> None:
    """In whatever order warps run and what they send arrives."""
    from fastweights_studies.measure.lattice_clusters.exchange_code import exchange_places, receive_code, send_code

    torch.manual_seed(0)
    slots, count, every = K // 32, 4, (parts, K // 32, 32)
    outputs = (sums + 1 + (owned > 0)) * slots
    given = torch.randn(count, sums + owned, slots, *every, dtype=torch.float64)
    square = torch.randn(count, parts, slots, 1, dtype=torch.float64).expand(count, *every)
    registers = []
    for number in range(count):
        words = [torch.full(every, x) for x in (0, number) for _ in range(slots)]
        sent = [*given[number].flatten(0, 1), *[square[number]] * slots, *words]
        registers.append({f"${slots + i}": x for i, x in enumerate(sent)})
        registers.append({f"${outputs + slots + i}": x for i, x in enumerate(words)})
    codes = [code(K, parts, sums, owned, mbarrier) for code in (send_code, receive_code)] * count
    cluster = Cluster(parts, slots, exchange_places(K, parts, sums, owned)[-1])
    for warp, found in enumerate(cluster.run(codes, registers)):
        for number, after in enumerate(found[1::2]):
            totals = given[number].sum((2, 3))  # [sums and owned, slots, lanes]
            for i in range(sums * slots):
                torch.testing.assert_close(after[f"${i}"], totals.flatten(0, 1)[i])
            torch.testing.assert_close(after[f"${sums * slots}"], square[number, ..., 0].sum().expand(32))
            if owned:
                program, width = warp // slots, K // parts
                by_slot = totals[sums:].transpose(1, 2).reshape(owned, parts, width)[:, program].flatten()
                thread = (warp % slots * 32 + torch.arange(32)) % (owned * width)
                torch.testing.assert_close(after[f"${(sums + 1) * slots}"], by_slot[thread])


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_lanes_share_the_work_of_sums(count: int) -> None:
    from fastweights_studies.measure.lattice_clusters.exchange_code import lane_sums_code

    x = torch.randn(count, 2, 32, dtype=torch.float64)
    found = Cluster(1, 2).run([lane_sums_code(count)], [{f"${count + i}": x[i] for i in range(count)}])
    for i, warp in ((i, warp) for i in range(count) for warp in range(2)):
        torch.testing.assert_close(found[warp][0][f"${i}"], x[i, warp].sum().expand(32))


class Exchanges:
    """As the functions of these names, with all programs of a cluster in one tile [32, K / 32, warps]."""

    def send_one(self, area: int, number: int, x: Tensor, square: Tensor, *how: object) -> None:
        self.sent = [self.over_warps(x), self.over_warps(square)]

    def send_two(
        self, area: int, number: int, x: Tensor, y: Tensor, own: Tensor, other: Tensor, square: Tensor, parts: int,
        mbarrier: bool,
    ) -> None:  # fmt: skip
        slots, K = x.shape[1], 32 * x.shape[1]
        both = torch.stack([own.sum(2).reshape(K), other.sum(2).reshape(K)]).reshape(2, parts, K // parts)
        by_thread = both.transpose(0, 1).reshape(parts, 2 * K // parts).repeat(1, parts)[:, :K]
        of_threads = by_thread.reshape(parts * slots, 1, 32).transpose(0, 2).expand(32, slots, parts * slots)
        self.sent = [*map(self.over_warps, (x, y, square)), of_threads]

    def receive(self, area: int, number: int, x: Tensor, *how: object) -> list[Tensor]:
        return self.sent

    @staticmethod
    def over_warps(x: Tensor) -> Tensor:
        return x.sum(2, keepdim=True).expand_as(x).clone()


def programs(warps: int) -> Programs:
    found, exchanges = Programs(warps), Exchanges()
    language = found.language
    language.int32, language.max, language.rsqrt, language.to_tensor = (
        torch.int32,
        torch.amax,
        torch.rsqrt,
        torch.as_tensor,
    )
    language.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    found.known |= {
        "sum_over_lanes": lambda x: x.sum(0, keepdim=True).expand_as(x), "begin_exchanges": nothing, "end_exchanges": nothing,
        "send_one": exchanges.send_one, "send_two": exchanges.send_two, "receive_one": exchanges.receive,
        "receive_two": exchanges.receive, "beside_slots": lambda x, slots: x[:, None],
        "beside_channels": lambda x, channels: x[..., None],
        "to_float_or_nan": lambda x: x, "inverse_root": lambda x, dtype: x.rsqrt(), "prefetch_rows": nothing,
        "bound_below": lambda x, least: x.clamp(min=least), "inverse_square": lambda length: 1 / length**2,
        "find_edges": lambda edges, n, T: (n * T, n * T + T, n * -(-T // 16)),
    }  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("sequences", "time", "K", "parts", "with_start", "is_steep"),
    [(1, 37, 64, 2, True, False), (2, 20, 64, 4, False, False), (1, 18, 128, 4, True, True)],
)
def test_gradients_are_those_of_the_reference(
    sequences: int, time: int, K: int, parts: int, with_start: bool, is_steep: bool
) -> None:
    from fastweights_studies.measure.lattice_clusters.backward import decode_back_on_cluster
    from fastweights_studies.measure.lattice_clusters.forward import decode_on_cluster

    torch.manual_seed(0)
    heads, tokens = 2, sequences * time
    draw = partial(torch.randn, dtype=torch.float64)
    q, k, v = (draw(sequences, time, heads, K) / K**0.5 for _ in range(3))
    gates = torch.rand(2, sequences, time, heads, dtype=torch.float64)
    S = draw(sequences, heads, K, K) if with_start else torch.eye(K, dtype=torch.float64).expand(sequences, heads, K, K)
    inputs = [x.contiguous().requires_grad_() for x in (q, k, v, gates[0], 1 - gates[1] / 8, S)]
    o, end = lattice(
        *inputs[:4], decay=inputs[4], initial_state=inputs[5], output_final_state=True, backend="reference"
    )
    d_o, d_end = draw(o.shape), draw(end.shape)
    wanted = [end, *torch.autograd.grad([o, end], inputs, [d_o, d_end])]
    q, k, v, gamma, decay, S, do, d_end = (x.detach().float() for x in (*inputs, d_o, d_end))
    start = S if with_start else None
    kept, turned, along, answers, dq, dk, dv = torch.full((7, sequences, time, heads, K), torch.nan)
    states = torch.full((sequences * -(-time // 16), heads, K, K), torch.nan)
    found_end, d_start = torch.full((2, sequences, heads, K, K), torch.nan)
    steep, gate_grads = (
        torch.full(states.shape[:2], -1, dtype=torch.int32),
        torch.full((2, sequences, time, heads), torch.nan),
    )
    sizes = (heads, K, K, 1, 1, 1, parts, False)
    run, grid = programs(K // 32).run, (sequences, heads)
    steps = (kept, turned, along, answers, states)
    run(decode_on_cluster, grid, k, v, gamma, decay, start, *steps, found_end, steep, None, time, *sizes)
    assert (steep == 0).all()
    run(
        decode_back_on_cluster, grid, q, k, gamma, decay, start, do, d_end, *steps, dq, dk, dv, gate_grads, tokens * heads,
        d_start, torch.full_like(steep, is_steep), None, time, *sizes,
    )  # fmt: skip
    for got, expected in zip((found_end, dq, dk, dv, *gate_grads, d_start), wanted):
        torch.testing.assert_close(got, expected.float(), rtol=1e-4, atol=1e-5 * expected.abs().max().item())


def launched(form: str, K: int, kind: str = "any") -> dict[str, Compilation]:
    """The kernels of a forward and a backward, by name."""
    with on_hopper_in("sphere.rule"), in_form(form, 4):
        inputs, gradients = draw(WORK["times"][0]._replace(T=20, K=K, kind=kind), "cpu")
        return {one.kernel.__name__: one for one in recorded(lambda: results(inputs, gradients))}


@pytest.mark.compiler
def test_forms_launch_their_own_kernels() -> None:
    plain, ours = launched("library", 64), launched("mbarrier", 64)
    assert {"decode_tokens", "decode_tokens_back"} <= set(plain)
    assert set(ours) - set(plain) == {"decode_on_cluster", "decode_back_on_cluster"}
    for name in set(ours) - set(plain):
        assert ours[name].choices["num_ctas"] == ours[name].choices["PARTS"] == 4
    assert ours["reduce_gate_grads"].choices["PARTS"] == 1  # what one program writes
    assert set(launched("library", 64)) == set(plain)


@fast_where(lambda given: given["K"] == 64 and given["mbarrier"])
@pytest.mark.compiler
@pytest.mark.parametrize("K", [64, pytest.param(128, marks=pytest.mark.slow)])
@BOTH
def test_machine_code(K: int, mbarrier: bool) -> None:
    """Nothing is spilled, every load is waited for, and Triton itself puts nothing into shared memory."""
    found = launched("mbarrier" if mbarrier else "cluster-barrier", K, "no-state")
    for name in ("decode_on_cluster", "decode_back_on_cluster"):
        compiled = found[name].compile(90)
        assert compiled.shared == 0 and compiled.stack == 0
        assert not register_hazards(compiled.sass)


def test_rows_are_written_as_they_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the step that fails. With PyTorch in the place of kernels."""
    path = tmp_path / "rows.json"
    monkeypatch.setattr(cases, "draw", partial(draw, device="cpu"))
    monkeypatch.setattr(cases, "results", lambda inputs, gradients, _="": results(inputs, gradients, "torch"))

    def measured() -> dict[str, float | None]:
        cases.measure("errors", cases.Case(1, 5, 1, 8, "bare"), "library", 4, 1, path, describe("cpu"))
        return {row.measure: row.value for row in read_rows(path)}

    found = measured()
    assert found.pop("ended") == found.pop("equal_bits") == 1
    assert set(found) == {f"{name}_error" for name in ("o", "S", "dq", "dk", "dv", "dgamma")}
    assert all(0 < error < 0.05 for error in found.values())
    monkeypatch.setattr(cases, "equal_bits", Mock(side_effect=RuntimeError))
    with pytest.raises(RuntimeError):
        measured()
    assert {row.measure: row.value for row in read_rows(path)} == {**found, "ended": 0}
