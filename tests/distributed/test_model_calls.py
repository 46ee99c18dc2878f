"""What a model over several processes returns besides its loss, which calls it refuses, and which layers of users it takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fastweights.distributed import context_parallel, gather_tokens, own_tokens, sum_over_ranks, whole_sequences
from fastweights.layers import LayerCache, MemoryLayer, Mixer, build_mixer
from fastweights.models import (
    FastWeightsConfig,
    FastWeightsForQuestionAnswering,
    FastWeightsForSequenceClassification,
    FastWeightsForTokenClassification,
    VectorModel,
)
from fastweights.ops import linear_attention
from fastweights.testing.processes import processes

from .whole_and_parts import DTYPE, batch, close, gradients, language_model, mean_gradients, read

PAGE = Path(__file__).parents[2] / "docs" / "context_parallel.md"


def divided(model: Any, way: str = "auto") -> Any:
    return context_parallel(deepcopy(model), dist.group.WORLD, way)


def compare_outputs(change: Callable[[Any], None], **options: Any) -> None:
    """The same numbers on every rank, and the gradient as the mean over the ranks."""
    whole = language_model(["gdn", "softmax"])
    change(whole)
    parts, given = divided(whole), batch("padded")
    wanted, found = read(whole, given, **options), read(parts, given, **options)
    within = 1e-10 if wanted.loss.dtype == DTYPE else 1e-6  # transformers computes some losses in float32
    close({"loss": found.loss}, {"loss": wanted.loss}, within)
    if options.get("logits_to_keep") is not None:
        close({"logits": found.logits}, {"logits": wanted.logits})
    close(mean_gradients(parts), gradients(whole), within)


def plain(model: Any) -> None:
    pass


def without_chunks(model: Any) -> None:
    model.config.chunked_loss = False


def squared_loss(model: Any) -> None:
    """A loss function of the user's own, which gets labels as transformers' do."""

    def loss(
        logits: Tensor, labels: Tensor, shift_labels: Tensor | None = None, num_items_in_batch: Any = None, **_: Any
    ) -> Tensor:
        target = F.pad(labels, (0, 1), value=-100)[:, 1:] if shift_labels is None else shift_labels
        errors = logits.square().mean(-1)[target != -100]
        return errors.mean() if num_items_in_batch is None else errors.sum() / num_items_in_batch

    model.loss_function = loss


def check_outputs() -> None:
    kept = torch.tensor([0, 5, -1])
    for change in (plain, without_chunks, squared_loss):
        compare_outputs(change)
        compare_outputs(change, logits_to_keep=3, num_items_in_batch=7)
    compare_outputs(plain, logits_to_keep=kept, num_items_in_batch=torch.tensor(7))
    model = divided(language_model("gdn"))
    given = batch("uneven")
    assert model(**given).logits is None
    with torch.no_grad():
        evaluated = model.eval()(**given)
    assert evaluated.logits is None
    assert evaluated.past_key_values is None
    own = model(input_ids=given["input_ids"]).logits
    logits = gather_tokens(own, dist.group.WORLD, batch=2, time=17)
    close({"logits": logits}, {"logits": whole_sequences(model)(input_ids=given["input_ids"], use_cache=False).logits})


def check_own_loss() -> None:
    """A loss that is summed over the tokens of every rank, as docs/context_parallel.md says."""
    whole, group = language_model("gdn"), dist.group.WORLD
    parts, given = divided(whole), batch("padded")
    ids, described = given["input_ids"], {"attention_mask": given["attention_mask"]}
    target = ids.masked_fill(described["attention_mask"] == 0, -100)

    def summed(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum") / (ids.numel() - 11)

    wanted = summed(whole(ids, **described).logits, target)
    own = own_tokens(target, group, filling=-100, **described)
    found = sum_over_ranks(summed(parts(ids, **described).logits, own), group)
    for loss in (wanted, found):
        loss.backward()
    close({"loss": found}, {"loss": wanted})
    close(mean_gradients(parts), gradients(whole))


HEADS: dict[str, tuple[Any, Callable[[Tensor], dict[str, Tensor]]]] = {
    "text": (FastWeightsForSequenceClassification, lambda ids: {"labels": ids[:, 0] % 3}),
    "token": (FastWeightsForTokenClassification, lambda ids: {"labels": ids % 3}),
    "answer": (
        FastWeightsForQuestionAnswering,
        lambda ids: {"start_positions": ids[:, 0] % 5, "end_positions": ids[:, 1] % 5},
    ),
}


def check_heads() -> None:
    settings = {"vocab_size": 32, "hidden_size": 24, "num_hidden_layers": 1, "num_heads": 4, "classifier_dropout": 0.0}
    for name, (head, labels) in HEADS.items():
        torch.manual_seed(0)
        whole = head(FastWeightsConfig(mixer="gdn", num_labels=3, **settings)).to(DTYPE).train()
        parts, given = divided(whole), {key: x for key, x in batch("padded").items() if key != "labels"}
        given |= labels(given["input_ids"])
        wanted, found = read(whole, given), read(parts, given)
        shown = {key: x for key, x in wanted.items() if isinstance(x, Tensor)}
        assert len(shown) >= 2, name
        close({key: found[key] for key in shown}, shown)
        close(mean_gradients(parts), gradients(whole))


def check_vectors() -> None:
    """Vectors to vectors, and a group that is a dimension of a mesh."""
    torch.manual_seed(0)
    config = FastWeightsConfig(vocab_size=1, hidden_size=24, num_hidden_layers=1, num_heads=4, mixer="pgdn")
    whole = VectorModel(config, inputs=3, outputs=2).to(DTYPE).train()
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("data", "context"))
    parts = context_parallel(deepcopy(whole), mesh["context"])
    x = torch.randn(2, 13, 3, dtype=DTYPE)
    dist.broadcast(x, 0)
    wanted = whole(x)
    wanted.square().sum().backward()
    own = parts(x)
    found = gather_tokens(own, mesh["context"], batch=2, time=13)
    close({"outputs": found}, {"outputs": wanted})
    found.square().sum().backward()
    close(mean_gradients(parts), gradients(whole))


def check_layer() -> None:
    """A layer outside a model gets its part of several rows."""
    torch.manual_seed(0)
    layer = build_mixer("palimpsa-m", hidden_size=24, num_heads=4).to(DTYPE)
    x = torch.randn(3, 8 * dist.get_world_size(), 24, dtype=DTYPE)
    dist.broadcast(x, 0)
    own = x.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    wanted = layer(x).tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    close({"y": divided(layer)(own)}, {"y": wanted})
    state = divided(layer).state_spec()
    assert {name: x.shape for name, x in state.memory.items()} == {
        name: x.shape for name, x in layer.state_spec().memory.items()
    }
    with pytest.raises(ValueError, match="cache must be None with context parallelism"):
        divided(layer)(own, LayerCache())


class Shifted(MemoryLayer):
    """A user's layer, without a word of processes."""

    op = linear_attention

    def rule(self, x, q, k, v, run):
        return run(linear_attention, q, k, v + 1)


class Cumulative(Mixer):
    """A mean over the tokens so far, by a sum that knows only this process's part."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(hidden_size))

    def forward(self, x, cache=None, cu_seqlens=None):
        return self.scale * x.cumsum(1)


class Rewritten(Shifted):
    """It inherits what `MemoryLayer` says of another forward."""

    def forward(self, x, cache=None, cu_seqlens=None):
        return super().forward(x.cumsum(1), cache, cu_seqlens)


class Declared(Rewritten):
    serves_context_parallel = True


def check_user_layers() -> None:
    torch.manual_seed(0)
    whole = Shifted(hidden_size=24, num_heads=4).to(DTYPE)
    x = torch.ones(1, 8 * dist.get_world_size(), 24, dtype=DTYPE)
    own = x.tensor_split(dist.get_world_size(), 1)[dist.get_rank()]
    close({"y": divided(whole)(own)}, {"y": whole(x).tensor_split(dist.get_world_size(), 1)[dist.get_rank()]})
    for layer in (Cumulative, Rewritten):
        with pytest.raises(
            ValueError, match=f"got {layer.__name__} at 1, whose attribute serves_context_parallel is False"
        ):
            divided(nn.Sequential(Shifted(hidden_size=24, num_heads=4), layer(hidden_size=24, num_heads=4)))
    divided(Declared(hidden_size=24, num_heads=4))


def check_refusals() -> None:
    model, group = language_model("gdn"), dist.group.WORLD
    parts, ids = divided(model), batch("one text")["input_ids"]
    for call, message in (
        (lambda: parts(ids, use_cache=True), "past_key_values must be None and use_cache False"),
        (lambda: parts.generate(ids, max_new_tokens=2, do_sample=False), "call fastweights.distributed.whole_sequences"),
        (lambda: parts(ids, cu_seqlens=torch.tensor([0, 7])), "cu_seqlens must rise from 0 to the length 24"),
        (lambda: context_parallel(nn.Linear(2, 2), group), "model must contain a fastweights.layers.Mixer"),
        (lambda: context_parallel(model, group, "rings"), "way must be one of auto, heads, state"),
        (lambda: gather_tokens(torch.ones(1, 5, 2), group, batch=1, time=24), r"x must be \[1, 12, D\]"),
        (lambda: own_tokens(torch.ones(5), group), r"x must be \[B, T, ...\]"),
        (lambda: divided(language_model("gdn", num_heads=1), "heads")(ids), "must have at most as many processes"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            call()
    fresh = divided(model)
    for x, message in (
        ((ids + dist.get_rank()) % 32, r"got checksum \d+ on rank 0 and \d+ on rank 1"),
        (ids[:, dist.get_rank() :], r"got shape \[1, 24\] on rank 0 and \[1, 23\] on rank 1"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh(x)
    for call in (lambda: context_parallel(model, "four"), lambda: context_parallel([model], group)):
        with pytest.raises(TypeError, match="must be a torch"):
            call()
    assert whole_sequences(parts).generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 26)


def run_page() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    with patch.object(dist, "init_process_group"), patch.object(dist, "destroy_process_group"):
        exec(compile(code, PAGE.name, "exec"), {"__name__": "example"})


@pytest.mark.parametrize(
    "check",
    [
        check_outputs,
        check_own_loss,
        check_heads,
        check_vectors,
        check_layer,
        check_user_layers,
        check_refusals,
        run_page,
    ],
    ids=lambda check: check.__name__,
)
def test_over_two_processes(check: Callable[[], None]) -> None:
    processes(2).run(check)


def test_a_group_must_be_there() -> None:
    with pytest.raises(ValueError, match="call torch.distributed.init_process_group first"):
        context_parallel(language_model("gdn"), dist.group.WORLD)
