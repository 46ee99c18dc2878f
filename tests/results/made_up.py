"""Results as runs would give them, without a run."""

from typing import Any

from fastweights.results import LanguageResult, RecallResult

RUN = {
    "task": "mqar-shuffled",
    "length": None,
    "vocab_size": 64,
    "width": 32,
    "heads": 4,
    "layers": 1,
    "steps": 100,
    "batch_size": 32,
    "test_examples": 1024,
}

TRAINED = LanguageResult(
    name="gdn",
    folder="somewhere",
    run={"length": 64},
    parameters=1000,
    state_size=48,
    steps=30,
    tokens=30 * 128,
    loss_steps=[10, 20, 30],
    losses=[3.0, 2.0, 1.0],
    held_out_steps=[15, 30],
    held_out_losses=[2.5, 1.5],
    perplexities=[
        {"length": length, "loss": loss, "last_loss": loss / 2, "texts": 5, "joined": 2}
        for length, loss in ((256, 2.0), (1024, 1.0))
    ],
    continuation=None,
    seconds=1.0,
    versions={},
    machine={},
)


def made_up(
    mixer: str | dict[str, Any] = "gdn",
    pairs: int = 4,
    rate: float = 0.01,
    seed: int = 0,
    accuracy: float | None = 0.5,
    **changes: Any,
) -> RecallResult:
    fields: dict[str, Any] = {
        "run": {**RUN, "mixer": mixer, "pairs": pairs, "learning_rate": rate, "seed": seed},
        "status": "diverged" if accuracy is None else "finished",
        "stopped_at": 100,
        "accuracy": accuracy,
        "accuracy_steps": [100],
        "accuracies": [accuracy or 0.0],
        "loss_steps": [50, 100],
        "losses": [2.0, 1.0],
        "undertrained": False,
        "parameters": 1000,
        "state_size": 256,
        "wall_seconds": 1.0,
        "cpu_seconds": 1.0,
        "versions": {"torch": "2.9"},
        "machine": {"cores": 2},
    }
    return RecallResult(**{**fields, **changes})
