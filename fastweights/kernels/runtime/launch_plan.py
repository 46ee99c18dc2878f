"""Launches that are known beforehand: all that is left to do for a call is to find memory and pass on where it lies.

What a kind of call launches, with which sizes and choices, is the same each time; to go through it in Python takes longer than
the kernels run at small sizes. So it is gone through once, with buffers in the place of tensors, and kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from .compiling import Launch, current_device, make_ready
from .jit import current_stream, numbers_in_front, runner
from .workspace import Buffer, arranged

__all__ = ["Schedule"]

STREAM = object()  # in the place of a call's


class Schedule:
    """launches: in their order, on buffers (and constant tensors); inputs: what a call brings, contiguous and aligned; outputs:
    what it gives back. All other buffers live in one workspace, each only as long as launches need it."""

    def __init__(
        self, launches: Sequence[Launch], inputs: Sequence[Buffer | None], outputs: Sequence[Buffer | None], device: torch.device
    ) -> None:  # fmt: skip
        launches = [launch for launch in launches if all(launch.grid)]
        lives: dict[Buffer, tuple[int, int]] = {}
        for now, launch in enumerate(launches):
            for x in launch.places:
                if isinstance(x, Buffer):
                    lives[x] = lives.get(x, (now, now))[0], now
        own = {x for x in (*inputs, *outputs) if x is not None}
        self.inside = [x for x in lives if x not in own]
        self.starts, self.bytes = arranged([(x.bytes, *lives[x]) for x in self.inside])
        self.outputs, self.device = list(outputs), device
        # A call's pool: the stream, its tensors' places in memory in this order, and constants. A step picks its arguments there.
        known = [None, *inputs, *outputs, *self.inside]
        self.places = {x: at for at, x in enumerate(known) if isinstance(x, Buffer)}
        self.held = len(known)
        self.constants: list[Any] = []
        self.interpreted = knobs.runtime.interpret
        self.steps = self._interpreted(launches) if self.interpreted else self._compiled(launches)

    def _pick(self, arguments: Sequence[Any]) -> itemgetter[Any]:
        def place(x: Any) -> int:
            if isinstance(x, Buffer):
                return self.places[x]
            if x is STREAM:
                return 0
            self.constants.append(x)
            return self.held + len(self.constants) - 1

        return itemgetter(*map(place, arguments))

    def _compiled(self, launches: Sequence[Launch]) -> list[tuple[Any, itemgetter[Any]]]:
        self.tensors = [x for launch in launches for x in launch.places if isinstance(x, Tensor)]  # to live as long
        steps = []
        for launch, compiled in zip(launches, make_ready(launches)):
            numbers = [x.data_ptr() if isinstance(x, Tensor) else x for x in launch.places]
            front = numbers_in_front(compiled, launch.grid, STREAM)
            steps.append((compiled, self._pick([*front, *launch.kernel.all_arguments(numbers, launch.choices)])))
        return steps

    def _interpreted(self, launches: Sequence[Launch]) -> list[tuple[Any, itemgetter[Any]]]:
        """By Triton's interpreter, which takes the tensors themselves."""
        return [(partial(x.kernel[x.grid], **x.choices), self._pick(x.places)) for x in launches]

    def play(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs of a call with these inputs."""
        outputs = [x if x is None else x.tensor(self.device) for x in self.outputs]
        workspace = torch.empty(self.bytes, dtype=torch.uint8, device=self.device)
        if self.interpreted:
            inside = (x.within(workspace, start) for x, start in zip(self.inside, self.starts))
            pool = [None, *tensors, *outputs, *inside, *self.constants]
            for kernel, pick in self.steps:
                kernel(*pick(pool))
            return outputs
        base = workspace.data_ptr()
        pool = [
            current_stream(current_device()),
            *[x if x is None else x.data_ptr() for x in (*tensors, *outputs)],
            *[base + start for start in self.starts],
            *self.constants,
        ]
        run = runner()
        for compiled, pick in self.steps:
            run(compiled, pick(pool))
        return outputs
