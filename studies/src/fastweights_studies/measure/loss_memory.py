"""Peak memory of the loss of a language model, forward + backward: chunked cross-entropy against the logits of all tokens.

    python -m fastweights_studies.measure.loss_memory
    python -m fastweights_studies.measure.loss_memory --tokens 16384 --hidden 1024 --dtype bfloat16 --device cuda

What is counted is what the loss adds to the hidden states and the weight that are there anyway. Each side runs in a process of
its own; nothing is reported when their values or gradients disagree.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastweights.models.loss import summed_cross_entropy
from fastweights_studies.measure.ops_cpu import resident_kilobytes

MEBIBYTE = 2**20


def ordinary(hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.mT).float(), target, reduction="sum")


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "all logits": ordinary,
    "chunked": summed_cross_entropy,
}


def draw(tokens: int, hidden: int, vocabulary: int, dtype: str, device: str) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    h = torch.randn(tokens, hidden, generator=generator).to(device, getattr(torch, dtype)).requires_grad_()
    w = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(device, h.dtype).requires_grad_()
    return h, w, torch.randint(vocabulary, (tokens,), generator=generator).to(device)


def values(name: str, h: Tensor, w: Tensor, target: Tensor) -> list[Tensor]:
    loss = LOSSES[name](h, w, target)
    return [loss.detach(), *torch.autograd.grad(loss, (h, w))]


def peak(name: str, sizes: dict[str, Any], queue: Any) -> None:
    values(name, *draw(**{**sizes, "tokens": 8}))  # libraries and buffers that stay
    h, w, target = draw(**sizes)
    if sizes["device"] == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        values(name, h, w, target)
        queue.put((torch.cuda.max_memory_allocated() - before) / MEBIBYTE)
    else:
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
        before = resident_kilobytes("VmRSS")
        values(name, h, w, target)
        queue.put((resident_kilobytes("VmHWM") - before) / 1024)


def peak_mebibytes(name: str, sizes: dict[str, Any]) -> float:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak, args=(name, sizes, queue))
    process.start()
    result = queue.get(timeout=600)
    process.join()
    return result


def check(sizes: dict[str, Any]) -> None:
    """Both sides agree on a tenth of the tokens."""
    inputs = draw(**{**sizes, "tokens": max(sizes["tokens"] // 10, 1)})
    tolerance = 1e-4 if sizes["dtype"] == "float32" else 2e-2
    for got, wanted in zip(values("chunked", *inputs), values("all logits", *inputs)):
        error = float((got.float() - wanted.float()).norm() / wanted.float().norm())
        if not error < tolerance:
            raise SystemExit(f"the two losses differ by {error:.1e}, so no memory is reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    sizes = vars(parser.parse_args())
    if sizes["device"] == "cpu" and not Path("/proc/self/clear_refs").exists():
        raise SystemExit("the peak memory of a process can only be read on Linux; use --device cuda")
    check(sizes)
    logits = sizes["tokens"] * sizes["vocabulary"] * 4 / MEBIBYTE
    print(", ".join(f"{name} {size}" for name, size in sizes.items()) + f": logits in float32 {logits:.0f} MiB")
    for name in LOSSES:
        print(f"{name:12s} peak {peak_mebibytes(name, sizes):8.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
