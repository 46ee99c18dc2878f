"""What one process measures: errors or times of a form at one size. The command in __main__.py starts these processes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import lattice
from fastweights_studies.measure.judge.timing import interleaved, kernel_times
from fastweights_studies.measure.rows import Value, make_rows, replace_rows
from fastweights_studies.record import Origin

from .launches import on_clusters

TASK = "lattice-clusters"
FORMS = ("library", "mbarrier", "cluster-barrier")
INPUTS = ("q", "k", "v", "gamma", "decay", "S")


class Case(NamedTuple):
    """B, T, H, K: sequences, tokens, heads, channels of keys and of values. kind: of inputs, see `draw`."""

    B: int
    T: int
    H: int
    K: int
    kind: str = "any"


WORK = {
    "times": (Case(4, 2048, 8, 128, "no-state"), Case(4, 2048, 8, 64, "no-state")),
    "errors": (
        Case(2, 77, 2, 128), Case(1, 130, 3, 64), Case(2, 33, 2, 128, "bare"), Case(2, 150, 2, 128, "steep"),
        Case(2, 150, 2, 128, "repeated"),
    ),
}  # fmt: skip
Inputs = dict[str, Any]  # tensors, and None for what is not given


def draw(case: Case, device: str = "cuda") -> tuple[Inputs, list[Tensor]]:
    """The inputs in bfloat16, and gradients of the outputs and of the final state.

    Kinds: "any", with decays in (.9, 1) and an initial state; "no-state", without that state; "bare", without decays too;
    "steep", where a third of the decays is .02; "repeated", where all tokens have one key, and gains are 1.
    """
    B, T, H, K, kind = case
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device=device)

    q, k, v = F.normalize(normal(B, T, H, K), dim=-1), F.normalize(normal(B, T, H, K), dim=-1), normal(B, T, H, K)
    gamma, decay = normal(B, T, H).sigmoid(), 1 - uniform(B, T, H) / 10
    S = F.normalize(normal(B, H, K, K), dim=-1) * (0.5 + uniform(B, H, K, 1))
    if kind == "steep":
        decay[:, ::3] = 0.02
    elif kind == "repeated":
        gamma, k = torch.ones_like(gamma), k[:, :1].expand_as(k)
    given = dict(zip(INPUTS, [*(x.bfloat16().contiguous() for x in (q, k, v)), gamma, decay, S]))
    missing = {"no-state": ("S",), "bare": ("S", "decay")}.get(kind, ())
    inputs = {name: None if name in missing else x.requires_grad_() for name, x in given.items()}
    return inputs, [normal(B, T, H, K), normal(B, H, K, K)]


def call(inputs: Inputs, final: bool, backend: str = "triton") -> tuple[Tensor, Any]:
    """The outputs and, if `final`, the final state."""
    q, k, v, gamma, decay, S = inputs.values()
    return lattice(q, k, v, gamma, decay=decay, initial_state=S, output_final_state=final, backend=backend)


def results(inputs: Inputs, gradients: list[Tensor], backend: str = "triton") -> dict[str, Tensor]:
    """The outputs, the final state and the gradients of the inputs, by name."""
    o, S = call(inputs, True, backend)
    wanted = {f"d{name}": x for name, x in inputs.items() if x is not None}
    found = torch.autograd.grad([o, S], list(wanted.values()), [d.to(x.dtype) for d, x in zip(gradients, (o, S))])
    return {"o": o, "S": S, **dict(zip(wanted, found))}


def backward(inputs: Inputs, o: Tensor, d_o: Tensor) -> tuple[Tensor, ...]:
    """The gradients of all inputs. The graph stays for another call."""
    return torch.autograd.grad(o, [x for x in inputs.values() if x is not None], d_o.to(o.dtype), retain_graph=True)


def distances(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], kind: str) -> dict[str, Value]:
    """Of all results, relative to the norm of what is wanted."""
    pairs = {name: (found[name].double(), x.double()) for name, x in wanted.items()}
    return {f"{name}_{kind}": ((x - y).norm() / y.norm()).item() for name, (x, y) in pairs.items()}


def in_form(form: str, parts: int) -> AbstractContextManager[None]:
    return nullcontext() if form == "library" else on_clusters(parts, form == "mbarrier")


def equal_bits(found: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> dict[str, Value]:
    return {"equal_bits": all(torch.equal(x, again[name]) for name, x in found.items())}


def find_errors(case: Case, form: str, parts: int) -> Iterator[dict[str, Value]]:
    inputs, gradients = draw(case)
    exact = {name: None if x is None else x.detach().double().requires_grad_() for name, x in inputs.items()}
    wanted = results(exact, gradients, "torch")
    with in_form(form, parts):
        found = results(inputs, gradients)
        yield distances(found, wanted, "error")
        yield equal_bits(found, results(inputs, gradients))


def find_times(case: Case, form: str, parts: int, repeats: int) -> Iterator[dict[str, Value]]:
    inputs, gradients = draw(case)
    wanted = results(inputs, gradients)
    with in_form(form, parts):
        few = draw(case._replace(T=16))
        results(*few)
        backward(few[0], call(few[0], False)[0], few[1][0])
        torch.cuda.synchronize()
        print("  kernels are compiled, and have passed 16 tokens", flush=True)
        found = results(inputs, gradients)
        yield distances(found, wanted, "difference")
        yield equal_bits(found, results(inputs, gradients))
        o, _ = call(inputs, False)
        works = {
            "forward_kernels_ms": lambda: call(inputs, False),
            "backward_kernels_ms": lambda: backward(inputs, o, gradients[0]),
        }
        yield dict(kernel_times(works, repeats))
        both = {"forward_backward_ms": lambda: backward(inputs, call(inputs, False)[0], gradients[0])}
        yield dict(interleaved(both, repeats))


def describe_case(case: Case, form: str, parts: int) -> dict[str, str | int]:
    return {"exchange": form, "parts": 1 if form == "library" else parts, **case._asdict()}


def measure(work: str, case: Case, form: str, parts: int, repeats: int, path: Path, origin: Origin) -> None:
    """Measure a case, for a process of its own. After every step the rows of all steps so far are written."""
    values: dict[str, Value] = {}
    found = find_times(case, form, parts, repeats) if work == "times" else find_errors(case, form, parts)
    steps: Iterable[dict[str, Value]] = chain([{"ended": False}], found, [{"ended": True}])
    for new in steps:
        values |= new
        print("  " + ", ".join(f"{name} {value}" for name, value in new.items()), flush=True)
        replace_rows(path, make_rows(TASK, origin, values, column=describe_case(case, form, parts)))
