"""Sizes of the leaderboard that train in seconds, training in this process in place of spawned ones, and rows."""

from __future__ import annotations

from dataclasses import replace

from fastweights_studies.leaderboard import PARTS
from fastweights_studies.leaderboard.sizes import Budget, LanguageSize, MatchedLanguageSize, Size, TaskSize
from fastweights_studies.record import Origin, Row

from fastweights.results.recall import save_result
from fastweights.training import train_run

SHARED = {
    "vocab_size": 16, "width": 8, "heads": 2, "layers": 1, "steps": 3, "batch_size": 2, "test_examples": 8, "evaluations": 1,
}  # fmt: skip


RECALL = TaskSize(
    shared={**SHARED, "steps": 4, "evaluations": 2, "validation_examples": 8, "stop_at": 0.99, "seed_by_name": True},
    columns=({"task": "mqar-shuffled", "head_dim": 4, "block": "matched"},), rates=(1e-3, 1e-2), limits=(1e-4, 0.1), seeds=(0, 1),
    mixed=(2, 3), tokens=16,
)  # fmt: skip


def task(*columns, rates=(1e-3, 1e-2), seeds=(0, 1), **shared):
    columns = tuple({"head_dim": 4, **column} for column in columns)
    return TaskSize(shared={**SHARED, **shared}, columns=columns, rates=rates, seeds=seeds)


PROXIES = MatchedLanguageSize(
    model={"hidden_size": 8, "num_hidden_layers": 4, "num_heads": 2, "tie_word_embeddings": True},
    training={
        "length": 256, "batch_size": 2, "evaluation_rows": 2, "checkpoint_every": 2, "log_every": 1, "evaluate_every": 1,
    },
    rates=(1e-3, 1e-2), budgets={500: Budget(seeds=(0, 1))}, vocabulary=300, head_dim=4,
    source="python", recall_documents=40, rows=3, positions=(0, 16, 256), contexts=(16, 64), context_texts=2, needles=(400,),
    examples=1, depths=(0.5,), decoded=0, decodings=1, train_pieces=1,
)  # fmt: skip
LANGUAGE = replace(
    PROXIES, budgets={1000: Budget(seeds=(0, 1)), 2000: Budget(seeds=(0,), mixers=("linear",))}, decoded=2, train_pieces=None,
)  # fmt: skip
TOY = Size(
    device="cpu",
    tasks={
        "recall": RECALL,
        "recall-published": replace(RECALL, columns=({**RECALL.columns[0], "block": "published"},)),
        "recall-blocks": replace(RECALL, columns=({**RECALL.columns[0], "block": "with-gate"},)),
        "tasks": replace(RECALL, columns=({"task": "copy", "pairs": 3, "head_dim": 4, "block": "matched"},), mixed=()),
        "regression-matched": task(
            {"task": "regression", "pairs": 3, "inputs": 2, "noise": 0.1, "block": "matched"}, validation_examples=8,
            seed_by_name=True,
        ),
        "mqar": task(
            {"task": "mqar-shuffled", "pairs": 2, "query_order": "shuffled"},
            {"task": "mqar-shuffled", "pairs": 2, "query_order": "ordered"},
        ),
        "regression": task({"task": "regression", "pairs": 3, "inputs": 2, "noise": 0.1}),
        "tracking": task({"task": "s3", "pairs": 4}),
    },
    own=task({"pairs": 2}),
    language=LanguageSize(
        model={"hidden_size": 8, "num_hidden_layers": 1, "num_heads": 2, "tie_word_embeddings": True},
        training={
            "length": 32, "batch_size": 2, "max_steps": 2, "evaluation_rows": 2, "checkpoint_every": 2, "log_every": 1,
            "context_lengths": (16, 32), "context_texts": 2,
        },
        vocabulary=300, head_dim=4, rates=(1e-3, 1e-2), seeds=(0, 1), close=100.0,
    ),
    matched_language={
        "language-proxies": PROXIES,
        "language-matched": LANGUAGE,
        "hybrids": replace(LANGUAGE, softmax_every=(4, 2), budgets={1000: Budget(seeds=(0,))}),
    },
    cost=dict.fromkeys(
        (
            "recall", "recall-published", "recall-blocks", "tasks", "regression-matched", "mqar", "regression", "tracking",
            "language", "language-proxies", "language-matched", "hybrids",
        ),
        "seconds",
    ),
)  # fmt: skip


S3 = "s3, 4 tokens"  # the column of tracking
NOWHERE = Origin(
    device="A machine", versions={"torch": "2.0", "fastweights": "1.0"}, commit="unknown", date="2026-01-02"
)


def make_row(part="mqar", *, column=0, mixer="gdn", value=0.5, seed=0, measure=None, size="small", **run):
    """A row of a declared column of a part."""
    declared = PARTS[part].setting(size)[column]
    facts = {
        "parameters": 1234, "state": 9, "grows": mixer == "softmax", "chance": 0.25, "undertrained": False, "learning_rate": 1e-3,
        "diverged": 0, "trainings": 1,
    }  # fmt: skip
    return Row(
        task=part, measure=measure or PARTS[part].value, unit="1", column=declared.parameters, mixer=mixer, seed=seed,
        value=value, run={**declared.setting, **facts, **run}, origin=NOWHERE,
    )  # fmt: skip


def read_entries(part, folder):
    """What the boards of a folder have at the small size, by column and label."""
    return {(one.column, one.label): one for one in PARTS[part].entries(PARTS[part].rows("small", folder, folder))}


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
