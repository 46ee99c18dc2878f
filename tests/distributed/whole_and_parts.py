"""What the processes of the tests of models run: a model of whole sequences beside the same one with context parallelism."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fastweights.distributed import context_parallel, gather_tokens
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

__all__ = ["BATCHES", "DTYPE", "batch", "close", "compare", "gradients", "language_model", "mean_gradients"]

VOCABULARY = 32
DTYPE = torch.float64
DESCRIPTIONS = ("attention_mask", "position_ids", "cu_seqlens", "seq_idx")


def _mask(time: int, *spans: tuple[int, int]) -> Tensor:
    column = torch.arange(time)
    return torch.stack([(column >= start) & (column < end) for start, end in spans]).long()


# Shape of the ids, and what describes their documents. With 4 processes a part of "packed" has 10 tokens, of which the last part
# repeats two; its documents end at a border, reach over three parts, or hold no token. With 2 processes a part has 19.
BATCHES: dict[str, tuple[tuple[int, int], dict[str, Tensor]]] = {
    "packed": ((1, 38), {"cu_seqlens": torch.tensor([0, 10, 13, 13, 34, 38])}),
    "borders": ((1, 16), {"cu_seqlens": torch.tensor([0, 4, 8, 16], dtype=torch.int32)}),
    "padded": ((3, 13), {"attention_mask": _mask(13, (4, 13), (0, 13), (0, 6))}),
    "one text": ((1, 24), {}),
    "uneven": ((2, 17), {}),
    "numbers": ((2, 11), {"attention_mask": torch.tensor([[0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 0], [1] * 5 + [0] * 2 + [2] * 4])}),
    "positions": ((2, 10), {"position_ids": torch.tensor([[*range(7), *range(3)], [*range(10)]])}),
    "seq_idx": ((1, 21), {"seq_idx": torch.tensor([[0] * 9 + [1] * 8 + [-1] * 4])}),
    "short": ((1, 3), {}),
}  # fmt: skip


def batch(name: str) -> dict[str, Tensor]:
    shape, described = BATCHES[name]
    ids = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(ids % 7 == 0, -100)
    return {"input_ids": ids, "labels": labels, **described}


def language_model(mixer: Any, **options: Any) -> FastWeightsForCausalLM:
    """In training mode, with weights far enough from zero that every part of a layer matters."""
    layers = len(mixer) if isinstance(mixer, list) else 2
    settings = {"vocab_size": VOCABULARY, "hidden_size": 24, "num_hidden_layers": layers, "num_heads": 4, **options}
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(FastWeightsConfig(mixer=mixer, initializer_range=0.2, **settings))
    return model.to(DTYPE).train()


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter, zero where it has none."""
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in model.named_parameters()}


def mean_gradients(model: nn.Module) -> dict[str, Tensor]:
    """What DistributedDataParallel would leave in the gradients."""
    means = gradients(model)
    for x in means.values():
        dist.all_reduce(x)
        x /= dist.get_world_size()
    return means


def close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], within: float = 1e-10) -> None:
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], x, rtol=within, atol=within, msg=lambda text, at=name: f"{at}: {text}")


def read(model: Callable[..., Any], given: Mapping[str, Tensor], **options: Any) -> Any:
    outputs = model(**given, **options)
    outputs.loss.backward()
    return outputs


def compare(
    mixer: Any,
    way: str,
    names: tuple[str, ...] = tuple(BATCHES),
    change: Callable[[FastWeightsForCausalLM], Any] | None = None,
    **options: Any,
) -> None:
    """Loss, gradients and hidden states of a model over all processes are those of one process.

    Args:
        names: of `BATCHES`.
        change: applied to the model with context parallelism; it returns what is called.
        options: of the configuration.
    """
    whole = language_model(mixer, **options)
    parts = context_parallel(deepcopy(whole), dist.group.WORLD, way)
    called = parts if change is None else change(parts)
    for name in names:
        given = batch(name)
        wanted, found = read(whole, given, output_hidden_states=True), read(called, given, output_hidden_states=True)
        described = {key: x for key, x in given.items() if key in DESCRIPTIONS}
        shape = dict(zip(("batch", "time"), given["input_ids"].shape, strict=True))
        states = [gather_tokens(x, dist.group.WORLD, **shape, **described) for x in found.hidden_states]
        found_numbers = {"loss": found.loss, **{f"states {n}": x for n, x in enumerate(states)}}
        wanted_numbers = {"loss": wanted.loss, **{f"states {n}": x for n, x in enumerate(wanted.hidden_states)}}
        try:
            close(found_numbers, wanted_numbers)
            close(mean_gradients(parts), gradients(whole))
        except AssertionError as error:
            raise AssertionError(f"{mixer}, {way}, {name}: {error}") from error
        for model in (whole, parts):
            model.zero_grad()
