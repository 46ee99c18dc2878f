"""Variational linear attention forward, beside softmax attention at growing lengths and beside a loop over tokens.

    python -m fastweights_studies.measure.vla
    python -m fastweights_studies.measure.vla --lengths 16384,65536 --repeats 5

One sequence, 8 heads of 64 channels, bfloat16. Softmax attention is torch's, causal, by each of its fused backends that runs. The
loop computes the same memory token by token with PyTorch's operators, in float32; it is called once per repetition at LOOP_LENGTH
tokens, with no graph. Times are medians of replayed CUDA graphs (device time alone), eager calls for the loop. Refreshed is the
layer's default, a refresh every 20 tokens. Writes studies/results/vla-<device>.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from fastweights.ops import variational_linear_attention
from fastweights_studies.measure.environment import describe, find_gpu
from fastweights_studies.measure.judge.timing import Milliseconds, Work, as_graph, interleaved
from fastweights_studies.measure.rows import Value, make_rows, name_file, replace_rows
from fastweights_studies.places import RESULTS
from fastweights_studies.record import Origin, Plain, Row

TASK = "vla"
HEADS, CHANNELS, LOOP_LENGTH, PERIOD, REFRESH, RIDGE, EPS = 8, 64, 4096, 20, 1e-3, 0.1, 1e-4
SOFTMAX = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def draw(length: int, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What the layer hands to the op."""
    raw = torch.randn(4, 1, length, HEADS, CHANNELS, device=device)
    q, k = F.elu(raw[0]) + 1, F.elu(raw[1]) + 1
    tokens = {"q": q, "k": k, "v": raw[2], "u": F.normalize(raw[3], dim=-1) * CHANNELS**-0.5}
    return {name: x.to(dtype) for name, x in tokens.items()}


def by_tokens(q: Tensor, k: Tensor, v: Tensor, u: Tensor) -> Tensor:
    """The definition as a loop, with a refresh."""
    q, k, v, u = (x.float().transpose(0, 1) for x in (q, k, v, u))  # [T, 1, H, K]
    identity = torch.eye(k.shape[-1], device=k.device)
    A, S, z = identity / RIDGE, torch.zeros_like(k[0][..., None] * v[0][..., None, :]), torch.zeros_like(k[0])
    khat, outputs = F.normalize(k, dim=-1), []
    for t in range(len(k)):
        r = (A @ u[t][..., None]).squeeze(-1)
        A = A - r[..., :, None] * (r / (1 + (r * u[t]).sum(-1, keepdim=True)))[..., None, :]
        if (t + 1) % PERIOD == 0:
            A = A + REFRESH * identity
        alpha = F.normalize((A @ khat[t][..., None]).squeeze(-1), dim=-1)
        error = v[t] - (khat[t][..., None, :] @ S).squeeze(-2)
        S = S + alpha[..., :, None] * error[..., None, :]
        z = z + k[t]
        outputs.append((q[t][..., None, :] @ S).squeeze(-2) / (z * q[t]).sum(-1, keepdim=True).clamp_min(EPS))
    return torch.stack(outputs, 1)


def memory(tokens: dict[str, Tensor], period: int | None) -> Tensor:
    q, k, v, u = (tokens[name] for name in "qkvu")
    return variational_linear_attention(q, k, v, u, ridge=RIDGE, refresh_every=period, refresh=REFRESH, eps=EPS)[0]


def softmax(backend: SDPBackend, tokens: dict[str, Tensor]) -> Tensor:
    q, k, v = (tokens[name].transpose(1, 2) for name in "qkv")
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def graphs(works: dict[str, Work]) -> dict[str, Work]:
    """Those that run here, captured."""
    found = {}
    for name, work in works.items():
        try:
            work()
        except RuntimeError:  # a backend that this machine lacks
            continue
        found[name] = as_graph(work)
    return found


def measure(length: int, repeats: int) -> dict[str, Milliseconds]:
    """By what computes: softmax attention's backends, ours as it is and refreshed."""
    tokens = draw(length)
    works: dict[str, Work] = {name: partial(softmax, backend, tokens) for name, backend in SOFTMAX.items()}
    works |= {"vla": partial(memory, tokens, None), "vla_refreshed": partial(memory, tokens, PERIOD)}
    return interleaved(graphs(works), repeats)


def measure_loop(repeats: int) -> tuple[dict[str, Milliseconds], float]:
    """Times of the loop and of ours, and the relative difference of their results."""
    tokens = draw(LOOP_LENGTH)
    exact, ours = by_tokens(**tokens), memory(tokens, PERIOD).float()
    works: dict[str, Work] = {
        "loop": partial(by_tokens, **tokens),
        "vla_refreshed": as_graph(partial(memory, tokens, PERIOD)),
    }
    return interleaved(works, repeats), float((ours - exact).norm() / exact.norm())


def make_vla_rows(length: int, found: Mapping[str, Value], origin: Origin, loop: bool = False) -> list[Row]:
    """Rows by what computes. loop: of the run in which the loop was timed, where ours is timed once more."""
    column: dict[str, Plain] = {"length": length, "heads": HEADS, "channels": CHANNELS, "beside_loop": loop}
    return [
        row
        for by, value in found.items()
        for row in make_rows(TASK, origin, {"forward_ms": value}, column={**column, "by": by})
    ]


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="4096,16384,32768,65536")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    device, started = find_gpu(), time.time()
    output, origin = arguments.output or name_file(RESULTS, "vla", device), describe(device)
    for length in map(int, arguments.lengths.split(",")):
        found = measure(length, arguments.repeats)
        print(f"{length:6d} " + "  ".join(f"{by} {one.median:.3f} ms" for by, one in found.items()), flush=True)
        replace_rows(output, make_vla_rows(length, found, origin))
    loop, difference = measure_loop(2)
    ratio = loop["loop"].median / loop["vla_refreshed"].median
    print(
        f"loop over {LOOP_LENGTH} tokens {loop['loop'].median:.0f} ms, {ratio:.0f} times as long, "
        f"difference {difference:.1e}",
        flush=True,
    )
    rows = make_vla_rows(LOOP_LENGTH, loop, origin, loop=True)
    rows += make_rows(TASK, origin, {"difference_from_loop": difference}, column={"length": LOOP_LENGTH})
    replace_rows(output, rows)
    print(f"written to {output} after {time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
