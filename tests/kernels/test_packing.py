"""The tables of packed sequences, written on the device, beside a plain count of chunks and segments."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .cases import DEVICE

pytestmark = pytest.mark.kernels


def tables(cu_seqlens: torch.Tensor, time: int, tokens: int) -> tuple[list[list[int]], list[list[int]]]:
    """The rows of both tables; what the kernel leaves unwritten is -1."""
    from fastweights.kernels.common.call import max_pieces
    from fastweights.kernels.common.packing import CHUNK, record_tables
    from fastweights.kernels.runtime.launch_plan import LaunchPlan, Recorder
    from fastweights.kernels.runtime.workspace import TensorSpec

    count = len(cu_seqlens) - 1
    edges = TensorSpec(cu_seqlens.shape, cu_seqlens.dtype)
    chunks, segments = (
        TensorSpec((max_pieces(count, time, piece, packed=True), width), torch.int32)
        for piece, width in ((CHUNK, 2), (tokens, 5))
    )
    recorder = Recorder()
    record_tables(recorder, edges, chunks, segments, time, tokens)
    plan = LaunchPlan(recorder.launches, (edges,), (chunks, segments), torch.device(DEVICE))
    found = plan.run((cu_seqlens.to(DEVICE),))
    return found[0].tolist(), found[1].tolist()


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    lengths=st.lists(st.one_of(st.integers(0, 3), st.integers(60, 70), st.integers(0, 700)), min_size=1, max_size=9),
    per_segment=st.integers(1, 4),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_every_piece_has_one_number(lengths: list[int], per_segment: int, dtype: torch.dtype) -> None:
    edges = torch.tensor([0, *lengths]).cumsum(0).to(dtype)
    time, tokens = sum(lengths), 64 * per_segment
    chunks, segments = tables(edges, time, tokens)
    wanted_chunks, wanted_segments, starts = {}, {}, edges.tolist()
    for n, (start, stop) in enumerate(zip(starts, starts[1:])):
        for place, first in enumerate(range(start, stop, 64)):
            wanted_chunks[start // 64 + n + place] = [first, min(64, stop - first)]
        firsts = list(range(start, stop, tokens)) or [start]
        for place, first in enumerate(firsts):
            ends = (place == 0) + 2 * (place == len(firsts) - 1)
            chunk = start // 64 + n + place * per_segment
            wanted_segments[start // tokens + n + place] = [first, min(first + tokens, stop), chunk, n, ends]
    assert sum(count for _, count in wanted_chunks.values()) == time
    for number, (first, count) in enumerate(chunks):
        assert [first, count] == wanted_chunks.pop(number) if number in wanted_chunks else count == 0
    for number, (first, stop, chunk, sequence, last) in enumerate(segments):
        ends = last & 3
        if number in wanted_segments:
            assert [first, stop, chunk, sequence, ends] == wanted_segments.pop(number)
        else:
            assert first == stop and ends == 0
    assert not wanted_chunks and not wanted_segments


@pytest.mark.parametrize("lengths", [[500, 0, 3, 900, 64, 65], [130, 0, 64, 1, 63] * 60], ids=["few", "several blocks"])
def test_the_longest_segments_are_begun_first(lengths: list[int]) -> None:
    from fastweights.kernels.common.packing import BLOCK

    _, segments = tables(torch.tensor([0, *lengths]).cumsum(0), sum(lengths), 128)
    turns = [last >> 2 for *_, last in segments]
    for first in range(0, len(segments), BLOCK):
        block = turns[first : first + BLOCK]
        assert sorted(block) == list(range(first, first + len(block)))
        begun = [segments[number][1] - segments[number][0] for number in block]
        assert begun == sorted(begun, reverse=True)


@pytest.mark.parametrize(
    "edges", [[-5, 100, 9000], [50, 20, 200], [0, 300, 100], [2**40, 3, 2**40], [7, 7, 7]], ids=str
)
def test_wrong_lengths_stay_inside_the_row(edges: list[int]) -> None:
    """On a GPU nobody reads cu_seqlens before the kernels do: whatever it holds, no kernel leaves the row of 200 tokens."""
    chunks, segments = tables(torch.tensor(edges), 200, 128)
    assert all(0 <= count <= 64 for _, count in chunks)
    assert all(first >= 0 and first + count <= 200 for first, count in chunks if count)
    assert all(0 <= first <= stop <= 200 for first, stop, *_ in segments)
    assert sorted(last >> 2 for *_, last in segments) == list(range(len(segments)))
    assert all(chunk + -(-(stop - first) // 64) <= len(chunks) for first, stop, chunk, *_ in segments if first < stop)


@pytest.mark.parametrize(("time", "programs", "segments"), [(1100, 1, 3), (1100, 100, 0), (500, 1, 0), (65536, 16, 16)])
def test_segments_of_a_row(time: int, programs: int, segments: int) -> None:
    """Long rows are cut where few programs would run otherwise, never below 8 chunks per segment."""
    from fastweights.kernels.common.call import max_pieces
    from fastweights.kernels.common.delta_rule.sizes import segment_length
    from fastweights.kernels.common.packing import CHUNK

    length, cut = segment_length(1, time, programs, 264)
    assert cut * max_pieces(1, time, CHUNK * length, packed=False, least=1) == segments
