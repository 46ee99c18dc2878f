"""Hybrids of a tiny teacher go through the whole study, as far as no GPU is needed."""

from __future__ import annotations

import dataclasses
import pickle
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from fastweights_studies.measure import linearization, linearization_training
from fastweights_studies.measure.linearization import DISTILLED, FULL, LOSS, NOTHING, SPEED, TASK, TEACHER, Plan, Study
from fastweights_studies.measure.linearization_training import tokens_until
from fastweights_studies.record import read_rows, select
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.data.text import TextSource, TextTokenizer
from fastweights.evaluation import EvaluationSettings
from fastweights.training.language.processes import world_size
from tests.training.language.small import small_run


def tiny(folder: Path, **changes: Any) -> Plan:
    (code,) = small_run(folder).corpus.singles
    small = {
        "length": 32, "batch_size": 2, "precision": "no", "evaluate_every": 2, "evaluation_rows": 4,
        "checkpoint_every": 100,
    }  # fmt: skip
    stages = tuple({**stage, "max_tokens": 128} for stage in FULL.load("distill").stages)
    return dataclasses.replace(
        FULL,
        **{
            "llama": {
                "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
                "intermediate_size": 16, "tie_word_embeddings": True,
            },
            "code": TextSource(paths=code.paths, held_out_fraction=code.held_out_fraction),
            "documents": 20,
            "memories": {"gdn": {}},
            "kept": ("every:2",),
            "best": 1,
            "asked": EvaluationSettings(
                measures=FULL.asked.measures, lengths=(512,), ruler_examples=2, needle_examples=1, depths=(0.5,)
            ),
            "timed": ("gdn",),
            "steps": 8,
            "warm": 2,
            "changes": {
                "teacher": {**small, "tokenizer": TextTokenizer(vocab_size=300), "max_tokens": 512},
                "student": {**small, "max_tokens": 256},
                "distill": {**small, "stages": stages},
            },
            **changes,
        },
    )  # fmt: skip


def make_study(tmp_path: Path, workers: int = 1, **changes: Any) -> Study:
    plan = tiny(tmp_path, **changes)
    return Study(
        plan=plan, folder=tmp_path / "study", path=tmp_path / "rows.json", device="a processor", cuda=False, workers=workers
    )  # fmt: skip


@pytest.mark.parametrize("seeds", [(0,), pytest.param((0, 1), marks=pytest.mark.slow)])
def test_the_whole_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seeds: tuple[int, ...]) -> None:
    """With several seeds the better of two memories gets the second one."""
    study = make_study(
        tmp_path, seeds=seeds, memories={"gdn": {}, "softmax": {"window": 8}} if len(seeds) > 1 else {"gdn": {}}
    )
    cut = dataclasses.replace(study, limit=0.0)
    assert cut.carry_out() == [TEACHER, "speed, which needs the teacher"]  # its limit was reached
    over = dataclasses.replace(study, until=time.time() + 1)
    assert over.carry_out(["teacher"]) == [TEACHER] and not study.path.exists()
    assert pickle.loads(pickle.dumps(study._teacher())).run == study._teacher().run  # as a worker gets it
    assert study.carry_out() == []
    rows = read_rows(study.path)
    assert {(row.column["trained"], row.seed) for row in select(rows, task=TASK)} == {
        (TEACHER, 0), *((trained, seed) for trained in (DISTILLED, NOTHING) for seed in seeds),
    }  # fmt: skip
    losses = {row.mixer: row.value for row in select(rows, measure=LOSS, seed=0, column={"trained": DISTILLED})}
    assert {row.mixer for row in select(rows, task=TASK, seed=1)} == (
        {min(losses, key=losses.__getitem__)} if len(seeds) > 1 else set()
    )
    for trained in (DISTILLED, NOTHING):
        found = select(rows, column={"trained": trained, "kept": "every:2"}, mixer="gdn", seed=0)
        measures = {row.measure for row in found}
        assert measures >= {LOSS, "state", "tokens_until_near", "recall_exact", "needle_nats", "needle_found"}
        assert ("kl_nats" in measures) == (trained == DISTILLED)
        assert {row.run["tokens"] for row in found} == {256}
    speeds = select(rows, task=SPEED, measure="tokens_per_second")
    assert [row.column["objective"] for row in speeds] == list(linearization.OBJECTIVES)
    assert all(row.value is not None and row.value > 0 for row in speeds)
    teacher = LlamaForCausalLM.from_pretrained(study.folder / "teacher")
    assert type(teacher) is LlamaForCausalLM and teacher.config.model_type == "llama"
    assert len(list((study.folder / "tokens").glob("tokens-*"))) == 2  # of both sources, the same in every training
    assert not list(study.folder.rglob("checkpoints")) and not list((study.folder / "trained").rglob("model"))
    before = study.path.read_text()
    monkeypatch.setattr(linearization.Training, "__call__", None)  # nothing is trained again
    assert study.carry_out() == [] and study.path.read_text() == before


@pytest.mark.slow
def test_several_at_a_time_that_stop_and_continue_have_the_rows_of_one(tmp_path: Path) -> None:
    """In bfloat16, as on a GPU. When time is over, what has not begun does not begin."""
    usual = tiny(tmp_path)
    changes = {name: {**fields, "precision": "bf16"} for name, fields in usual.changes.items()}
    alone, several = (
        make_study(
            tmp_path / name, workers, seeds=(0,), memories={"gdn": {}, "softmax": {"window": 8}}, changes=changes
        )
        for name, workers in (("alone", 1), ("several", 2))
    )
    assert alone.carry_out() == several.carry_out(["teacher"]) == []
    over = dataclasses.replace(several, until=time.time() + linearization_training.SHORTEST + 10)
    while left := over.carry_out(["students"]):
        assert set(left) <= {one.name for one in several._trainings(several._first_students)}
        over = dataclasses.replace(several, until=time.time() + 60)
    values = [
        {(row.mixer, str(row.column), row.measure): row.value for row in select(read_rows(study.path), task=TASK)}
        for study in (alone, several)
    ]
    assert values[0] == values[1]


def test_the_tokens_until_a_loss() -> None:
    curve = [(10, 3.0), (20, 2.0), (30, 2.5)]
    assert [tokens_until(curve, loss) for loss in (3.5, 2.2, 2.0, 1.0)] == [10, 20, 20, None]


def test_the_full_study_is_what_it_says() -> None:
    """112M parameters; 5% of the teacher's tokens, for both ways of training."""
    teacher, student, stages = (
        FULL.load("teacher"),
        FULL.load("student"),
        FULL.load("distill", teacher="x").stage_runs(),
    )
    tokens = [run.plan(world_size()) for run in (teacher, student, *stages)]
    read = [plan.tokens(plan.steps) for plan in tokens]
    assert read[1] == pytest.approx(0.05 * read[0], rel=0.01) and sum(read[2:]) == pytest.approx(read[1], rel=0.01)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**FULL.llama, vocab_size=teacher.tokenizer.vocab_size))
    assert round(model.num_parameters() / 1e6) == 112
    assert set(FULL.memories) == {"gdn", "kda", "pgdn", "gka", "palimpsa-d", "lattice", "rls", "softmax"}


def test_a_teacher_of_fewer_tokens() -> None:
    plan = FULL.with_tokens(32_000_000)
    assert [plan.load(name).max_tokens for name in ("teacher", "student")] == [32_000_000, 1_600_000]
    assert [stage["max_tokens"] for stage in plan.load("distill").stages] == [400_000, 1_200_000]
    assert [stage["objective"] for stage in plan.load("distill").stages] == ["attention", "logits"]


def test_memories_are_chosen() -> None:
    plan = linearization.choose(FULL, "gdn,softmax:window=64")
    assert plan.memories == {"gdn": {}, "softmax": {"window": 64}} and plan.timed == ("gdn",)
    assert linearization.choose(FULL, None) is FULL


def test_without_a_gpu_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["linearization.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        linearization.main()
