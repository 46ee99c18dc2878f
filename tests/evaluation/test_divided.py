"""Texts that several processes read together, each a part of them, are measured as by one process."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch.distributed as dist

from fastweights.cli import main
from fastweights.distributed import context_parallel
from fastweights.evaluation import EvaluationSettings, evaluate, perplexity_by_length
from fastweights.evaluation.answers import answer_prompts
from fastweights.testing.processes import processes

from ..training.language.launching import torchrun
from .small import BLOCK, HYBRID, LONG, Numbers, model, questions, tokenizer


def measure(mixer, is_divided):
    lm = model(mixer, initializer_range=0.2, num_heads=4)
    asked = questions(lm)
    if is_divided:
        context_parallel(lm, dist.group.WORLD)
    rows = perplexity_by_length(lm, LONG, [40, 129], block=BLOCK, batch_size=2)
    return answer_prompts(lm, Numbers(), asked, BLOCK), rows


@pytest.mark.parametrize(
    ("mixer", "count"),
    [(HYBRID, 2), *(pytest.param(mixer, 4, marks=pytest.mark.slow) for mixer in ("gdn", "gka", "softmax"))],
)
def test_perplexity_and_answers_are_those_of_one_process(mixer, count):
    answers, rows = measure(mixer, is_divided=False)
    assert {answer.exact for answer in answers} == {True, False}
    first, *others = processes(count).run(measure, mixer, True)
    assert all(found == first for found in others)
    for one, other in zip(first[0], answers, strict=True):
        assert one.losses == pytest.approx(other.losses, abs=1e-4)
        assert (one.exact, one.continuation) == (other.exact, other.continuation)
    for one, other in zip(first[1], rows, strict=True):
        assert dataclasses.astuple(one) == pytest.approx(dataclasses.astuple(other), rel=1e-5)


def refuse_recall():
    lm = context_parallel(model(), dist.group.WORLD)
    with pytest.raises(
        ValueError, match="measure under context parallelism must be one of 'perplexity', 's-niah-1'.*'mqar'"
    ):
        evaluate(
            lm,
            tokenizer(),
            EvaluationSettings(measures=["perplexity", "mqar"], lengths=[32]),
            documents=[LONG[0].tolist()],
        )


def test_recall_tasks_are_refused():
    processes(2).run(refuse_recall)


def test_other_numbers_of_processes_are_refused(tmp_path, capsys, monkeypatch):
    assert main(["evaluate", str(tmp_path), "--context-parallel", "2"]) == 2
    assert "context_parallel must be the number of processes" in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["evaluate", str(tmp_path)]) == 2  # each process would measure by itself
    assert "together, 2, got 1; start 1 with torchrun" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--context-parallel", "2", "--lm-eval", "piqa"]) == 2
    assert "need --context-parallel 1" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command(tmp_path):
    model(HYBRID).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("some words of a text that is read by two processes\n" * 40)
    asked = ["evaluate", tmp_path / "model", "--on", "perplexity,s-niah-1", "--lengths", "160,200", "--texts", "2"]
    asked += ["--needle-examples", "1", "--depths", "0.5", "--text", tmp_path / "text.txt", "--overwrite"]
    found = []
    torchrun("-m", "fastweights", *asked, "--context-parallel", 2)
    found.append(json.loads((tmp_path / "model" / "evaluation.json").read_text())["results"])
    assert main([*map(str, asked)]) == 0
    found.append(json.loads((tmp_path / "model" / "evaluation.json").read_text())["results"])
    for measure, rows in found[0].items():
        for one, other in zip(rows, found[1][measure], strict=True):
            assert one.pop("task", None) == other.pop("task", None)
            assert one == pytest.approx(other, rel=1e-4)
