"""Sizes of the leaderboard that train in seconds, and training in this process in place of spawned ones."""

from __future__ import annotations

from fastweights_studies.leaderboard.sizes import LanguageSize, Size, TaskSize

from fastweights.results.recall import save_result
from fastweights.training import train_run

SHARED = {
    "vocab_size": 16, "width": 8, "heads": 2, "layers": 1, "steps": 3, "batch_size": 2, "test_examples": 8, "evaluations": 1,
}  # fmt: skip


def task(*columns, rates=(1e-3, 1e-2), seeds=(0, 1), **shared):
    return TaskSize(
        shared={**SHARED, **shared}, columns={name: (4, fields) for name, fields in columns}, rates=rates, seeds=seeds
    )


TOY = Size(
    device="cpu",
    tasks={
        "mqar": task(
            ("shuffled", {"task": "mqar-shuffled", "pairs": (2,)}),
            ("ordered", {"task": "mqar-shuffled", "pairs": (2,), "task_options": {"query_order": "ordered"}}),
        ),
        "regression": task(("r", {"task": "regression", "pairs": (3,), "task_options": {"inputs": 2}})),
        "tracking": task(("s3", {"task": "s3", "pairs": (4,)})),
    },
    language=LanguageSize(
        model={"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "tie_word_embeddings": True},
        training={
            "length": 32, "batch_size": 2, "max_steps": 2, "evaluation_rows": 2, "checkpoint_every": 2, "log_every": 1,
            "context_lengths": (16, 32), "context_texts": 2,
        },
        vocabulary=300, head_dim=4, rates=(1e-3, 1e-2), seeds=(0, 1), needles=(400,), examples=1, depths=(0.5,), close=100.0,
    ),
    cost=dict.fromkeys(("mqar", "regression", "tracking", "language", "needle"), "seconds"),
)  # fmt: skip


def train_here(monkeypatch):
    """Has `run_recall_parts` train in this process; the runs that it trains are added to the list returned."""
    trained = []

    def train_jobs(jobs, *others):
        for job in jobs:
            if not job.has_ended():
                trained.append(job.run)
                save_result(job.folder.result(job.run), train_run(job.run, job.folder.checkpoint(job.run)))

    monkeypatch.setattr("fastweights.training.recall.run.train_jobs", train_jobs)
    return trained
