"""What a training over several processes is said to send, and how long that takes."""

import re
from pathlib import Path

import pytest
import torch

from fastweights.models import FastWeightsForCausalLM, preset
from fastweights.ops.context_parallel.costs import link_speed
from fastweights.ops.context_parallel.planned import PlannedGroup
from fastweights.training.language import LanguageRun
from fastweights.training.language.communication import exchanged_bytes, exchanges, gradient_bytes
from fastweights.training.language.estimate import BACKWARD, Machine, StepSeconds, memory_parts, step_seconds

GUIDE = Path(__file__).parents[3] / "docs" / "train.md"


def planned(mixer, **changes):
    with torch.device("meta"):
        return FastWeightsForCausalLM(preset("gdn-340m", mixer=mixer, **changes))


def run_of(length, processes, **changes):
    return LanguageRun(length=length, batch_size=1, context_parallel=processes, precision="bf16", **changes)


def table(first, rows):
    """The cells of the rows of a table of the guide, by the words that its head begins with."""
    lines = GUIDE.read_text().partition(f"\n{first}")[2].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[:rows]]
    assert all(line.startswith("|") for line in lines[:rows]) and not lines[rows].startswith("|")
    return cells


def test_bytes_by_hand():
    """Heads: q, k, v and o of 8 heads of 128 in 16 bits, a rate of 8 in 32, of which three quarters leave. States:
    128 x 128 numbers and a decay of 8 heads in 32 bits, to three others."""
    tokens = 131072 // 4
    (ttt,) = exchanges(run_of(131072, 4), planned("ttt", num_hidden_layers=2))
    wanted = 0.75 * tokens * (4 * 8 * 128 * 2 + 8 * 4)
    assert (ttt.layers, ttt.way, ttt.tokens) == (2, "heads", tokens) and ttt.sent == pytest.approx(wanted, rel=1e-4)
    (linear,) = exchanges(run_of(131072, 4), planned("mamba2", num_hidden_layers=1))
    halo = 3 * 3 * 1024 * 2
    assert linear.way == "state" and abs(linear.sent - 3 * 8 * (128 * 128 + 1) * 4) <= halo
    assert linear.held == 2 * tokens * 8 * (128 + 128) * 4 and ttt.held == 0
    (gka,) = exchanges(run_of(131072, 4), planned("gka", num_hidden_layers=1))
    assert gka.held == 2 * tokens * 8 * 3 * 128 * 4  # k with decay, k and v
    hybrid = exchanges(run_of(131072, 4), planned("gdn", num_hidden_layers=3, softmax_layers=[1]))
    assert [(one.mixer, one.layers, one.way) for one in hybrid] == [("gdn", 2, "state"), ("softmax", 1, "heads")]


def test_a_step_sends_forward_and_backward_of_every_pass():
    model = planned("gdn", num_hidden_layers=2)
    (gdn,) = exchanges(run_of(4096, 2), model)
    assert exchanged_bytes(run_of(4096, 2, accumulation=3), model) == 3 * 2 * 2 * gdn.sent
    assert exchanged_bytes(run_of(4096, 2, gradient_checkpointing=True), model) == 3 * 2 * gdn.sent
    assert exchanged_bytes(run_of(4096, 1), model) == 0
    parameters = model.num_parameters()
    assert gradient_bytes(run_of(4096, 2), model, 4) == 2 * 4 * 0.75 * parameters
    assert gradient_bytes(run_of(4096, 2, fsdp=True, accumulation=2), model, 4) == 2 * (2 * 2 + 4) * 0.75 * parameters
    assert gradient_bytes(run_of(4096, 1), model, 1) == 0
    rounded = {"reduce_dtype": "bfloat16"}
    assert gradient_bytes(run_of(4096, 2, **rounded), model, 4) == 2 * 2 * 0.75 * parameters
    assert gradient_bytes(run_of(4096, 2, fsdp=True, **rounded), model, 4) == (2 * 2 + 2) * 0.75 * parameters


def test_the_time_of_a_step():
    assert StepSeconds(products=3, exchange=1, gradients=1).total == 4
    assert StepSeconds(products=3, exchange=1, gradients=5).total == 4 + 5 - BACKWARD * 3
    assert link_speed(450e9, 8) == pytest.approx(300e9) and link_speed(450e9, 9) == pytest.approx(50e9 * 2 / 3)


def test_layers_that_cannot_be_divided_are_refused():
    with pytest.raises(ValueError, match="context_parallel = 16: cp_group .* value heads here, 8, got 16"):
        exchanges(run_of(131072, 16), planned("lattice", num_hidden_layers=1))


def test_a_plan_leaves_the_model_as_it_is():
    model = planned("gdn", num_hidden_layers=1)
    exchanges(run_of(4096, 2), model)
    assert all(x.dtype == torch.float32 for x in model.parameters()) and model.model.layers[0].mixer.cp_group is None
    assert PlannedGroup(2).sent.total() == 0


def test_the_bytes_of_the_guide():
    for mixer, *cells in table("| mixer | 131,072 tokens |", 12):
        model, found = planned(mixer, num_hidden_layers=1), []
        for length in (131072, 1048576):
            (one,) = exchanges(run_of(length, 4), model)
            found += [one.way, f"{one.sent / one.tokens:,.0f}"]
        assert found == cells, mixer


def test_the_predictions_of_the_guide():
    models = {name: planned(name) for name in ("gdn", "palimpsa-d")}
    alone = {}
    for name, count, processes, row, *cells in table("| mixer | GPUs |", 13):
        run = run_of(int(row.replace(",", "")), int(processes), gradient_checkpointing=True)
        step = step_seconds(run, models[name], Machine("h100", int(count)))
        first = alone.setdefault(name, step.total)
        parts = (step.products, step.exchange, step.gradients, step.total)
        assert [*(f"{1000 * seconds:.0f}" for seconds in parts), f"{first / step.total:.2f}"] == cells, (name, count)


def test_the_memory_of_the_guide():
    run = run_of(1048576, 4, gradient_checkpointing=True, fsdp=True)
    sizes = [sum(memory_parts(run, planned(name), 4).values()) / 2**30 for name in ("gdn", "gka")]
    (found,) = re.findall(r"dry run predicts ([\d.]+) GiB per GPU for `gdn-340m` and ([\d.]+) for", GUIDE.read_text())
    assert [f"{size:.1f}" for size in sizes] == list(found)
