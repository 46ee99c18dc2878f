"""Stages of one run file: each continues the model of the one before, with its own length, schedule, text and options."""

import dataclasses
import io
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from fastweights.analysis.language_plots import loss_plot
from fastweights.analysis.tables import language_tables
from fastweights.data.text import PackedRows, TextCorpus, prepare_text
from fastweights.data.text.packing import ShuffledRows, pack_rows
from fastweights.models.loading import load_config, load_weights
from fastweights.training.language import LanguageRun, load_run, rows, train, train_language, trainer
from fastweights.training.language.planning import checked_configs, plan_training
from fastweights.training.language.stages import resolve
from fastweights.training.optimization import weight_decay_groups

from .small import losses, moments, write_texts

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
HYBRID = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 2, "mixer": ["gdn", {"name": "softmax", "qk_norm": True}],
}  # fmt: skip
EXTEND = (
    {"name": "pretrain", "max_tokens": 128},
    {
        "name": "extend",
        "length": 64,
        "batch_size": 1,
        "max_steps": 4,
        "learning_rate": 1e-3,
        "schedule": "linear",
        "model": {"options": {"softmax": {"rope_theta": 500.0, "rope_scaling": YARN}}},
    },
)


@pytest.mark.slow
def test_a_model_is_extended_to_longer_rows_and_continues_inside_its_stage(make_run):
    settings = {"model": HYBRID, "stages": EXTEND, "evaluate_every": 0, "context_lengths": ()}
    whole = make_run("whole", **settings)
    first, second = train_language(whole)
    assert [result.label for result in (first, second)] == ["hybrid pretrain", "hybrid extend"]
    assert (first.steps, first.tokens, second.steps, second.tokens) == (2, 128, 4, 256)
    assert second.run["model"]["path"] == str(Path(whole.output, "pretrain")) and second.run["length"] == 64
    config = load_config(Path(whole.output, "extend", "model"))
    assert config.mixers()[1] == ("softmax", {"qk_norm": True, "rope_theta": 500.0, "rope_scaling": YARN})
    cut, console = make_run("cut", **settings), Console(file=io.StringIO(), width=150)
    assert train_language(cut, stop_at=3, console=console) is None
    assert "stopped after step 3" in console.file.getvalue() and "hybrid extend: 1 process" in console.file.getvalue()
    for result, expected in zip(train_language(cut), (first, second), strict=True):
        assert result.losses == expected.losses and result.held_out_losses == expected.held_out_losses


def test_a_stage_changes_the_attention_of_a_hybrid_that_names_its_layers(make_run):
    model = {**HYBRID, "mixer": "gdn", "softmax_layers": [1], "softmax_options": {"qk_norm": True}}
    first, second = checked_configs(resolve(make_run(model=model, stages=EXTEND), 1))
    assert first.mixers() == [("gdn", {}), ("softmax", {"qk_norm": True})]
    assert second.mixers() == [("gdn", {}), ("softmax", {"qk_norm": True, "rope_theta": 500.0, "rope_scaling": YARN})]


def step_by_hand(run, model, rows, optimizer, step):
    """The loss of a step of a stage, which the optimizer then takes."""
    plan = run.plan(1)
    for group in optimizer.param_groups:
        group["lr"] = run.learning_rate * run.rate_factor(step, plan)
    optimizer.zero_grad()
    loss = model(**pack_rows([rows[row] for row in range(plan.rows(step), plan.rows(step + 1))]), use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_gradient_norm)
    optimizer.step()
    return loss.item()


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stage_takes_the_steps_that_are_written_out_here(make_run, kept):
    """It reads on in the text, with a schedule of its own, and with the optimizer's moments where it keeps them."""
    stages = ({"max_steps": 3}, {"max_steps": 3, "learning_rate": 2e-3, "weight_decay": 0.0, "keep_optimizer": kept})
    run = make_run(stages=stages, evaluate_every=0, context_lengths=())
    train_language(run)
    _, second = resolve(run, 1)
    assert second.corpus.skip_tokens == 3 * 2 * 32 and second.stage == "stage2"
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    rows = ShuffledRows(PackedRows(text.train, 32), seed=0, count=12)
    model = load_weights(Path(run.output, "stage1", "model"), "float32").train()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.0), betas=(run.beta1, run.beta2))
    if kept:
        for name, x in moments(resolve(run, 1)[0], 3).items():
            parameter, _, kind = name.removeprefix("state.").rpartition(".")
            optimizer.state[model.get_parameter(parameter)][kind] = x
    read_on = [rows[row] for row in range(6, 12)]
    expected = [step_by_hand(second, model, read_on, optimizer, step) for step in range(3)]
    assert losses(second) == pytest.approx(expected, rel=1e-4)


def test_a_stage_has_another_memory(make_run):
    """Palimpsa's continuation: a Mamba-2 model becomes metaplastic and is trained on."""
    model = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "mamba2"}
    to = {"name": "palimpsa-m", "b_scale": [0.1, 1.0]}
    run = make_run(
        model=model,
        stages=({"name": "plain", "max_steps": 2}, {"name": "metaplastic", "max_steps": 2, "model": {"mixer": to}}),
    )
    plain, metaplastic = train_language(run)
    assert (plain.name, metaplastic.name) == ("mamba2", "palimpsa-m") and metaplastic.parameters > plain.parameters
    assert load_config(Path(run.output, "metaplastic", "model")).mixers() == [("palimpsa-m", {"b_scale": [0.1, 1.0]})]
    # with few new parameters, and b_scale of at most 1, it begins near where the plain model ended
    assert metaplastic.losses[0] == pytest.approx(plain.losses[-1], abs=0.5)


@pytest.mark.slow
def test_stages_with_texts_and_models_of_their_own(make_run, tmp_path):
    """A text per stage, with the tokenizer of the first; and all stages of every mixer."""
    write_texts(tmp_path / "others", files=9)
    stages = (
        {"name": "a", "max_steps": 2},
        {"name": "b", "max_steps": 2, "corpus": {"paths": [str(tmp_path / "others")]}},
    )
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2}
    run = make_run(model=sizes, mixers=("gdn", "linear"), stages=stages)
    assert [(one.output.removeprefix(run.output), one.corpus.skip_tokens) for one in resolve(run, 1)] == [
        ("/gdn/a", 0), ("/gdn/b", 0), ("/linear/a", 0), ("/linear/b", 0),
    ]  # fmt: skip
    results = train_language(run)
    assert [result.label for result in results] == ["gdn a", "gdn b", "linear a", "linear b"]
    (axes,) = loss_plot(results).axes
    starts = [line.get_xdata()[0] for line in axes.lines[:8:2]]
    assert starts == [64, 192, 64, 192]
    console = Console(file=io.StringIO(), width=120)
    console.print(*language_tables(results))
    assert "gdn b" in console.file.getvalue() and "tokens" in console.file.getvalue()


TOML = """
output = "out"
max_tokens = "1M"
[model]
hidden_size = 64
[[stages]]
name = "pretrain"
[[stages]]
name = "extend"
length = 4096
max_steps = 10
corpus = { paths = ["long"] }
model = { options = { gdn = { conv_size = 4 } } }
[[stages.batch_ramp]]
batch_size = 1
steps = 3
"""


def test_a_run_file_with_stages(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    run = load_run(tmp_path / "run.toml", overrides=["stages.0.max_tokens=2M", "corpus.paths=short"])
    first, second = run.stage_runs()
    assert (first.max_tokens, first.output, first.corpus.paths) == (2_000_000, "out/pretrain", ("short",))
    assert (second.max_steps, second.max_tokens, second.length) == (10, None, 4096)
    assert second.batch_ramp[0].steps == 3 and second.corpus.paths == ("long",)
    assert second.model == {"path": "out/pretrain", "options": {"gdn": {"conv_size": 4}}}


def test_a_plan_shows_every_stage(make_run):
    plan = plan_training(make_run(model=HYBRID, stages=EXTEND), gpu="8xh100")
    first, second = plan["models"]
    assert (first["stage"], first["steps"], first["tokens"]) == ("pretrain", 1, 2 * 8 * 32)
    assert (second["stage"], second["steps"], second["tokens"]) == ("extend", 4, 4 * 8 * 64)
    assert "0.001 at its highest" in second["learning rate"] and "linear decay" in second["learning rate"]
    assert "8 h100" in first["time"] and "GiB" in first["memory"]


def test_a_stage_skips_what_stages_on_the_same_text_have_read():
    stages = ({"max_steps": 3}, {"max_steps": 2, "length": 64}, {"max_steps": 4})
    run = LanguageRun(length=32, batch_size=2, stages=stages, corpus=TextCorpus(skip_tokens="1K"))
    assert [stage.corpus.skip_tokens for stage in resolve(run, 2)] == [1000, 0, 1000 + 3 * 2 * 2 * 32]


@pytest.mark.parametrize("streaming", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["streamed", "cached"])
def test_stages_at_one_rate_are_one_training(make_run, streaming, monkeypatch):
    """The second reads on where the first has stopped, in a stream too. Each training asks once where it begins."""
    found = Mock(wraps=rows.find_start)
    for module in (train, trainer):
        monkeypatch.setattr(module, "find_start", found)
    usual = {"evaluate_every": 0, "context_lengths": (), "schedule": "constant", "warmup_fraction": 0.0, "log_every": 1}
    run = make_run("whole", max_steps=4, **usual)
    run = dataclasses.replace(run, corpus=dataclasses.replace(run.corpus, streaming=streaming))
    stages = ({"max_steps": 3}, {"max_steps": 1, "keep_optimizer": True})
    train_language(run)
    train_language(dataclasses.replace(run, output=f"{run.output}-stages", stages=stages))
    parts = [
        losses(stage) for stage in resolve(dataclasses.replace(run, output=f"{run.output}-stages", stages=stages), 1)
    ]
    assert sum(parts, []) == pytest.approx(losses(run), rel=1e-5)
    assert found.call_count == 3


@pytest.mark.slow
def test_an_output_with_stages_may_move(make_run, tmp_path):
    run = make_run("there", stages=({"max_steps": 1}, {"max_steps": 2}), evaluate_every=0, context_lengths=())
    train_language(run, stop_at=1)
    Path(run.output).rename(tmp_path / "here")
    assert len(train_language(dataclasses.replace(run, output=str(tmp_path / "here")))) == 2


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (({"name": "a"}, {"name": "a"}), "name of a stage must be its own"),
        (({"name": "../a"},), "name of a stage must be its own"),
        (({"output": "b"},), "stage 'stage1': output must stand above the stages"),
        (({"max_step": 3},), "stage 'stage1': it has no key 'max_step' .did you mean 'max_steps'"),
        (({"max_steps": 0},), "stage 'stage1': max_steps must be a positive"),
        (
            ({}, {"model": {"hidden_size": 3}}),
            "stage 'stage2': model must have nothing beside path but mixer and options",
        ),
        (({}, {"corpus": {"path": "a"}}), r"stage 'stage2': \[corpus\] has no key 'path'"),
        (({}, {"corpus": "a"}), "stage 'stage2': corpus must be a table"),
        (({}, {"keep_optimizer": True, "model": {"mixer": "pgdn"}}), "stage 'stage2': keep_optimizer must be false"),
        (
            ({}, {"keep_optimizer": True, "optimizer": "muon"}),
            "stage 'stage2': keep_optimizer must be false where optimizer",
        ),
        ("a", "stages must be a list of tables"),
    ],
)
def test_bad_stages(stages, words):
    with pytest.raises((ValueError, TypeError), match=words):
        LanguageRun(stages=stages)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"options": {"kda": {}}}, "a key of options in model must be one of"),
        ({"options": {"softmax": {"num_kv_heads": 1}}}, "options of model must leave the weights as they are"),
        ({"options": {"softmax": 3}}, "options of model must be tables of options"),
        ({"mixer": "rls"}, "rls"),
    ],
)
def test_stages_that_do_not_fit_the_model_before(make_run, model, words):
    run = make_run(model=HYBRID, stages=({"max_steps": 1}, {"max_steps": 1, "model": model}))
    with pytest.raises((ValueError, TypeError), match=words):
        train_language(run)
    assert not Path(run.output).exists()
