"""What the steps of a training read and how fast they learn: budgets in tokens, batch ramps, schedules, groups, optimizers."""

import dataclasses

import pytest
import torch

from fastweights.checks import check_tokens
from fastweights.data.text import PackedRows, prepare_text
from fastweights.data.text.packing import ShuffledRows, pack_rows
from fastweights.training.language import LanguageRun, load_run, train_language
from fastweights.training.language.model import build_model, model_config
from fastweights.training.language.optimizers import build_optimizer
from fastweights.training.language.schedule import BatchStage
from fastweights.training.optimization import ParameterGroup, learning_rate_factor, weight_decay_groups

from .small import losses, moments


@pytest.mark.parametrize(
    ("given", "tokens"),
    [
        (7, 7),
        ("15B", 15 * 10**9),
        ("1.5b", 1_500_000_000),
        ("500M", 500 * 10**6),
        ("2K", 2000),
        ("1T", 10**12),
        ("1_000", 1000),
    ],
)
def test_numbers_of_tokens(given, tokens):
    assert check_tokens("max_tokens", given) == tokens


@pytest.mark.parametrize("given", ["15G", "B", "0.0001K", "", "1/0", "0", -1, "nan"])
def test_what_is_no_number_of_tokens(given):
    with pytest.raises(ValueError, match="max_tokens must be a"):
        check_tokens("max_tokens", given)


def factors(run, processes=1):
    plan = run.plan(processes)
    return [run.rate_factor(step, plan) for step in range(plan.steps)]


def test_budgets_and_warm_ups_in_tokens_take_the_fewest_steps_that_read_as_many():
    run = LanguageRun(length=100, batch_size=2, accumulation=2, max_tokens=4001, warmup_tokens=801)
    assert (run.plan(1).steps, run.plan(2).steps) == (11, 6)
    assert run.warmup(run.plan(1)) == 3 and run.warmup(run.plan(2)) == 2
    assert run.plan(1).tokens(11) == 4400 and factors(run)[:4] == pytest.approx([0.25, 0.5, 0.75, 1])
    assert LanguageRun(max_steps=40, warmup_steps=7).warmup(LanguageRun(max_steps=40).plan(1)) == 7


def test_schedules_by_hand():
    common = {"max_steps": 100, "warmup_steps": 10, "final_learning_rate": 2e-4}  # of 1e-3: a fifth
    linear = factors(LanguageRun(schedule="linear", **common))
    assert linear[10] == 1 and linear[55] == pytest.approx(0.6) and linear[99] == pytest.approx(0.2 + 0.8 / 90)
    for shape, half in (("linear", 0.5), ("cosine", 0.5), ("sqrt", 1 - 0.5**0.5)):
        stable = factors(LanguageRun(schedule="wsd", decay_fraction=0.2, decay_shape=shape, **common))
        assert stable[10:81] == [1] * 71 and stable[90] == pytest.approx(0.2 + 0.8 * half) and stable[81] < 1
    assert factors(LanguageRun(schedule="constant", **common))[10:] == [1] * 90


def test_a_schedule_may_end_after_the_training():
    """As that of a checkpoint at 28B of 30B tokens; and before it, from where on the rate stays."""
    whole = LanguageRun(length=10, batch_size=1, max_tokens=300, warmup_steps=3)
    part = dataclasses.replace(whole, max_tokens=280, schedule_tokens=300)
    assert factors(part) == factors(whole)[:28]
    longer = dataclasses.replace(whole, max_tokens=320, schedule_tokens=300)
    assert factors(longer)[:30] == factors(whole) and factors(longer)[30:] == [0.1, 0.1]


RAMP = (BatchStage(batch_size=1, steps=2), BatchStage(batch_size=2, tokens=100))


def test_a_ramp_reads_the_rows_in_order_in_any_number_of_processes():
    run = LanguageRun(length=8, batch_size=4, accumulation=2, batch_ramp=RAMP, max_steps=8)
    for processes in (1, 2):
        plan = run.plan(processes)
        assert plan.parts == ((2, 1), (4 if processes == 1 else 2, 2), (2 if processes == 1 else 4, 4))
        batches = list(plan)
        assert len(batches) == len(plan) == 8 * 2 * processes
        assert [row for batch in batches for row in batch] == list(range(plan.rows(8)))
        for step in range(8):
            own = batches[step * plan.passes : (step + 1) * plan.passes]
            assert [row for batch in own for row in batch] == list(range(plan.rows(step), plan.rows(step + 1)))
    one, two = (
        dataclasses.replace(run, batch_size=4 // n, batch_ramp=(BatchStage(batch_size=2 // n, steps=3),))
        for n in (1, 2)
    )
    assert [one.plan(1).rows(step) for step in range(9)] == [two.plan(2).rows(step) for step in range(9)]
    assert dataclasses.replace(two, context_parallel=3).plan(6) == two.plan(2)  # two context groups of three processes
    with pytest.raises(ValueError, match="batch_ramp must end before the training, which has 5 steps, got 6"):
        dataclasses.replace(run, max_steps=5).plan(1)


GROUPS = (
    ParameterGroup(parameters=("*.A_log", "*norm.weight"), weight_decay=0.7),
    ParameterGroup(parameters=("model.embed_tokens.weight",), learning_rate=3e-2),
)


def test_groups_have_decays_and_rates_of_their_own(tmp_path):
    run = LanguageRun(model={"vocab_size": 9, "hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}, groups=GROUPS)
    model = build_model(run, model_config(run))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made = weight_decay_groups(model, 0.1, GROUPS)
    held = [({names[id(x)] for x in group["params"]}, group["weight_decay"], group.get("lr")) for group in made]
    assert [(decay, rate) for _, decay, rate in held] == [(0.1, None), (0.0, None), (0.7, None), (0.1, 3e-2)]
    assert {name.rpartition(".")[2] for name in held[2][0]} == {"A_log", "weight"} and "lm_head.weight" in held[0][0]
    assert held[3][0] == {"model.embed_tokens.weight"} and sum(len(one) for one, *_ in held) == len(names)
    rates = {group["lr"] for group in build_optimizer(run, model).param_groups}
    assert rates == {1e-3, 3e-2}
    with pytest.raises(
        ValueError, match=r"groups must name parameters of the model, none is 'model.embed.\*'; it has model"
    ):
        weight_decay_groups(model, 0.1, (ParameterGroup(parameters=("model.embed.*",)),))


def by_hand(run, optimizer_of):
    """The losses of a run, one step after another."""
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    model, plan = build_model(run, model_config(run, text.tokenizer)).train(), run.plan(1)
    rows = ShuffledRows(PackedRows(text.train, run.length), seed=run.seed, count=plan.rows(plan.steps))
    optimizers = optimizer_of(model)
    peaks = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    found = []
    for step in range(plan.steps):
        factor = run.rate_factor(step, plan)
        for optimizer, rates in zip(optimizers, peaks, strict=True):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.zero_grad()
        loss = model(
            **pack_rows([rows[row] for row in range(plan.rows(step), plan.rows(step + 1))]), use_cache=False
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.max_gradient_norm)
        for optimizer in optimizers:
            optimizer.step()
        found.append(loss.item())
    return found


def test_a_ramp_a_schedule_and_groups_take_the_steps_that_are_written_out_here(make_run):
    ramp = (BatchStage(batch_size=1, steps=3),)
    steps = {"accumulation": 2, "batch_size": 2, "batch_ramp": ramp, "max_steps": 6, "checkpoint_every": 2}
    rate = {"warmup_steps": 2, "schedule": "wsd", "decay_fraction": 0.5, "groups": GROUPS}
    run = make_run(**steps, **rate, evaluate_every=0, context_lengths=())
    betas = (run.beta1, run.beta2)

    def adamw(model):
        groups = weight_decay_groups(model, 0.1, GROUPS)
        return [torch.optim.AdamW(groups, lr=run.learning_rate, betas=betas)]

    expected = by_hand(run, adamw)
    assert train_language(run, stop_at=2) is None  # within the ramp
    (result,) = train_language(run)
    assert losses(run) == pytest.approx(expected, rel=1e-4)
    assert (
        result.loss_tokens == [run.plan(1).tokens(step) for step in range(1, 7)]
        and result.tokens == (3 * 2 + 3 * 4) * 32
    )


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest(make_run):
    run = make_run(
        optimizer="muon", optimizer_options={"momentum": 0.9}, max_steps=4, checkpoint_every=2, evaluate_every=0
    )

    def both(model):
        named = dict(model.named_parameters())
        matrices = [name for name in named if name.startswith("model.layers") and name.endswith("_proj.weight")]
        assert len(matrices) >= 8
        rest = {name for name in named if name not in matrices}
        muon = torch.optim.Muon(
            [named[name] for name in matrices],
            lr=run.learning_rate,
            weight_decay=0.1,
            momentum=0.9,
            adjust_lr_fn="match_rms_adamw",
        )
        groups = weight_decay_groups(model, 0.1)
        for group in groups:
            group["params"] = [x for x in group["params"] if any(x is named[name] for name in rest)]
        return [muon, torch.optim.AdamW(groups, lr=run.learning_rate, betas=(run.beta1, run.beta2))]

    expected = by_hand(run, both)
    assert train_language(run, stop_at=2) is None
    train_language(run)
    assert losses(run) == pytest.approx(expected, rel=1e-3)
    assert {"momentum_buffer", "exp_avg"} <= {name.rpartition(".")[2] for name in moments(run, 4)}
    with pytest.raises(ValueError, match='optimizer must be "adamw" with fsdp, got "muon"'):
        dataclasses.replace(run, fsdp=True)


@pytest.mark.slow
def test_adafactor_trains(make_run):
    run = make_run(optimizer="adafactor", optimizer_options={"d": 2.0}, evaluate_every=0)

    def adafactor(model):
        return [torch.optim.Adafactor(weight_decay_groups(model, 0.1), lr=run.learning_rate, d=2.0)]

    train_language(run)
    assert losses(run) == pytest.approx(by_hand(run, adafactor), rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"max_tokens": "1M", "max_steps": 7},
            "only one of max_steps, max_tokens may be set, got max_steps and max_tokens",
        ),
        ({"warmup_steps": 3, "warmup_tokens": 3}, "only one of warmup_fraction, warmup_steps, warmup_tokens"),
        ({"final_fraction": 0.0, "final_learning_rate": 1e-5}, "only one of final_fraction, final_learning_rate"),
        ({"final_learning_rate": 1.0}, "final_learning_rate must be a finite number, at least 0 and at most 0.001"),
        ({"schedule": "cosin"}, "schedule must be one of 'cosine', 'linear', 'wsd', 'constant'"),
        ({"decay_shape": "step"}, "decay_shape must be one of 'cosine', 'linear', 'sqrt'"),
        ({"optimizer": "lion"}, "optimizer must be one of 'adamw', 'muon', 'adafactor'"),
        ({"optimizer": "muon", "optimizer_options": {"lr": 1}}, "a key of optimizer_options must be one of"),
        ({"batch_ramp": ({"batch_size": 1},)}, "batch_ramp must be .*BatchStage"),
        ({"groups": "norm"}, "groups must be .*ParameterGroup"),
        ({"keep_optimizer": True}, "keep_optimizer must be false unless model has a path"),
    ],
)
def test_bad_schedules(fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        LanguageRun(**fields)


def test_bad_entries():
    with pytest.raises(ValueError, match="either steps or tokens"):
        BatchStage(batch_size=2)
    with pytest.raises(ValueError, match="parameters must name at least one"):
        ParameterGroup(parameters=())
    with pytest.raises(ValueError, match="decay_fraction must be"):
        learning_rate_factor(0, steps=2, warmup_steps=0, final=0.1, decay_fraction=2)


TOML = """
max_tokens = "20M"
warmup_tokens = "1M"
[[batch_ramp]]
batch_size = 2
tokens = "1M"
[[groups]]
parameters = "*.A_log"
weight_decay = 0.0
"""


def test_a_run_file_and_what_replaces_it(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    run = load_run(tmp_path / "run.toml")
    assert run.max_tokens == 20_000_000 and run.batch_ramp == (BatchStage(batch_size=2, tokens="1M"),)
    assert run.groups == (ParameterGroup(parameters=("*.A_log",), weight_decay=0.0),)
    for changed in (
        load_run(tmp_path / "run.toml", max_steps=5, warmup_steps=2),
        load_run(tmp_path / "run.toml", overrides=["max_steps=5", "warmup_steps=2", "batch_ramp.0.batch_size=2"]),
    ):
        assert (changed.max_steps, changed.max_tokens) == (5, None) and changed.groups == run.groups
        assert (changed.warmup_steps, changed.warmup_tokens) == (2, None) and changed.batch_ramp == run.batch_ramp
