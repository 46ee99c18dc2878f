"""S3: is Gated KalmaNet as fast as the gated delta rule?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.ops import delta_rule, gated_kalmanet

from ..claim import Claim
from ..conditions import Conditions, Unmeasured
from ..measurement import Measurement, Number
from ..verdict import Verdict, decided
from ..words import Quantity

LENGTHS, REPEATS = (2048, 4096, 8192, 16384), 10


def time_gradients(call: Callable[[], Tensor], gradient: Tensor) -> float:
    """Median device time of a forward and backward, in milliseconds."""
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call().backward(gradient)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def measure_length(length: int, device: str) -> Iterator[Number]:
    shape, generator = (4, length, 8, 128), torch.Generator(device).manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device=device).bfloat16() for _ in range(3))
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    beta, g = (torch.rand(shape[:3], generator=generator, device=device) for _ in range(2))
    given = (q, k, v, -0.05 * g, beta.bfloat16())
    q, k, v, g, beta = (x.detach().requires_grad_() for x in given)
    gradient = torch.ones_like(v)
    gka = time_gradients(lambda: gated_kalmanet(q, k, v, g)[0], gradient)
    gdn = time_gradients(lambda: delta_rule(q, k, v, beta, g)[0], gradient)
    column = {"length": length}
    yield Number("op_ms", gka, column, mixer="gka")
    yield Number("op_ms", gdn, column, mixer="gdn")
    yield Number("op_ratio", gka / gdn, {**column, "over": "gdn"}, mixer="gka")


def measure(conditions: Conditions) -> Measurement:
    if torch.device(conditions.device).type != "cuda":
        raise Unmeasured("needs a GPU, as the claim is about its kernels; pass --device cuda there")
    return Measurement(tuple(number for length in LENGTHS for number in measure_length(length, conditions.device)))


def decide(found: Measurement) -> Verdict:
    ratios = [found.mean("op_ratio", length=length) for length in LENGTHS]
    return decided(max(ratios) <= 2, "gka over gdn " + ", ".join(f"{x:.2f} at {n}" for x, n in zip(ratios, LENGTHS)))


CLAIM = Claim(
    name="S3",
    paper="gka",
    source="figure 3b",
    says="Forward and backward of Gated KalmaNet take a time comparable to Gated DeltaNet's.",
    printed="comparable, B = 4, 8 heads of 128, T = 2k to 16k",
    setting="Device time of the ops, forward and backward, B = 4, 8 heads of 128, T = 2048 to 16384, bfloat16, eager, one GPU.",
    expected="does not hold",
    forecast="far above 2 times for the op in PyTorch (mesa 31.6 ms to .39 at T = 2048)",
    rule="holds if the op takes at most twice gdn's time at every length.",
    measure=measure,
    decide=decide,
    to_decide=("the authors' kernels on the same GPU; these are ours, whose time says nothing of theirs"),
    until_then="not testable here",
    numbers={
        "op_ms": Quantity("{mixer}, T = {length}, ms", "ms"),
        "op_ratio": Quantity("{mixer} / {over}, T = {length}"),
    },
    device="cuda",
    cost="10 seconds of one GPU",
)
