"""What a person sees of an evaluation."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fastweights.analysis.language_plots import length_plot, save_perplexity_plot
from fastweights.analysis.plot_style import mixer_style
from fastweights.analysis.tables import evaluation_tables
from fastweights.results import LengthPerplexity, NeedleRecall, WordRecall

ROWS = [
    LengthPerplexity(length=length, loss=loss, last_loss=loss / 2, texts=5, joined=2)
    for length, loss in ((512, 3.0), (1024, 2.0))
]


def shown(results):
    console = Console(width=100, file=io.StringIO())
    for table in evaluation_tables(results):
        console.print(table)
    return console.file.getvalue()


def needle(length, depth, found):
    return NeedleRecall(
        task="s-niah-1", length=length, depth=depth, examples=2, found=found, exact=0.0, answer_loss=1.5 + found
    )


def test_perplexities_and_where_the_texts_come_from():
    text = shown({"perplexity": ROWS})
    assert "5 texts, 2 of them joined from shorter documents" in " ".join(text.split())
    assert "1,024" in text and "20.09" in text and "4.48" in text and "2.0000" in text  # e^3, e^1.5, the loss itself


def test_recall_by_length_with_needles_of_all_depths_together():
    recall = WordRecall(task="copy", length=512, pairs=8, symbols=64, examples=4, accuracy=0.625, chance=0.125)
    text = shown({"copy": [recall], "s-niah-1": [needle(512, 0.0, 1.0), needle(512, 1.0, 0.5), needle(1024, 0.0, 0.0)]})
    lines = {line.split()[0]: line for line in text.splitlines() if "copy" in line or "s-niah" in line}
    assert "0.625" in lines["copy"] and lines["copy"].count("-") == 1  # not measured at 1,024
    assert "0.75 (2.25)" in lines["s-niah-1"] and "0.00 (1.50)" in lines["s-niah-1"]


@pytest.mark.slow
def test_two_lines_a_model_in_looks_of_their_own(tmp_path):
    pytest.importorskip("matplotlib")
    figure = length_plot({"gdn": ROWS, "mine": ROWS, "yours": ROWS})
    (axes,) = figure.axes
    lines = axes.get_lines()
    assert len(lines) == 6
    assert [list(line.get_xdata()) for line in lines] == [[512, 1024]] * 6
    assert [tick.get_text() for tick in axes.get_xticklabels()] == ["512", "1,024"]
    assert list(lines[0].get_ydata()) == [row.perplexity for row in ROWS]
    assert list(lines[1].get_ydata()) == [row.last_perplexity for row in ROWS]
    assert lines[0].get_color() == mixer_style("gdn").colour
    assert len({line.get_color() for line in lines}) == 3
    save_perplexity_plot({"mine": ROWS}, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
