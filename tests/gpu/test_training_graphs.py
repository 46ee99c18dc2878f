"""A language model whose steps are replayed as CUDA graphs has the losses of one whose kernels are launched one by one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights.cuda_graphs import captured
from fastweights.data.text import TextCorpus, TextTokenizer
from fastweights.training.language import graphs, train_language
from fastweights.training.language.run import LanguageRun

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

FAMILIES = [
    "gdn",
    "gka",
    "lattice",
    "linear",
    "mesa",
    "palimpsa-d",
    "pkda",
    "rls",
    "softmax",
    "ttt",
    "vla",
]  # of kernels


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("graphs")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every graph that is made: the places that it has for the edges of documents."""
    made: list[int] = []
    capture = graphs.GraphedGradients._capture

    def counted(self: Any, inputs: Any) -> Any:
        found = capture(self, inputs)
        if found is not None:
            made.append(self.edges)
        return found

    monkeypatch.setattr(graphs.GraphedGradients, "_capture", counted)
    return made


def train(folder: Path, name: str, stop_at: int | None = None, **changes: Any) -> list[float]:
    """The losses of every step, and the held-out losses."""
    settings: dict[str, Any] = {
        "model": {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "tie_word_embeddings": True, "mixer": "gdn"},
        "corpus": TextCorpus(max_megabytes=4), "tokenizer": TextTokenizer(vocab_size=1024), "cache": str(folder / "tokens"),
        "length": 256, "batch_size": 8, "max_steps": 16, "learning_rate": 2e-3, "log_every": 1, "evaluation_rows": 16,
        "evaluate_every": 8, "checkpoint_every": 8, "context_lengths": (), "compile": False, "precision": "bf16",
    }  # fmt: skip
    train_language(LanguageRun(**{**settings, **changes}, output=str(folder / name)), stop_at=stop_at)
    points = map(json.loads, (folder / name / "log.jsonl").read_text().splitlines())
    return [point.get("loss", point.get("held_out_loss")) for point in points]


@pytest.mark.parametrize("mixer", FAMILIES)
def test_losses_are_those_without_graphs(folder: Path, captures: list[int], mixer: str) -> None:
    model = {"hidden_size": 128, "num_hidden_layers": 2, "num_heads": 2, "tie_word_embeddings": True, "mixer": mixer}
    launched = train(folder, f"{mixer}-launched", model=model, graphs=False)
    assert not captures
    replayed = train(folder, f"{mixer}-replayed", model=model)
    assert len(captures) >= 1
    print(mixer, "largest relative difference", max(abs(1 - b / a) for a, b in zip(launched, replayed)))
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(launched), rtol=1e-4, atol=0)


@pytest.mark.parametrize(
    "changes",
    [{"accumulation": 2, "batch_size": 4}, {"precision": "no"}, {"compile": "blocks"}, {"compile": True}],
    ids=["passes", "float32", "blocks", "whole"],
)
def test_settings(folder: Path, captures: list[int], changes: dict[str, Any]) -> None:
    name = "-".join(map(str, changes))
    launched = train(folder, f"{name}-launched-{changes}", graphs=False, **changes)
    replayed = train(folder, f"{name}-replayed-{changes}", **changes)
    assert len(captures) == len(set(captures)) >= 1  # all passes of a step share a graph
    torch.testing.assert_close(torch.tensor(replayed), torch.tensor(launched), rtol=1e-4, atol=0)


def test_a_training_that_continues_has_the_same_losses(folder: Path, captures: list[int]) -> None:
    whole = train(folder, "whole")
    train(folder, "continued", stop_at=8)
    assert train(folder, "continued") == whole
    assert len(captures) >= 3


def test_graphs_are_few(folder: Path, captures: list[int]) -> None:
    """Documents of every step are others; a graph has room for more than it was made for."""
    train(folder, "many", max_steps=60, evaluate_every=0, checkpoint_every=60)
    assert 1 <= len(captures) <= 3 and captures == sorted(captures)


def test_a_capture_that_fails_leaves_stream_and_random_numbers_as_they_were() -> None:
    def work() -> None:
        torch.rand(4, device="cuda")
        torch.cuda.synchronize()

    stream, random = torch.cuda.current_stream(), torch.cuda.get_rng_state()
    wanted = torch.rand(4, device="cuda")
    torch.cuda.set_rng_state(random)
    with pytest.raises(RuntimeError):
        captured(work, torch.device("cuda", 0))
    assert torch.cuda.current_stream() == stream
    assert torch.equal(torch.rand(4, device="cuda"), wanted)
