"""Launch plans: the launches of a forward or backward, recorded once for all calls of the same sizes, then replayed.

To go through the launch code in Python takes longer than the kernels run at small sizes. So it runs once, on placeholders in the
place of tensors; a replay allocates memory and passes pointers. A plan owns no memory of the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, lru_cache
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from ...private_torch import current_device, current_stream
from .overlap import overlap_constants
from .private_api import Launch, compile_all, fast_launch, front_arguments, launcher, plain_launch, specialized_on
from .workspace import TensorSpec, assign_offsets

Given = TypeVar("Given", bound=Tensor | None)

MAX_PLANS = 256  # kinds of call whose plans are kept, the latest
STREAM = object()  # placeholder of the current stream


class Recorder:
    """Collects launches; a launch whose grid is empty is none."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []

    def launch(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """arguments: placeholders, numbers and None; constants: what is compiled in, and Triton's options."""
        if all(grid):
            self.launches.append(Launch(kernel, grid, arguments, constants))


class LaunchPlan:
    """launches: in order, on placeholders; inputs: placeholders of contiguous aligned tensors that a call brings; outputs:
    placeholders of what it returns. All other placeholders share one workspace."""

    def __init__(
        self, launches: Sequence[Launch], inputs: Sequence[TensorSpec | None], outputs: Sequence[TensorSpec | None],
        device: torch.device,
    ) -> None:  # fmt: skip
        lifetimes: dict[TensorSpec, tuple[int, int]] = {}
        for now, recorded in enumerate(launches):
            for x in recorded.arguments:
                if isinstance(x, TensorSpec):
                    lifetimes[x] = lifetimes.get(x, (now, now))[0], now
        own = {x for x in (*inputs, *outputs) if x is not None}
        self.temporaries = [x for x in lifetimes if x not in own]
        self.offsets, self.workspace_bytes = assign_offsets([(x.bytes, *lifetimes[x]) for x in self.temporaries])
        self.outputs, self.device = list(outputs), device
        # A call fills a pool: the stream, its tensors (as pointers in the fast mode) in this order, and the constants of all
        # launches. A step picks its arguments out of the pool.
        tensors = [None, *inputs, *outputs, *self.temporaries]
        self.place_of = {x: place for place, x in enumerate(tensors) if isinstance(x, TensorSpec)}
        self.first_constant = len(tensors)
        self.constants: list[Any] = []
        self.is_fast = fast_launch()
        self.steps = self._fast_steps(launches) if self.is_fast else self._plain_steps(launches)

    def _pick(self, arguments: Sequence[Any]) -> itemgetter[Any]:
        def place(x: Any) -> int:
            if isinstance(x, TensorSpec):
                return self.place_of[x]
            if x is STREAM:
                return 0
            self.constants.append(x)
            return self.first_constant + len(self.constants) - 1

        return itemgetter(*map(place, arguments))

    def _fast_steps(self, launches: Sequence[Launch]) -> list[Any]:
        steps = []
        for recorded, compiled in zip(launches, compiled_kernels(launches)):
            front = front_arguments(compiled, recorded.grid, STREAM)
            steps.append((compiled, self._pick([*front, *all_arguments(recorded)])))
        return steps

    def _plain_steps(self, launches: Sequence[Launch]) -> list[Any]:
        return [(recorded, self._pick(recorded.arguments)) for recorded in launches]

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs of a call with these inputs."""
        outputs = [x if x is None else x.allocate(self.device) for x in self.outputs]
        workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
        if not self.is_fast:
            temporaries = [x.view_of(workspace, offset) for x, offset in zip(self.temporaries, self.offsets)]
            pool = [None, *tensors, *outputs, *temporaries, *self.constants]
            for recorded, pick in self.steps:
                plain_launch(recorded.kernel, recorded.grid, pick(pool), recorded.constants)
            return outputs
        base = workspace.data_ptr()
        pool = [
            current_stream(current_device()),
            *[x if x is None else x.data_ptr() for x in (*tensors, *outputs)],
            *[base + offset for offset in self.offsets],
            *self.constants,
        ]
        run = launcher()
        for compiled, pick in self.steps:
            run(compiled, pick(pool))
        return outputs


class Rule(NamedTuple):
    """The launch code of one memory rule. `inputs` is a named tuple of placeholders or None, `options` numbers
    or words.

    shapes(inputs, device, options, final): placeholders of the outputs (the final states None unless `final`), and of what a
        backward needs. Fake kernels call it too, on fake tensors.
    forward(recorder, inputs, device, options, final): records the launches; returns what `shapes` returns.
    backward(recorder, inputs, device, options, saved, output_grads, state_grads): records the launches; returns a gradient
        for every input or None. state_grads: whether the initial states need one. None where no backward follows.
    infer(recorder, inputs, device, options, final): records the launches of a forward that keeps nothing for a backward; returns
        the placeholders of the outputs.
    """

    shapes: Callable[..., tuple[Sequence[TensorSpec | None], Sequence[TensorSpec | None]]]
    forward: Callable[..., tuple[Sequence[TensorSpec | None], Sequence[TensorSpec | None]]]
    backward: Callable[..., Sequence[TensorSpec | None]] | None
    infer: Callable[..., Sequence[TensorSpec | None]]


class PlanKey(NamedTuple):
    """What the launches of a call depend on: sizes, never the lengths of packed sequences. inputs: type of the named tuple, then
    shape and dtype of each; keep_saved: whether a backward may follow."""

    rule: Rule
    kind: type
    inputs: tuple[Any, ...]
    device: torch.device
    options: tuple[float, ...]
    final: bool
    keep_saved: bool


class CallPlans:
    """The plans of all calls with one key, made when they are first needed."""

    def __init__(self, key: PlanKey) -> None:
        self.key = key
        self.inputs = key.kind(*(None if given is None else TensorSpec(*given) for given in key.inputs))
        self.backward_plans: dict[tuple[bool, ...], LaunchPlan] = {}

    @cached_property
    def recorded(self) -> tuple[list[Launch], Sequence[TensorSpec | None], Sequence[TensorSpec | None]]:
        """The launches of a forward, its outputs, and what a backward needs, nothing where none follows."""
        recorder, key = Recorder(), self.key
        if not key.keep_saved:
            return recorder.launches, key.rule.infer(recorder, self.inputs, key.device, key.options, key.final), ()
        outputs, saved = key.rule.forward(recorder, self.inputs, key.device, key.options, key.final)
        return recorder.launches, outputs, saved

    @cached_property
    def forward(self) -> LaunchPlan:
        """Returns the outputs and, with keep_saved, what a backward needs."""
        launches, outputs, saved = self.recorded
        if self.key.keep_saved and self.key.rule.backward and fast_launch():
            # With the kernels of the backward that may follow: there are cores for all.
            compiled_kernels([*launches, *self._record_backward(outputs, state_grads=self.key.final)[0]])
        return LaunchPlan(launches, self.inputs, [*outputs, *saved], self.key.device)

    def backward(
        self, inputs: Sequence[Tensor | None], saved: Sequence[Tensor | None], output_grads: Sequence[Tensor | None],
        state_grads: bool,
    ) -> list[Tensor | None]:  # fmt: skip
        """The gradient of every input in its shape and dtype; all tensors contiguous and aligned."""
        wanted = (*[d is None for d in output_grads], state_grads)
        plan = self.backward_plans.get(wanted)
        if plan is None:
            given = [None if d is None else TensorSpec(d.shape, d.dtype) for d in output_grads]
            launches, found = self._record_backward(given, state_grads)
            tensors = (*self.inputs, *self.recorded[2], *given)
            plan = self.backward_plans[wanted] = LaunchPlan(launches, tensors, found, self.key.device)
        return list(map(reduce_to_input, inputs, plan.run((*inputs, *saved, *output_grads))))

    def _record_backward(
        self, output_grads: Sequence[TensorSpec | None], state_grads: bool
    ) -> tuple[list[Launch], Sequence[TensorSpec | None]]:
        """The launches of a backward, and the gradients that it gives."""
        recorder, key = Recorder(), self.key
        assert key.rule.backward is not None
        found = key.rule.backward(
            recorder, self.inputs, key.device, key.options, self.recorded[2], output_grads, state_grads
        )
        return recorder.launches, found


def plans_for(rule: Rule, inputs: Any, options: tuple[float, ...], *, final: bool, keep_saved: bool) -> CallPlans:
    """inputs: a named tuple of tensors or None."""
    shapes = tuple([None if x is None else (x.shape, x.dtype) for x in inputs])
    return _plans(PlanKey(rule, type(inputs), shapes, inputs[0].device, options, final, keep_saved))


_plans = lru_cache(maxsize=MAX_PLANS)(CallPlans)


def reduce_to_input(x: Tensor | None, gradient: Tensor | None) -> Tensor | None:
    """A gradient from the kernels in the shape and dtype of its input: summed over the value heads that share a head."""
    if x is None or gradient is None or (x.shape == gradient.shape and x.dtype == gradient.dtype):
        return gradient
    if x.shape[2] != gradient.shape[2]:
        gradient = gradient.unflatten(2, (x.shape[2], -1)).sum(3, dtype=torch.float32)
    return gradient.to(x.dtype)


def device_of(x: Tensor) -> AbstractContextManager:
    """Launches inside go to the device of x."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def make_rows_contiguous(x: Tensor) -> Tensor:
    """x with its last dimension contiguous, as kernels read it."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def align(x: Given) -> Given:
    """A tensor contiguous and beginning at a multiple of 16 bytes, as most kernels read it: a view may begin anywhere."""
    if x is None:
        return x
    whole = x.contiguous()
    return whole if whole.data_ptr() % 16 == 0 else whole.clone()  # type: ignore[return-value]


def alignment(*numbers: int) -> int:
    """8 where it divides all strides and widths (rows of 16-bit numbers then begin at multiples of 16 bytes), else 1. Triton
    itself looks for 16 only."""
    return 1 if any(n % 8 for n in numbers) else 8


_compiled: dict[tuple[Any, ...], Any] = {}  # by `specialization`
_parameters: dict[Any, tuple[tuple[bool, bool], ...]] = {}  # `specialized_on` of every kernel


def specialization(launch: Launch, device: int) -> tuple[Any, ...]:
    """What the compiled kernel of a launch depends on: at least what Triton tells apart."""
    kernel = launch.kernel.fn
    parameters = _parameters.get(kernel)
    if parameters is None:
        parameters = _parameters[kernel] = specialized_on(launch.kernel)
    given = [
        x if is_constexpr else _argument_kind(x, by_value)
        for (is_constexpr, by_value), x in zip(parameters, launch.arguments)
    ]
    return kernel, device, *given, *launch.constants.items()


def _argument_kind(x: Any, by_value: bool) -> Any:
    kind = x.__class__
    if kind is int or kind is bool:  # first, as most arguments are and a look at the class of a tensor takes long
        fits = -(2**31) <= x < 2**31
        return (fits, x == 1, x % 16 == 0) if by_value else fits
    if x is not None and isinstance(x, (Tensor, TensorSpec)):
        return x.dtype, x.data_ptr() % 16
    return kind


def compiled_kernels(launches: Sequence[Launch]) -> list[Any]:
    """The compiled kernel of every launch; what is not compiled yet is compiled in parallel."""
    device = current_device()
    keys = [specialization(launch, device) for launch in launches]
    new = {key: launch for key, launch in zip(keys, launches) if key not in _compiled}
    if new:
        _compiled.update(zip(new, compile_all(list(new.values()))))
    return [_compiled[key] for key in keys]


def all_arguments(launch: Launch) -> list[Any]:
    """Arguments by position, constants included, in the order of the kernel's parameters."""
    return [*launch.arguments, *constants_in_order(launch)]


def constants_in_order(launch: Launch) -> list[Any]:
    return [launch.constants[name] for name in launch.kernel.arg_names[len(launch.arguments) :]]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Launch one kernel now, outside of any plan, on the device of its first tensor. An empty grid launches nothing."""
    if not all(grid):
        return
    constants |= overlap_constants(kernel)
    with device_of(next(x for x in arguments if isinstance(x, Tensor))):
        if not fast_launch():
            plain_launch(kernel, grid, arguments, constants)
            return
        now = Launch(kernel, grid, arguments, constants)
        compiled = _compiled.get(specialization(now, current_device()))
        if compiled is None:
            (compiled,) = compiled_kernels([now])
        given = [
            x.data_ptr() if isinstance(x, Tensor) else x for x in arguments
        ]  # not of constants: the question takes long
        front = front_arguments(compiled, grid, current_stream(current_device()))
        launcher()(compiled, (*front, *given, *constants_in_order(now)))
