"""Teacher and student side by side: the numbers of each alone, in a file, a table and a picture."""

from __future__ import annotations

import dataclasses
import io
from functools import cache

import pytest
from rich.console import Console

from fastweights.analysis.distillation import (
    distillation_plot,
    distillation_table,
    ranking_plot,
    ranking_table,
    save_distillation_plot,
    save_ranking_plot,
)
from fastweights.distillation import HeldOutKL, compare_models, rank_layers
from fastweights.distillation.report import REPORT
from fastweights.evaluation import EvaluationSettings, needle_recall, perplexity_by_length
from fastweights.results import ResultsError
from fastweights.results.distillation import load_distillation

from ..evaluation.small import LONG, tokenizer
from .small import pair, rows

SETTINGS = EvaluationSettings(
    measures=("perplexity", "s-niah-1"), lengths=(200, 150), needle_examples=1, depths=(0.0, 1.0), texts=2
)
CURVE = [(1000, 2.5), (2000, 1.5)]


def compare(**options):
    student, teacher = pair()
    given = {"rows": rows(), "documents": iter(LONG), "settings": SETTINGS, "curve": CURVE, **options}
    return compare_models(student, teacher, tokenizer(), **given), student, teacher


compared = cache(compare)


def finding(measured, found):
    """With needles of which so many are found at the depth 1, and none at 0."""
    needles = [dataclasses.replace(row, found=found * row.depth) for row in measured.needles]
    return dataclasses.replace(measured, needles=needles)


@pytest.mark.slow
def test_each_model_is_measured_as_alone(tmp_path):
    shown = Console(file=io.StringIO(), width=100)
    result, student, teacher = compare(output=tmp_path, console=shown)
    assert load_distillation(tmp_path / REPORT) == result
    assert result.held_out_kl == HeldOutKL(teacher, rows())(student)
    for lm, measured in ((student, result.student), (teacher, result.teacher)):
        assert measured.perplexities == perplexity_by_length(lm, LONG, [150, 200], texts=2, separator=0)
        asked = {"examples": 1, "batch_size": 1}
        assert measured.needles == [
            needle_recall(lm, tokenizer(), "s-niah-1", length=length, depth=depth, **asked)
            for length in (150, 200)
            for depth in (0.0, 1.0)
        ]
        assert measured.parameters == lm.num_parameters()
    assert result.teacher.state_sizes == {"150": 3 * 150 * 2 * 2 * 8, "200": 3 * 200 * 2 * 2 * 8}
    assert set(result.student.state_sizes.values()) == {student.state_size(150)}
    assert (result.kl_tokens, result.kls) == ([1000, 2000], [2.5, 1.5])
    lines = shown.file.getvalue().splitlines()
    assert lines[0].startswith(f"teacher and student: KL {result.held_out_kl:.4f}, 1 of 7")
    assert lines[-1].startswith("teacher and student: s-niah-1 of the student, 7 of 7")


def test_the_table_has_both_models():
    result, student, teacher = compared()
    console = Console(file=io.StringIO(), width=100)
    console.print(distillation_table(result))
    text = console.file.getvalue()
    assert f"KL {result.held_out_kl:.4f}" in text
    rows_of = {tuple(line.split()[:2]): line.split() for line in text.splitlines() if line.split()}
    both = zip(result.teacher.perplexities, result.student.perplexities, strict=True)
    for one, other in both:
        shown = rows_of["perplexity", f"{one.length}"][2:]
        assert [float(number.replace(",", "")) for number in shown] == pytest.approx(
            [one.perplexity, other.perplexity], rel=0.01
        )
    assert rows_of["cache", "200"][2:] == [f"{teacher_size:,}" for teacher_size in (19200, student.state_size(200))]
    assert "s-niah-1" in text and f"{teacher.num_parameters():,}" in text


@pytest.mark.slow
def test_the_pictures_have_the_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    result, student, teacher = compared()
    result = dataclasses.replace(result, teacher=finding(result.teacher, 0.8), student=finding(result.student, 0.4))
    left, middle, right = distillation_plot(result).axes
    (curve,) = left.get_lines()
    assert (list(curve.get_xdata()), list(curve.get_ydata())) == ([1000, 2000], [2.5, 1.5])
    whole = {line.get_gid(): list(line.get_ydata()) for line in right.get_lines()}
    for name in ("teacher", "student"):
        assert whole[name] == [row.perplexity for row in getattr(result, name).perplexities]
    needles = {line.get_label(): [*line.get_xdata(), *line.get_ydata()] for line in middle.get_lines()}
    assert needles == {"teacher, s-niah-1": [150, 200, 0.4, 0.4], "student, s-niah-1": [150, 200, 0.2, 0.2]}
    without_curve = dataclasses.replace(result, kls=[], kl_tokens=[])
    nothing = dataclasses.replace(result.teacher, perplexities=[], needles=[])
    assert [one.get_ylabel()[:7] for one in distillation_plot(without_curve).axes] == ["needles", "perplex"]
    assert [one.get_ylabel()[:8] for one in distillation_plot(dataclasses.replace(result, teacher=nothing)).axes] == [
        "held-out"
    ]
    with pytest.raises(ValueError, match="result must have perplexities, needles"):
        distillation_plot(dataclasses.replace(without_curve, teacher=nothing))
    ranking = rank_layers(student, teacher, rows())
    kept = ranking.best(1)
    (axes,) = ranking_plot(ranking, kept).axes
    bars = {round(bar.get_x() + bar.get_width() / 2): (bar.get_height(), bar.get_facecolor()) for bar in axes.patches}
    assert {layer: height for layer, (height, _) in bars.items()} == {one.layer: one.gain for one in ranking.layers}
    assert [layer for layer, (_, colour) in bars.items() if colour[:3] == (0, 0, 0)] == list(kept)
    paths = save_distillation_plot(result, tmp_path / "a.png") + save_ranking_plot(ranking, tmp_path / "b.png", kept)
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_the_ranking_is_a_table():
    student, teacher = pair()
    ranking = rank_layers(student, teacher, rows())
    console = Console(file=io.StringIO(), width=100)
    console.print(ranking_table(ranking, ranking.best(2)))
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    shown = [line for line in lines if line and line[0].isdigit()]
    assert [line[:4] for line in shown] == [
        [f"{one.rank}", f"{one.layer}", f"{one.kl_with_it_kept:.4f}", f"{one.gain:+.4f}"] for one in ranking.layers
    ]
    assert [line[4:] for line in shown] == [["kept"], ["kept"], []]


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(ValueError, match="a measure of a distillation"):
        compare(settings=dataclasses.replace(SETTINGS, measures=("vt",)))
    (tmp_path / REPORT).write_text("{}")
    with pytest.raises(ValueError, match="no distillation wrote"):
        compare(output=tmp_path)
    with pytest.raises(ResultsError, match="format 1"):
        load_distillation(tmp_path / REPORT)
    (tmp_path / REPORT).write_text('{"format": 1, "held_out_kl": 1.0}')
    with pytest.raises(ResultsError, match="other fields"):
        load_distillation(tmp_path / REPORT)
