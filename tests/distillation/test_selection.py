"""Which layers are kept as attention: the divergence on held-out text, and the ranking of layers by it."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from fastweights.distillation import SelectionSettings, auto_layers, rank_layers, rows_of_documents
from fastweights.distillation.held_out import HeldOutKL
from fastweights.distillation.selection import RANKING, attention_restored
from fastweights.models import linearize
from fastweights.results.distillation import load_ranking

from ..evaluation.other_models import gemma
from .small import LENGTH, pair, rows


@torch.no_grad()
def divergence(student, teacher, held_out):
    """Document by document, with all logits."""
    total, tokens = 0.0, 0
    for ids, starts in held_out:
        for document in np.split(ids, starts[1:]):
            if len(document) > 1:
                logs = [lm(torch.from_numpy(document)[None, :-1]).logits.log_softmax(-1) for lm in (student, teacher)]
                total += F.kl_div(*logs, log_target=True, reduction="sum").item()
                tokens += len(document) - 1
    return total / tokens, tokens


@pytest.mark.parametrize("make", [pair, lambda: (linearize(gemma(), to="gdn"), gemma())], ids=["llama", "gemma"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_divergence_is_that_of_every_document_alone(make, batch_size):
    student, teacher = make()
    measure = HeldOutKL(teacher, rows(), batch_size=batch_size)
    expected, tokens = divergence(student, teacher, rows())
    assert measure(student) == pytest.approx(expected, rel=1e-4) and measure.tokens == tokens
    assert measure(linearize(teacher, to="gdn", keep="all")) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("share", [0.5, 0.0])
def test_the_teacher_reads_once_where_its_states_fit(share, monkeypatch):
    monkeypatch.setattr("fastweights.distillation.held_out.SHARE", share)
    student, teacher = pair()
    calls = []
    teacher.register_forward_hook(lambda *called: calls.append(called))
    measure = HeldOutKL(teacher, rows(), batch_size=2)
    assert measure(student) == measure(student) > 0
    assert len(calls) == (2 if share else 4)


def test_every_layer_is_measured_as_the_student_that_keeps_it():
    student, teacher = pair()
    student.train()
    modules, weights = student.memory_layers(), copy.deepcopy(student.state_dict())
    ranking = rank_layers(student, teacher, rows(), settings=SelectionSettings(batch_size=2))
    base, tokens = divergence(student.eval(), teacher, rows())
    assert (ranking.rows, ranking.tokens) == (4, tokens) and ranking.base_kl == pytest.approx(base, rel=1e-4)
    assert sorted(one.layer for one in ranking.layers) == [0, 1, 2] and not ranking.missing
    for one in ranking.layers:
        kept = linearize(teacher, to="gdn", keep=[one.layer])
        kept.load_state_dict({name: x for name, x in weights.items() if name in kept.state_dict()})
        assert one.kl_with_it_kept == pytest.approx(divergence(kept, teacher, rows())[0], rel=1e-4)
        assert one.gain == ranking.base_kl - one.kl_with_it_kept
    assert [one.rank for one in ranking.layers] == [1, 2, 3]
    assert [one.gain for one in ranking.layers] == sorted((one.gain for one in ranking.layers), reverse=True)
    best = [one.layer for one in ranking.layers[:2]]
    assert ranking.best(2) == tuple(sorted(best)) and ranking.best(0) == ()
    assert student.memory_layers() == modules
    torch.testing.assert_close(student.state_dict(), weights, rtol=0, atol=0)


def test_the_students_mode_stays():
    student, teacher = pair()
    student.train()
    rank_layers(student, teacher, rows(1))
    assert student.training and all(attention.training for attention in student.memory_layers().values())
    assert not teacher.training


def test_a_layer_that_is_put_back_is_not_copied():
    student, teacher = pair()
    measure = HeldOutKL(teacher, rows(1))
    with attention_restored(student, teacher, 1):
        expected = measure(student)
    student.set_attn_implementation("eager")
    memory, theirs = student.model.layers[1].self_attn, teacher.model.layers[1].self_attn
    with attention_restored(student, teacher, 1):
        restored = student.model.layers[1].self_attn
        assert restored.q_proj is theirs.q_proj and student.model.layers[0].self_attn is student.memory_layers()[0]
        assert restored.config._attn_implementation == "eager" != theirs.config._attn_implementation
        assert measure(student) == pytest.approx(expected, rel=1e-4)  # with the masks that it needs
    assert student.model.layers[1].self_attn is memory
    with pytest.raises(KeyError), attention_restored(student, teacher, 1):
        raise KeyError
    assert student.model.layers[1].self_attn is memory


def test_a_teacher_of_another_dtype():
    student, teacher = pair()
    plain = rank_layers(student, teacher, rows())
    ranking = rank_layers(student, copy.deepcopy(teacher).bfloat16(), rows())
    for one, other in zip(ranking.layers, plain.layers, strict=True):
        assert one.kl_with_it_kept == pytest.approx(other.kl_with_it_kept, rel=0.05)


class Stop(Exception):
    """Ends a ranking."""


def test_an_interrupted_ranking_continues(tmp_path, monkeypatch):
    student, teacher = pair()
    whole = rank_layers(student, teacher, rows(), output=tmp_path / "whole")
    assert load_ranking(tmp_path / "whole" / RANKING) == whole

    calls, measure = [], HeldOutKL.__call__

    def counted(self, model):
        calls.append(model)
        if len(calls) == 3:
            raise Stop
        return measure(self, model)

    monkeypatch.setattr(HeldOutKL, "__call__", counted)
    modules = student.memory_layers()
    with pytest.raises(Stop):
        rank_layers(student, teacher, rows(), output=tmp_path / "part")
    assert student.memory_layers() == modules
    part = load_ranking(tmp_path / "part" / RANKING)
    assert [one.layer for one in part.layers] == [0] and part.missing == [1, 2]
    with pytest.raises(ValueError, match="all layers must be measured"):
        part.best(1)
    shown = Console(file=io.StringIO(), width=100)
    assert rank_layers(student, teacher, rows(), output=tmp_path / "part", console=shown) == whole
    assert len(calls) == 5  # the layer that failed, and the last one
    lines = shown.file.getvalue().splitlines()
    said = [f"ranking of layers: with attention in layer {one}" for one in (1, 2)]
    assert [line.partition(" KL")[0] for line in lines] == said and "4 of 4" in lines[-1]
    assert rank_layers(student, teacher, rows(), output=tmp_path / "part") == whole and len(calls) == 5


def test_the_ranking_of_other_models_or_text_is_not_continued(tmp_path):
    student, teacher = pair()
    rank_layers(student, teacher, rows(), output=tmp_path)
    with pytest.raises(ValueError, match="output must be a folder without the ranking of other models"):
        rank_layers(student, teacher, rows(3), output=tmp_path)
    torch.nn.init.normal_(student.memory_layers()[2].q_proj.weight)
    with pytest.raises(ValueError, match="output must be a folder without the ranking of other models"):
        rank_layers(student, teacher, rows(), output=tmp_path)
    (tmp_path / RANKING).write_text("{}")
    with pytest.raises(ValueError, match="no ranking wrote"):
        rank_layers(student, teacher, rows(), output=tmp_path)


def test_the_student_is_trained_first():
    student, teacher = pair()
    trained, _ = pair(seed=1)
    torch.nn.init.zeros_(trained.model.layers[0].mlp.down_proj.weight)
    steps = []

    def train(given, count):
        steps.append(count)
        assert given is student
        return trained

    ranking = rank_layers(student, teacher, rows(), settings=SelectionSettings(training_steps=7), train=train)
    assert steps == [7] and ranking.base_kl == rank_layers(trained, teacher, rows()).base_kl
    with pytest.raises(ValueError, match="train must be a function"):
        rank_layers(student, teacher, rows(), settings=SelectionSettings(training_steps=7))


@pytest.mark.parametrize(("settings", "count"), [({"rows": 2}, 2), ({"tokens": 3 * LENGTH}, 3), ({}, 4)])
def test_the_budget(settings, count):
    student, teacher = pair()
    assert rank_layers(student, teacher, rows(), settings=SelectionSettings(**settings)).rows == count


def test_what_does_not_fit_is_refused():
    student, teacher = pair()
    with pytest.raises(ValueError, match="tokens must be at least 24, the length of a row"):
        rank_layers(student, teacher, rows(), settings=SelectionSettings(tokens=LENGTH - 1))
    with pytest.raises(ValueError, match="rows must"):
        rank_layers(student, teacher, [])
    with pytest.raises(ValueError, match="student must have layers with a memory"):
        rank_layers(linearize(teacher, to="gdn", keep="all"), teacher, rows())
    with pytest.raises(ValueError, match="its num_hidden_layers 3, got 2"):
        rank_layers(student, gemma(), rows())
    with pytest.raises(ValueError, match="documents of two tokens"):
        HeldOutKL(teacher, [(np.arange(3), np.arange(3))])
    student.model.norm.weight.data[0] = float("nan")
    with pytest.raises(ValueError, match="finite divergence"):
        rank_layers(student, teacher, rows())
    with pytest.raises(ValueError, match="rows must be"):
        SelectionSettings(rows=0)


def test_auto_names_a_number_of_layers():
    assert auto_layers("auto:3", 8) == 3 and auto_layers("every:4", 8) is None
    for wrong in ("auto:", "auto:-1", "auto:9", "auto:x"):
        with pytest.raises(ValueError, match='keep must be "auto:N"'):
            auto_layers(wrong, 8)


def test_rows_of_documents():
    documents = [[1] * 30, [2] * 10, [3] * 20, [4] * 40]
    read = rows_of_documents(documents, length=25, settings=SelectionSettings(tokens=75), separator=0)
    assert [ids.tolist() for ids, _ in read] == [[1] * 25, [4] * 25, [2] * 10 + [0] + [3] * 14]
    assert all(starts.tolist() == [0] for _, starts in read)
    one = rows_of_documents([list(range(90))], length=25, settings=SelectionSettings(tokens=200), separator=0)
    assert [ids.tolist() for ids, _ in one] == [list(range(start, start + 25)) for start in (0, 25, 50)]
    with pytest.raises(ValueError, match="tokens must be at least 100"):
        rows_of_documents(documents, length=100, settings=SelectionSettings(tokens=75))
