"""Where the time of a training step goes: what a GPU computes, what it exchanges with others, and when the host launches it.

A profile of one step becomes four lanes, lists of [begin, end] in milliseconds:

    host           calls of CUDA: launches of kernels and of graphs, copies
    compute        kernels and copies, but for NCCL's
    communication  NCCL's kernels
    idle           neither of the two
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from fastweights.analysis.plot_style import plain_axes, save_figure

__all__ = ["LANES", "StepProfile", "draw", "overlap", "read_trace", "summarize"]

Spans = list[list[float]]

LANES = {"host": "#8a8a8a", "compute": "#3b6ea8", "communication": "#c8553d"}
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
CALLS = ("cuda_runtime", "cuda_driver")
WAITS = ("Synchronize", "EventQuery")  # calls by which the host waits or asks
ENDS = 3  # steps: the first one takes the start of the profiler, the last one its end


class StepProfile(TrainerCallback):
    """Profiles the second of the last three steps of the main process. `lanes` holds what was found."""

    def __init__(self) -> None:
        self.lanes: dict[str, Spans] = {}
        self._profiler: torch.profiler.profile | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = state.global_step
        if not state.is_world_process_zero:
            return
        if step == state.max_steps - ENDS:
            activities = torch.profiler.supported_activities()
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
            self._profiler = torch.profiler.profile(
                activities=activities, schedule=schedule, on_trace_ready=self._read_profile
            )
            self._profiler.start()
        elif self._profiler is not None:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._profiler.step()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    def _read_profile(self, profiler: torch.profiler.profile) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "trace.json"))
            profiler.export_chrome_trace(path)
            self.lanes = read_trace(json.loads(Path(path).read_text())["traceEvents"])


def read_trace(events: Iterable[Mapping[str, Any]]) -> dict[str, Spans]:
    """The lanes of a trace in Chrome's format, whose times are in microseconds. Time 0 is where the first lane begins."""
    found: dict[str, Spans] = {name: [] for name in LANES}
    for event in events:
        kind, name = event.get("cat"), str(event.get("name"))
        span = [float(event.get("ts", 0)) / 1e3, float(event.get("ts", 0) + event.get("dur", 0)) / 1e3]
        if kind in WORK:
            found["communication" if "nccl" in name.lower() else "compute"].append(span)
        elif kind in CALLS and not any(wait in name for wait in WAITS):
            found["host"].append(span)
    first = min((begin for spans in found.values() for begin, _ in spans), default=0.0)
    return {name: join([[begin - first, end - first] for begin, end in spans]) for name, spans in found.items()}


def join(spans: Spans) -> Spans:
    """The same times without overlaps, in order."""
    joined: Spans = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([begin, end])
    return joined


def measure(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def overlap(one: Spans, other: Spans) -> float:
    """Milliseconds in both of two lanes."""
    return measure(one) + measure(other) - measure(join([list(span) for span in (*one, *other)]))


def summarize(lanes: Mapping[str, Spans]) -> dict[str, float]:
    """Milliseconds of a step: in all, with computing, with communication, with both, with neither, and in calls of the host."""
    compute, communication = lanes["compute"], lanes["communication"]
    busy = join([list(span) for span in (*compute, *communication)])
    whole = busy[-1][1] - busy[0][0] if busy else 0.0
    return {
        "profiled_step_ms": whole,
        "compute_ms": measure(compute),
        "communication_ms": measure(communication),
        "overlapped_ms": overlap(compute, communication),
        "idle_ms": whole - measure(busy),
        "host_calls_ms": measure(lanes["host"]),
    }


def draw(steps: Mapping[str, Mapping[str, Spans]], path: Path) -> None:
    """A picture of one step of each training: its lanes above each other over the time in milliseconds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 1.15 * len(steps) + 0.5), layout="constrained")
    panels = figure.subplots(len(steps), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (title, lanes) in zip(panels, steps.items(), strict=True):
        for place, (lane, colour) in enumerate(LANES.items()):
            bars = [(begin, end - begin) for begin, end in lanes[lane]]
            axes.broken_barh(bars, (-place - 0.4, 0.8), facecolors=colour, linewidth=0)
        axes.set_yticks([-place for place in range(len(LANES))], list(LANES), fontsize=7)
        found = summarize(lanes)
        axes.set_title(
            f"{title}: {found['profiled_step_ms']:.0f} ms, of which idle {found['idle_ms']:.0f}; communication "
            f"{found['communication_ms']:.0f}, overlapped {found['overlapped_ms']:.0f}",
            fontsize=8,
            loc="left",
        )
        plain_axes(axes)
    panels[-1].set_xlabel("milliseconds")
    save_figure(figure, path, source=json.dumps({title: summarize(lanes) for title, lanes in steps.items()}), dpi=110)
