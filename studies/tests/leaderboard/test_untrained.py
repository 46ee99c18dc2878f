"""The rules without training: streams, exact least squares and distances against loops of their own; declarations; results."""

import hashlib
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fastweights_studies import places
from fastweights_studies.leaderboard import PARTS, load_board, register_rule, rules, untrained
from fastweights_studies.leaderboard.rules import GRID, LEFT_OUT, RULES, SAME_RULE, Gates
from fastweights_studies.leaderboard.streams import LAST_PART, STREAMS, exact_answers
from fastweights_studies.leaderboard.untrained import (
    EXPECTATIONS,
    SEEDS,
    SIZES,
    TUNING_SEED,
    Found,
    find_rules,
    measure_rule,
)
from fastweights_studies.record import select

from fastweights.layers import MIXERS
from fastweights.training.progress import Silent

RESULTS = places.RESULTS / "leaderboard" / "rules-cpu.json"
D = 8


def last(x):
    return x[:, round((1 - LAST_PART) * x.shape[1]) :]


def by_hand(kind, seed):
    """Keys, values, queries and truths as arrays; exact least squares by numpy, token by token."""
    stream = kind.make(seed, D)
    k, v, q, truth, label = (x.numpy() for x in (stream.k, stream.v, stream.q, stream.truth, stream.label))
    exact = np.zeros_like(v)
    for row in range(len(k)):
        for t in range(round((1 - LAST_PART) * k.shape[1]), k.shape[1]):
            tokens = list({label[row, s]: s for s in range(t + 1)}.values()) if kind.latest_only else list(range(t + 1))
            A = np.concatenate([k[row, tokens], np.sqrt(kind.ridge) * np.eye(D)])
            B = np.concatenate([v[row, tokens], np.zeros((D, D))])
            exact[row, t] = q[row, t] @ np.linalg.lstsq(A, B, rcond=None)[0]
    return k, v, q, last(truth), last(exact)


def linear(k, v, q, gates):
    S, o = np.zeros((len(k), D, D)), np.zeros_like(v)
    for t in range(k.shape[1]):
        S = gates["decay"] * S + k[:, t, :, None] * v[:, t, None, :]
        o[:, t] = np.einsum("bkv,bk->bv", S, q[:, t])
    return last(o)


def delta(k, v, q, gates):
    S, o = np.zeros((len(k), D, D)), np.zeros_like(v)
    for t in range(k.shape[1]):
        S = gates["decay"] * S
        error = v[:, t] - np.einsum("bkv,bk->bv", S, k[:, t])
        S = S + gates["gain"] * k[:, t, :, None] * error[:, None, :]
        o[:, t] = np.einsum("bkv,bk->bv", S, q[:, t])
    return last(o)


def regression(k, v, q, gates):
    H, U, o = np.tile(gates["ridge"] * np.eye(D), (len(k), 1, 1)), np.zeros((len(k), D, D)), np.zeros_like(v)
    memory = np.zeros_like(H)
    for t in range(k.shape[1]):
        memory = gates["decay"] * memory + k[:, t, :, None] * k[:, t, None, :]
        U = gates["decay"] * U + k[:, t, :, None] * v[:, t, None, :]
        o[:, t] = np.einsum("bkv,bk->bv", np.linalg.solve(memory + H, U), q[:, t])
    return last(o)


COMPARED = [
    ("interference", "gdn", delta), ("overwrite", "gla", linear), ("overwrite", "gdn", delta), ("forgetting", "gla", linear),
    ("noise", "mesa", regression),
]  # fmt: skip
MORE = [
    pytest.param(stream, rule, answers, marks=pytest.mark.slow)
    for stream in STREAMS
    for rule, answers in (("gla", linear), ("gdn", delta), ("mesa", regression))
    if (stream, rule, answers) not in COMPARED
]


@pytest.mark.parametrize(("stream", "rule", "answers"), [*COMPARED, *MORE])
def test_distances_are_those_of_a_direct_computation(stream, rule, answers):
    """Gates, read scale, distance and error, computed again in numpy with none of the ops."""
    kind = STREAMS[stream]
    k, v, q, _, exact = by_hand(kind, TUNING_SEED)
    tried = []
    for gates in RULES[rule].choices():
        o = answers(k, v, q, vars(gates))
        scale = (o * exact).sum() / (o * o).sum()
        tried.append((((scale * o - exact) ** 2).sum(), vars(gates), scale))
    _, gates, scale = min(tried, key=lambda one: one[0])
    k, v, q, truth, exact = by_hand(kind, 3)
    o = scale * answers(k, v, q, gates)
    found = measure_rule(kind, RULES[rule], D, seeds=(3,))
    # LSTSQ and the equations of the measurement differ by rounding where keys are nearly dependent.
    assert found.distance == pytest.approx([((o - exact) ** 2).sum() / (exact**2).sum()], rel=1e-3, abs=1e-6)
    assert found.error == pytest.approx([((o - truth) ** 2).sum() / (truth**2).sum()], rel=1e-3, abs=1e-6)
    assert found.exact_error == pytest.approx([((exact - truth) ** 2).sum() / (truth**2).sum()], rel=1e-3, abs=1e-6)
    assert {name: getattr(found.gates, name) for name in RULES[rule].gates} == {
        name: gates[name] for name in RULES[rule].gates
    }


@pytest.mark.parametrize("stream", STREAMS)
def test_streams_ask_what_they_say(stream):
    made = STREAMS[stream].make(0, D)
    again, other = STREAMS[stream].make(0, D), STREAMS[stream].make(1, D)
    assert torch.equal(made.k, again.k) and not torch.equal(made.k, other.k)
    torch.testing.assert_close(made.k.norm(dim=-1), torch.ones_like(made.k[..., 0]))
    if stream == "noise":  # a truth per sequence: linear in the queries
        W = torch.linalg.lstsq(made.q, made.truth).solution
        torch.testing.assert_close(made.q @ W, made.truth)
        return
    for row in range(3):  # the truth is the value of the latest token with the key that is asked
        for t in range(made.k.shape[1]):
            same = [s for s in range(t + 1) if torch.equal(made.k[row, s], made.q[row, t])]
            if same or stream != "forgetting":  # old keys may be asked before they are written; that is not compared
                assert torch.equal(made.v[row, same[-1]], made.truth[row, t])
    if stream == "forgetting":
        assert (made.label[:, 4:] >= 4).all() and len(made.label[0].unique()) == 16


def test_every_rule_is_causal_and_reads_its_gates():
    """What comes after a token changes no answer before it, and every gate that a rule lists changes an answer."""
    stream = STREAMS["overwrite"].make(0, D)
    cut = 40
    later = type(stream)(*(torch.cat([x[:, :cut], x[:, cut:].flip(1)], 1) for x in vars(stream).values()))
    for name, rule in RULES.items():
        first = Gates(**{gate: GRID[gate][1] for gate in rule.gates})
        answers = rule.answers(stream, first)
        torch.testing.assert_close(answers[:, :cut], rule.answers(later, first)[:, :cut], msg=name)
        for gate in rule.gates:
            changed = rule.answers(stream, Gates(**{**vars(first), gate: GRID[gate][-1]}))
            assert not torch.equal(answers, changed), (name, gate)


def test_exact_least_squares_answers_what_it_can():
    kind = STREAMS["overwrite"]
    stream = kind.make(0, 32)
    torch.testing.assert_close(exact_answers(stream, kind), last(stream.truth), rtol=0, atol=1e-2)


def test_every_mixer_of_the_registry_is_accounted_for():
    own = {name for name, spec in MIXERS.items() if spec.layer.__module__.startswith("fastweights.")}
    assert own <= {*RULES, *SAME_RULE, *LEFT_OUT} and set(SAME_RULE.values()) <= set(RULES)


def measure(folder, rule):
    """What the board of a folder has by column and rule, after a rule is measured."""
    choice = SimpleNamespace(name=rule, label=rule)  # no mixer has to be registered for a rule
    request = SimpleNamespace(mixers=(choice,), size="small", output=folder, reporter=Silent())
    board = load_board(PARTS["rules"].run(request))
    return {(entry.column, entry.label): entry for entry in PARTS["rules"].entries(board.rows)}


def test_a_rule_of_ones_own_joins_the_results_that_are_there(tmp_path, monkeypatch):
    """The same function gives the same rows; it is measured at every call, because it may have changed."""
    monkeypatch.setattr(rules, "_REGISTERED", {})
    monkeypatch.setattr(untrained, "SIZES", (4,))
    measure(tmp_path, "gla")

    @register_rule("mine", gates=("decay",), state=lambda d: 3 * d)
    def answers(x, gates):
        assert x.g[0, 0, 0] == pytest.approx(np.log(gates.decay))
        return rules._linear(x, gates)

    found = measure(tmp_path, "mine")
    assert len(found) == 2 * len(STREAMS) and found["noise, d = 4", "mine"].count("state") == 12
    for stream in STREAMS:
        mine, gla = (found[f"{stream}, d = 4", rule] for rule in ("mine", "gla"))
        assert mine.values == gla.values and mine.of("error") == gla.of("error")
        assert mine.run["decay"] == gla.run["decay"]

    @register_rule("mine", gates=(), state=lambda d: d)
    def changed(x, gates):
        return 0 * x.v

    assert measure(tmp_path, "mine")["noise, d = 4", "mine"].values == (1.0,) * len(SEEDS)
    assert find_rules(["mine", "softmax"]) == ("mine",) and find_rules(list(MIXERS)) == (*RULES, "mine")

    @register_rule("mine", gates=(), state=lambda d: d)
    def of_another_shape(x, gates):
        return x.v[:, :, 0]

    with pytest.raises(ValueError, match=r"rule 'mine' must return answers of the shape of v, \[16, \d+, 1, 4\]"):
        measure(tmp_path, "mine")

    @register_rule("mine", gates=(), state=lambda d: d)
    def with_a_state(x, gates):
        return x.v, None

    with pytest.raises(TypeError, match="rule 'mine' must return the answers alone, as a tensor, got "):
        measure(tmp_path, "mine")


@pytest.mark.parametrize(
    ("name", "arguments", "error", "message"),
    [
        ("gdn", {}, ValueError, "name must not be that of a mixer of the library, got 'gdn'"),
        ("kda", {}, ValueError, "name must not be that of a mixer of the library, got 'kda'"),
        (3, {}, TypeError, "name must be the name of a mixer"),
        ("mine", {"gates": ("decoy",)}, ValueError, "gates must be one of 'decay', 'gain', 'ridge', got 'decoy'"),
        ("mine", {"gates": "decay"}, TypeError, "gates must be"),
        ("mine", {"state": 3}, TypeError, "state must be a function of d"),
    ],
)
def test_bad_declarations_of_rules_are_refused(name, arguments, error, message):
    with pytest.raises(error, match=message):
        register_rule(name, **{"gates": ("decay",), "state": lambda d: d, **arguments})
    assert not rules._REGISTERED


def test_the_results_are_of_what_was_declared():
    """Streams, rules and gates cannot change behind the results."""
    rows = load_board(RESULTS).rows
    assert PARTS["rules"].counted(rows, "small") == rows, "delete the file and run fastweights leaderboard rules"
    entries = PARTS["rules"].entries(rows)
    assert len(entries) == len(STREAMS) * len(SIZES) * len(RULES)
    assert all(entry.seeds == SEEDS for entry in entries)


def test_expectations_are_those_from_before_the_first_run():
    said = "\n".join(expectation.says for expectation in EXPECTATIONS)
    assert hashlib.sha256(said.encode()).hexdigest()[:16] == "4ee53c64c9dcbb81"


@pytest.mark.parametrize(("stream", "rule"), [("interference", "pdn"), ("overwrite", "vla"), ("forgetting", "lattice")])
def test_the_results_are_measured_again(stream, rule):
    rows = select(load_board(RESULTS).rows, mixer=rule, options={}, column={"stream": stream, "channels": D})
    again = measure_rule(STREAMS[stream], RULES[rule], D)
    assert {name: getattr(again.gates, name) for name in RULES[rule].gates} == {
        name: rows[0].run[name] for name in RULES[rule].gates
    }
    there = [row.value for row in rows if row.measure == "distance"]
    assert again.distance == pytest.approx(there, rel=1e-3)


def test_what_is_there_is_not_measured_again(tmp_path, monkeypatch):
    """A rule whose gates are others now is refused, and those of other rules stay."""
    monkeypatch.setattr(untrained, "SIZES", (4,))
    assert len(measure(tmp_path, "linear")) == len(STREAMS)
    measured, measure_one = [], untrained.measure_rule
    monkeypatch.setattr(
        untrained, "measure_rule", lambda kind, rule, size: measured.append(rule.name) or measure_one(kind, rule, size)
    )
    assert len(measure(tmp_path, "linear")) == len(STREAMS) and measured == []
    assert len(measure(tmp_path, "gla")) == 2 * len(STREAMS) and measured == ["gla"] * len(STREAMS)
    monkeypatch.setitem(GRID, "decay", (1.0, 0.5))
    rows = load_board(tmp_path / "rules-cpu.json").rows
    assert {row.mixer for row in PARTS["rules"].counted(rows, "small")} == {"linear", None}
    with pytest.raises(ValueError, match=r"measured at another setting \(decay_grid\)"):
        measure(tmp_path, "linear")


def test_means_are_over_seeds():
    entry = PARTS["rules"].entries(load_board(RESULTS).rows)[0]
    distances = [row.value for row in entry.rows if row.measure == "distance"]
    found = Found([entry])
    assert (
        found.mean("interference", "linear", 8) == statistics.fmean(distances)
        and found.gates("interference", "linear", 8) == {}
    )
