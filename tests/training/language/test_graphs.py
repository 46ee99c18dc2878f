"""Steps replayed as CUDA graphs, as far as no GPU is needed: fixed shapes, gradients over passes, when a graph is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastweights.cuda_graphs import Waits
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training.language import graphs, train_language
from fastweights.training.language.graphs import WARM, GraphedGradients, append_empty_documents, what_to_graph

from .replayed import Replayed

DOCUMENTS = torch.tensor([0, 5, 12, 20], dtype=torch.int32)


@pytest.mark.parametrize("mixer", ["gdn", "softmax", "palimpsa-d", "vla"])
def test_empty_documents_change_nothing(mixer: str) -> None:
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(
        FastWeightsConfig(mixer=mixer, hidden_size=16, num_hidden_layers=2, num_heads=2, vocab_size=32)
    )
    ids = torch.randint(32, (1, 20))
    found = []
    for edges in (len(DOCUMENTS), 16):
        loss = model(input_ids=ids, labels=ids, cu_seqlens=append_empty_documents(DOCUMENTS, edges)).loss
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Replayed]:
    """What was captured, as a list that grows."""
    made: list[Replayed] = []

    def captured(work: Any, device: torch.device) -> tuple[Any, torch.Tensor]:
        made.append(Replayed(work, WEIGHTS))
        return made[-1], made[-1].loss

    monkeypatch.setattr(graphs, "captured", captured)
    monkeypatch.setattr(graphs, "refusing_waits", torch.enable_grad)
    return made


WEIGHTS = [torch.nn.Parameter(torch.tensor([1.0, 2.0])), torch.nn.Parameter(torch.tensor([3.0]))]


def work(inputs: Any) -> torch.Tensor:
    """Gradients: the sum of x; the sum over the documents of (their length)^2."""
    loss = WEIGHTS[0].sum() * inputs["x"].sum() + WEIGHTS[1].sum() * inputs["cu_seqlens"].diff().square().sum()
    loss.backward()
    return loss.detach()


def batch(number: int, documents: int) -> dict[str, torch.Tensor]:
    x = torch.arange(4.0) + number
    return {"x": x, "cu_seqlens": torch.arange(documents + 1, dtype=torch.int32) * (number + 1)}


def gradients_of(take: Callable[[Any], torch.Tensor], batches: list[Any]) -> list[float]:
    for weight in WEIGHTS:
        weight.grad = None
    losses = [take(one).item() for one in batches]
    return losses + [x for weight in WEIGHTS for x in weight.grad.tolist()]


@pytest.mark.parametrize("passes", [1, 2])
def test_every_step_has_the_gradients_of_its_batches(captures: list[Replayed], passes: int) -> None:
    graphed = GraphedGradients(WEIGHTS, work, passes=passes)
    number = 0
    for documents in (3, 9, 2, 5, 8, 1):
        batches = [batch(number + i, documents) for i in range(passes)]
        number += passes
        assert gradients_of(graphed, batches) == gradients_of(work, batches)
    assert len(captures) == 1


def test_the_last_pass_of_a_step_has_a_graph_of_its_own(captures: list[Replayed]) -> None:
    """In several processes gradients are reduced with the last pass. Both graphs add to the same tensors."""
    passes: list[bool] = []

    def reduce(inputs: Any) -> torch.Tensor:
        loss = work(inputs)
        if passes[-1]:
            for weight in WEIGHTS:
                assert weight.grad is not None
                weight.grad.mul_(10)
        return loss

    def take(call: Callable[[Any], torch.Tensor]) -> Callable[[Any], torch.Tensor]:
        def counted(inputs: Any) -> torch.Tensor:
            passes.append(len(passes) % 3 == 2)
            return call(inputs)

        return counted

    graphed = GraphedGradients(WEIGHTS, reduce, passes=3, reduces=lambda: passes[-1])
    for number in range(8):
        batches = [batch(3 * number + i, 3) for i in range(3)]
        passes.clear()
        found = gradients_of(take(graphed), batches)
        passes.clear()
        assert found == gradients_of(take(reduce), batches)
    first, second = captures
    assert all(x is y for x, y in zip(first.gradients, second.gradients, strict=True))


def test_graphs_are_made_later_where_work_waits_at_first(captures: list[Replayed]) -> None:
    graphed = GraphedGradients(WEIGHTS, work, warm=5)
    for number in range(6):
        assert len(captures) == 0
        gradients_of(graphed, [batch(number, 3)])
    assert len(captures) == 1
    graphed.release()
    assert not graphed.graphs


def test_more_documents_than_before_take_a_graph_of_their_own(captures: list[Replayed]) -> None:
    graphed = GraphedGradients(WEIGHTS, work)
    for number in range(WARM + 1):
        gradients_of(graphed, [batch(number, 3)])
    assert len(captures) == 1 and graphed.edges == 16
    for number in range(WARM + 2):
        assert gradients_of(graphed, [batch(number, 40)]) == gradients_of(work, [batch(number, 40)])
        assert (not graphed.graphs) == (number < WARM)  # the first graph's memory is free again
    assert len(captures) == 2 and graphed.edges == 64
    assert gradients_of(graphed, [batch(7, 3)]) == gradients_of(work, [batch(7, 3)])
    assert len(captures) == 2


def refuse_waits(monkeypatch: pytest.MonkeyPatch) -> str:
    class Refused:
        def __enter__(self) -> None:
            raise Waits("called a synchronizing CUDA operation")

        def __exit__(self, *error: Any) -> None: ...

    monkeypatch.setattr(graphs, "refusing_waits", Refused)
    return "called a synchronizing CUDA operation"


def fail_half_way(monkeypatch: pytest.MonkeyPatch) -> str:
    """The capture ends with an error when all gradients are there."""

    def captured(work: Any, device: torch.device) -> Any:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(graphs, "captured", captured)
    return "operation not permitted when stream is capturing"


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("fail", [refuse_waits, fail_half_way])
def test_a_training_continues_where_no_graph_can_be_made(
    captures: list[Replayed], monkeypatch: pytest.MonkeyPatch, fail: Callable[[Any], str], passes: int
) -> None:
    """After one warning, with the same losses and gradients; the failure is that of the second pass where there are two."""
    reason = fail(monkeypatch)
    graphed = GraphedGradients(WEIGHTS, work, passes=passes)
    with pytest.warns(UserWarning, match=f"continues without CUDA graphs, because .*{reason}") as seen:
        for number in range(WARM + 2):
            batches = [batch(number + i, 3) for i in range(passes)]
            assert gradients_of(graphed, batches) == gradients_of(work, batches)
    assert len(seen) == 1 and not graphed.graphs and not captures


def test_a_graph_that_would_train_nothing_ends_the_training(captures: list[Replayed]) -> None:
    """As where something has put other parameters in the place of these."""
    graphed = GraphedGradients([torch.nn.Parameter(torch.zeros(2))], work)
    gradients_of(graphed, [batch(0, 3)] * WARM)
    with pytest.raises(AssertionError, match="gives its parameters no gradients"):
        graphed(batch(0, 3))


@pytest.mark.parametrize("fail", [refuse_waits, fail_half_way])
def test_graphs_that_are_asked_for_are_an_error_where_none_can_be_made(
    captures: list[Replayed], monkeypatch: pytest.MonkeyPatch, fail: Callable[[Any], str]
) -> None:
    reason = fail(monkeypatch)
    graphed = GraphedGradients(WEIGHTS, work, required=True)
    gradients_of(graphed, [batch(0, 3)] * WARM)
    with pytest.raises(ValueError, match=f"graphs must be False or None .*{reason}"):
        graphed(batch(0, 3))


def test_a_later_graph_that_cannot_be_made_does_not_end_the_training(
    captures: list[Replayed], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphed = GraphedGradients(WEIGHTS, work, required=True)
    gradients_of(graphed, [batch(0, 3)] * (WARM + 1))
    fail_half_way(monkeypatch)
    with pytest.warns(UserWarning, match="continues without CUDA graphs"):
        for number in range(WARM + 2):
            assert gradients_of(graphed, [batch(number, 40)]) == gradients_of(work, [batch(number, 40)])


def test_an_error_of_the_work_itself_ends_the_training(captures: list[Replayed]) -> None:
    def broken(inputs: Any) -> torch.Tensor:
        if inputs["x"].sum() > 0:
            raise RuntimeError("the loss of these tokens cannot be computed")
        return work(inputs)

    graphed = GraphedGradients(WEIGHTS, broken)
    good, bad = batch(0, 3), batch(0, 3)
    good["x"].zero_()
    gradients_of(graphed, [good] * WARM)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError, match="cannot be computed"):
        graphed(bad)


@pytest.mark.parametrize("asked", [True, None])
def test_a_run_that_asks_for_graphs_requires_them(
    make_run: Any, monkeypatch: pytest.MonkeyPatch, asked: bool | None
) -> None:
    """The rest of the training is that of a machine without a GPU, where no step can be captured."""
    monkeypatch.setattr("fastweights.training.language.planning._check_device", lambda *arguments: None)
    monkeypatch.setattr("fastweights.training.language.trainer.what_to_graph", lambda run: True)
    fail_half_way(monkeypatch)
    monkeypatch.setattr(graphs, "refusing_waits", torch.enable_grad)
    run = make_run(graphs=asked, max_steps=WARM + 2)
    if asked:
        with pytest.raises(ValueError, match="graphs must be False or None"):
            train_language(run)
    else:
        with pytest.warns(UserWarning, match="continues without CUDA graphs"):
            assert train_language(run)


def test_a_gpu_decides_where_the_run_does_not(make_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not what_to_graph(make_run())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert what_to_graph(make_run()) and not what_to_graph(make_run(graphs=False))
    assert not what_to_graph(make_run(gradient_checkpointing=True)) and not what_to_graph(make_run(precision="fp16"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert what_to_graph(make_run()) and what_to_graph(make_run(fsdp=True, accumulation=1))
    assert not what_to_graph(make_run(fsdp=True, accumulation=2))


def test_graphs_are_refused_where_none_can_be_made(make_run: Any) -> None:
    with pytest.raises(ValueError, match="graphs must be False or None with gradient_checkpointing"):
        make_run(graphs=True, gradient_checkpointing=True)
    with pytest.raises(ValueError, match="graphs must be False or None with fsdp and an accumulation above 1"):
        make_run(graphs=True, fsdp=True, accumulation=2)
    with pytest.raises(TypeError, match="graphs"):
        make_run(graphs=1)
    with pytest.raises(ValueError, match="graphs need a GPU"):
        train_language(make_run(graphs=True))
