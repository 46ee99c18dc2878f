"""How many kernels a decoding step of every mixer launches. They are recorded in place of being run, so no GPU is needed.

    python -m fastweights_studies.measure.decode_launches
        one token of a block, a mixer and an MLP with their norms, as captured steps of generate() read it
    python -m fastweights_studies.measure.decode_launches --pool
        of a mixer alone, in a pool of states, as vLLM reads it
    python -m fastweights_studies.measure.decode_launches --mixers pla
        with the names of the kernels

Counted are the launches of our kernels, and one launch for every PyTorch op that computes or copies numbers. PyTorch may launch
more for one op (a matrix product that is split, say). An op that waits for the device is marked: it cannot be part of a CUDA
graph.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fastweights.kernels.runtime import launch_plan
from fastweights.layers import MIXERS, LayerCache, Mixer, build_mixer
from fastweights.models import FastWeightsConfig
from fastweights.models.modeling import FastWeightsBlock
from fastweights.ops.framework import few_tokens
from fastweights.serving.vllm.pool import Layout, PooledMixer
from fastweights_studies.measure.without_gpu import tensors_as_on_gpu

WIDTH, HEADS, SEQUENCES, PROMPT = 128, 2, 2, 3  # the sizes do not matter
WAITS = ("_local_scalar_dense", "nonzero")


class Launches(TorchDispatchMode):
    """Keeps the names of what would be launched on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        results, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in WAITS:
            self.names.append(f"{name} (waits)")
        elif name != "scalar_tensor" and not self._is_view(func, tree_leaves((args, kwargs)), tree_leaves(results)):
            self.names.append(name)
        return results

    @staticmethod
    def _is_view(func: Any, given: list[Any], made: list[Any]) -> bool:
        """Whether it allocates or views memory, or gives no tensor."""
        tensors = [x for x in made if isinstance(x, Tensor)]
        if func._schema.is_mutable:
            return False
        if not tensors or "empty" in func.overloadpacket.__name__:
            return True
        held = {x.untyped_storage()._cdata for x in given if isinstance(x, Tensor)}
        return all(x.untyped_storage()._cdata in held for x in tensors)


@contextmanager
def recorded() -> Iterator[list[str]]:
    """Inside, tensors on a CPU go where those of a GPU would, and our kernels compute nothing."""
    launches = Launches()

    def launch(kernel: Any, *given: Any) -> None:
        launches.names.append(kernel.__name__)

    with (
        tensors_as_on_gpu(),
        mock.patch.object(launch_plan, "fast_launch", lambda: False),
        mock.patch.object(launch_plan, "plain_launch", launch),
        launches,
    ):
        yield launches.names


@torch.no_grad()
def of_a_step(layer: Mixer | FastWeightsBlock, x_N1D: Tensor) -> list[str]:
    """What a token more launches."""
    mixer: Any = layer if isinstance(layer, Mixer) else layer.mixer
    cache = LayerCache()
    layer(x_N1D.expand(-1, PROMPT, -1), cache)
    fixed = mixer.fixed_cache(cache, 8)
    with recorded() as names, few_tokens.overwriting_states():
        step = LayerCache(dict(fixed.memory), dict(fixed.context))
        layer(x_N1D, step)
        fixed.keep(step)
    return names


@torch.no_grad()
def of_a_step_in_a_pool(mixer: Mixer, x_N1D: Tensor) -> list[str]:
    rows = torch.arange(len(x_N1D), dtype=torch.int32)  # the first is padding
    blocks = torch.zeros(len(rows), Layout(mixer.state_spec()).size, dtype=torch.uint8)
    pooled = PooledMixer(mixer, blocks)
    with recorded() as names:
        pooled.decode(x_N1D[:, 0], rows)
    return names


def count(name: str, where: str) -> list[str]:
    """where: "block", or of a mixer alone "layer" or "pool"."""
    torch.manual_seed(0)
    x_N1D = torch.randn(SEQUENCES, 1, WIDTH, dtype=torch.bfloat16)
    if where == "block":
        config = FastWeightsConfig(mixer=name, hidden_size=WIDTH, num_heads=HEADS, num_hidden_layers=1, vocab_size=8)
        return of_a_step(FastWeightsBlock(config, 0).to(torch.bfloat16).eval(), x_N1D)
    mixer = build_mixer(name, hidden_size=WIDTH, num_heads=HEADS).to(torch.bfloat16).eval()
    return (of_a_step_in_a_pool if where == "pool" else of_a_step)(mixer, x_N1D)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixers", help="comma-separated; all without names of kernels by default")
    parser.add_argument("--pool", action="store_true")
    arguments = parser.parse_args()
    asked = arguments.mixers.split(",") if arguments.mixers else list(MIXERS)
    for name in asked:
        if arguments.pool and name in ("softmax", "vla-softmax"):  # their memory grows, so it lies in no pool
            continue
        names = count(name, "pool" if arguments.pool else "block")
        print(f"{name:20s} {len(names):4d}" + (f"  {' '.join(names)}" if arguments.mixers else ""), flush=True)


if __name__ == "__main__":
    main()
