"""Measured numbers in the sentences of pages that are written by hand are those of the result files."""

from __future__ import annotations

import json
import re
import statistics
from typing import Any

import pytest
from fastweights_studies.claims import Measurement, claims_of, committed_records, load_record
from fastweights_studies.claims.measurement import UNDERTRAINED
from fastweights_studies.leaderboard import PARTS, SIZES
from fastweights_studies.measure.first_values import SEEDS, SLOW
from fastweights_studies.measure.gpu_tests import read_tests
from fastweights_studies.measure.training_start import MODEL
from fastweights_studies.own.o1_least_squares_as_layers import CONTRASTS
from fastweights_studies.own.o1b_the_ridge_of_the_exact_recursion import RIDGES
from fastweights_studies.pages.evidence import first_recall
from fastweights_studies.pages.rendering import share
from fastweights_studies.pages.results import read_measured, value_of
from fastweights_studies.places import RESULTS, ROOT
from fastweights_studies.record import Row, select

from fastweights.layers import MIXERS
from fastweights.models import preset
from fastweights.training import load_recall_file


def result(name: str) -> Any:
    """A file in the format of the command that wrote it."""
    return json.loads((RESULTS / f"{name}.json").read_bytes())


def found_of(claim: str) -> Measurement:
    return load_record(RESULTS / "claims" / f"{claim}.json").measurement


def rows_of(file: str, task: str, device: str = "") -> list[Row]:
    """The rows of a task, of devices whose name holds this."""
    return [row for row in read_measured(file, task, RESULTS) if device in row.origin.device]


def words(page: str) -> str:
    """The text of a page without its line breaks."""
    return " ".join((ROOT / page).read_text().split())


def test_recall_and_language_models_on_cpus() -> None:
    text, models = words("docs/cpu.md"), result("commands/lm_default")
    first, more = (result(f"commands/{name}") for name in ("recall_default", "recall_16_pairs"))
    taken, beside = (sum(run["cpu_seconds"] for run in found["runs"]) for found in (first, more))
    assert f"Its {len(first['runs'])} trainings took {taken:.0f} seconds of processor time" in text
    assert f"took {beside:.0f} seconds more" in text
    assert first["experiment"] == load_recall_file(None).parts[""].record()
    assert min(row["accuracy"] for row in first["summary"]) > 0.98
    assert [(row["mixer"], row["pairs"]) for row in first["summary"] if row["undertrained"]] == [("gdn", 8)]
    assert [row["mixer"] for row in more["summary"] if row["undertrained"]] == ["gla", "gdn"]
    assert f"They took {sum(model['seconds'] for model in models):.0f} seconds together" in text
    (steps,), (tokens,) = ({model[what] for model in models} for what in ("steps", "tokens"))
    assert f"for {steps} steps on {tokens:,} tokens" in text
    softmax = {row["pairs"]: row for row in result("commands/recall_readme")["summary"] if row["mixer"] == "softmax"}
    assert f"softmax has {softmax[4]['accuracy']:.3f} on 4 pairs and is at chance on 8 and 16" in text
    assert all(softmax[pairs]["accuracy"] == pytest.approx(1 / pairs, abs=0.01) for pairs in (8, 16))


def test_starts() -> None:
    train = words("docs/train.md")
    starts = rows_of("training-start", "training_start", "H100")
    first, second = (value_of(starts, "start_s", column={"warm": warm, "step": 1}) for warm in (False, True))
    vocabulary = MODEL["vocab_size"]
    assert all(
        f"{vocabulary:,} tokens in the vocabulary" in text for text in (train, words("studies/notes/kernels.md"))
    )
    assert f"ends {first:.0f} s after the command was given" in train and f"it ends after {second:.0f} s" in train


def test_times_of_ops_among_the_limits() -> None:
    text, rows = words("docs/limits.md"), rows_of("kernels", "kernels", "H200")

    def time(op: str, stage: str, size: dict[str, Any], peer: str | None = None) -> float | None:
        return value_of(rows, f"{stage}_ms", column={**size, "op": op, "peer": peer, "replayed": True})

    size = dict(zip("BTHKV", (4, 2048, 8, 128, 128)))
    plain, decayed = (time(op, "forward", size) / time(op, "forward", size, "fla") for op in ("linear", "simple_gla"))
    named = ",".join(map(str, size.values()))
    assert f"takes {plain:.2f} times flash-linear-attention's device time at (B, T, H, K, V) = ({named})" in text
    assert f"with one decay per head {decayed:.2f} times" in text


NUMBERS = (
    "no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "thirteen",
)  # fmt: skip


def test_trainings_among_the_limits() -> None:
    text = words("docs/limits.md")
    parts = ("language", "regression", "mqar", "tracking")
    boards = {part: PARTS[part].entries(PARTS[part].library("full", ())) for part in parts}
    assert (
        "have three seeds in state tracking and, where mixers are close, in language; recall (`mqar`) has one." in text
    )
    board = PARTS["recall"]
    recall = board.entries(board.library("full", ()))
    assert {len(entry.values) for entry in recall} == {5} and len({entry.label for entry in recall}) == 12
    columns = len(SIZES["full"].task("recall").columns)
    assert (
        "has five seeds of twelve rules in three of eight columns, and in most cells the loss was still falling" in text
    )
    assert (len({entry.column for entry in recall}), columns) == (3, 8)
    assert sum(entry.undertrained for entry in recall) > len(recall) / 2
    seeds = {part: {len(entry.values) for entry in entries if entry.values} for part, entries in boards.items()}
    assert seeds == {"language": {1, 3}, "regression": {1, 3}, "mqar": {1}, "tracking": {3}}
    several = [entry.rows[0].column["noise"] for entry in boards["regression"] if len(entry.values) == 3]
    assert (several.count(0.0), several.count(0.5)) == (32, 1)
    assert "In regression 32 of 33 mixers have three without noise, and one with it" in text
    for part in ("language", "regression", "mqar"):
        rates = [entry.learning_rate for entry in boards[part] if entry.values]
        assert rates.count(max(rates)) > len(rates) / 2, part
    assert "In recall, regression and language the better of the two learning rates was the larger one for most" in text
    learnt = {entry.column: entry.values[0] for entry in boards["mqar"] if entry.label == "softmax"}
    for column, accuracy in learnt.items():
        assert (accuracy > 0.99) is not column.startswith("shuffled, 32 pairs"), column
    guessed = [entry.values[0] / entry.run["chance"] for entry in boards["regression"] if entry.label == "softmax"]
    assert guessed == pytest.approx([1, 1], rel=0.01)
    assert (
        "softmax attention learns 8 shuffled pairs and 32 ordered ones there, and guesses with 32 shuffled pairs"
        in text
    )
    assert "pairs and in regression" in text
    losses = found_of("C34").values("loss", "lattice", options={"objective": "encode"})
    jumped = sum(loss > min(losses) + 1 for loss in losses)
    assert (
        f"{NUMBERS[jumped].capitalize()} of {NUMBERS[len(losses)]} trainings of claim C34 with the encode objective"
        in text
    )
    weights = rows_of("vla-first-weights", "first_weights")
    small, guessing, large, _ = (row.value for row in weights)
    assert [row.column["initializer_range"] for row in weights] == [0.02, 0.02, 0.05, 0.05]
    assert large > 0.99 and abs(small - guessing) < 0.02
    assert "At a standard deviation of 0.05 `vla` learned 8 pairs in a setting in which it guesses at 0.02" in text


def test_norms_of_memories_among_the_rules() -> None:
    text, found = words("docs/rules.md"), found_of("C19")
    unit, scaled, delta = (
        f"{found.mean('norm', 'linear') / norm:.0f} times"
        for norm in (
            *(found.mean("norm", "vla", scale=scale) for scale in ("unit", "inverse_root")),
            found.mean("norm", "deltanet"),
        )
    )
    assert f"its norm is {unit} below that of linear attention with `|u| = 1` and {scaled} with `|u| = d^-1/2`" in text
    assert f"That of the delta rule is {delta} below" in text


def test_shares_of_the_gap_on_the_page_of_least_squares() -> None:
    text = words("docs/own-least-squares.md")

    def shares(name: str) -> list[dict[str, list[float]]]:
        found = found_of(name)
        mixers = ("pdn", "gka", "rls", "palimpsa-d", "vla-conv")
        return [
            {mixer: found.values("share_closed", mixer, variances=variances) for mixer in mixers}
            for variances in CONTRASTS
        ]

    def mean(shares: list[float]) -> str:
        return f"{sum(shares) / len(shares):.0%}"

    (equal, unequal), large = shares("own-1"), shares("own-1-cuda")
    for one in (*large, unequal):
        assert all(ours > exact for ours, exact in zip(one["gka"], one["rls"]))
    assert f"at the larger size with every seed, `gka` {mean(large[0]['gka'])} and" in text
    assert f" and `rls` {mean(large[0]['rls'])} with equal variances" in text
    assert f"equal variances, {mean(large[1]['gka'])} and {mean(large[1]['rls'])} with unequal ones" in text
    assert f"with unequal variances ({mean(unequal['gka'])} and {mean(unequal['rls'])})" in text
    *ahead, lost = (100 * (ours - exact) for ours, exact in zip(equal["gka"], equal["rls"]))
    assert f"two of three seeds of `gka` are ahead by {ahead[0]:.0f} and {ahead[1]:.0f} points" in text
    assert lost < -100 and "points, and one did not learn" in text
    assert f"`rls` {mean(equal['rls'])} and {mean(unequal['rls'])}, `pdn` {mean(equal['pdn'])} and" in text
    assert f"`pdn` {mean(equal['pdn'])} and {mean(unequal['pdn'])}." in text
    assert f"`pdn` closes {mean(large[0]['pdn'])} with equal variances, more than `rls` with two of three seeds" in text
    assert sum(cheap > exact for cheap, exact in zip(large[0]["pdn"], large[0]["rls"])) == 2
    for mixer in ("pdn", "rls"):
        assert sum(share > 0 for share in large[1][mixer]) == 1 and sum(large[1][mixer]) < 0
    assert "both are better than the delta rule with one of three seeds, and worse on average" in text
    found = found_of("own-1-cuda")
    base, best = found.mean("error", "deltanet", variances="unequal"), found.mean("best_error", variances="unequal")
    assert f"a squared error of {base:.3f} for the delta rule and {best:.3f} for the best predictor" in text
    for one in (equal, unequal, *large):
        assert all(sum(one[mixer]) < 0 for mixer in ("palimpsa-d", "vla-conv"))
    assert "`palimpsa-d` and `vla-conv` are worse than the delta rule** in both sizes" in text


def test_ridges_on_the_page_of_least_squares() -> None:
    text, found, in_recall = words("docs/own-least-squares.md"), found_of("own-1b"), found_of("own-1c")

    def share(mixer: str, variances: str, **options: Any) -> str:
        return f"{found.mean('share_closed', mixer, options=options, variances=variances):.0%}"

    of_ridge = {one: [share("rls", variances, ridge=one) for variances in CONTRASTS] for one in RIDGES}
    small, least = of_ridge[0.01]
    assert f"closes {small} of the gap with equal variances and {least} with unequal ones (own-1b)" in text
    assert f"(own-1b), with 0.1 {' and '.join(of_ridge[0.1])}. The default ridge of 1" in text
    assert f"whole token, closes {' and '.join(of_ridge[1.0])}." in text
    *learned, lost = (f"{x:.0%}" for x in found.values("share_closed", "gka", variances="equal"))
    assert (
        f"closes {share('gka', 'unequal')} with unequal variances, and {' and '.join(learned)} with equal ones" in text
    )
    assert lost.startswith("-")
    at_rates = [
        *(one for mixer in ("deltanet", "pdn") for one in found_of("own-1").select("error", mixer)),
        *(one for ridge in (0.1, 0.01) for one in found.select("error", "rls", options={"ridge": ridge})),
    ]
    assert len(at_rates) == 24 and all(one.run["learning_rate"] == 3e-2 for one in at_rates)
    assert found.select(UNDERTRAINED, "rls", options={"ridge": 1.0}, variances="equal")
    of_seeds = {
        (one, steps): in_recall.values("accuracy", options={"ridge": one}, steps=steps)
        for one in RIDGES
        for steps in (300, 1500)
    }
    after = {key: sum(values) / len(values) for key, values in of_seeds.items()}
    one, *others = (f"{x:.3f}" for x in of_seeds[0.01, 300])
    assert f"with 0.01 has an accuracy of {after[0.01, 300]:.3f} after 300 steps: {one} with one seed" in text
    assert f"with one seed, {' and '.join(others)} with the others." in text
    assert f"With 1 and 0.1 it has {after[1.0, 300]:.3f} and {after[0.1, 300]:.3f}. After 1,500 steps all three" in text
    assert "By three seeds the difference after 300 steps is a tie, so that own-1c is not resolved" in text
    assert committed_records()["own-1c"].status == "not resolved"
    assert all(f"{accuracy:.3f}" == "1.000" for (_, steps), accuracy in after.items() if steps == 1500)


def test_ridges_at_the_larger_size() -> None:
    text, record = words("docs/own-least-squares.md"), committed_records()["own-1b-cuda"]
    assert record.status == "not resolved" and "**At the larger size own-1b is not resolved.**" in text
    found = record.measurement
    shares = {
        (one, variances): found.values("share_closed", "rls", options={"ridge": one}, variances=variances)
        for one in RIDGES
        for variances in CONTRASTS
    }
    mean = {key: f"{sum(values) / len(values):.0%}" for key, values in shares.items()}
    ours = found.values("share_closed", "gka", variances="equal")
    assert (
        f"With equal variances a ridge of 0.1 closes {mean[0.1, 'equal']} and one of 0.01 {mean[0.01, 'equal']}, where 1 "
        f"closes {mean[1.0, 'equal']}."
    ) in text
    gain = (sum(shares[0.1, "equal"]) - sum(shares[1.0, "equal"])) / 3
    assert record.reason.count("a tie (visible from") == 4
    assert f"The difference of {100 * gain:.0f} points between 0.1 and 1 is a tie by three seeds" in text
    assert f"so is that from `gka`, with {sum(ours) / 3:.0%}" in text
    assert all(float(mean[ridge, "unequal"][:-1]) < 0 for ridge in RIDGES)
    unequal = shares[0.1, "unequal"]
    assert f"0.1 closes {mean[0.1, 'unequal']}, from {min(unequal):.0%} to {max(unequal):.0%} by seed" in text
    assert f"by seed, and 1 {mean[1.0, 'unequal']}. That is a tie too." in text


def test_variances_at_the_larger_size() -> None:
    text, record = words("docs/own-confidence.md"), committed_records()["own-2-cuda"]
    found = record.measurement

    def new_keys(by: str) -> list[str]:
        return [f"{found.mean('new_keys_auroc', mixer, score=by):.3f}" for mixer in ("rls", "palimpsa-d")]

    probability, variance, both = (new_keys(by) for by in ("probability", "variance", "both"))
    assert f"it has an AUROC of {probability[0]} for `rls` and {probability[1]} for `palimpsa-d`" in text
    assert f"the variance {' and '.join(variance)}, both together {' and '.join(both)}" in text
    unrouted = {"share": 0.0, "order": "variance"}
    right = [f"{found.mean('routed_accuracy', mixer, **unrouted):.3f}" for mixer in ("rls", "palimpsa-d")]
    assert f"the models answer {' and '.join(right)} of the held-out queries correctly" in text
    assert record.status == "not resolved"
    assert found.values("routed_accuracy", "rls", **unrouted).count(1) == 1
    assert "One of the three `rls` models answers every one of them" in text
    assert found.mean("new_keys_auroc", "palimpsa-d", score="variance") < 0.7 and "`palimpsa-d` misses the rule" in text


def test_gpu_tests_among_the_limits() -> None:
    ran, text = read_tests(RESULTS / "gpu_tests.json"), words("docs/limits.md")
    backend, large, layers, *newest = ran.runs
    passed = sum(run.counts.passed for run in newest)
    assert (
        f"The GPU tests last ran on 2026-11-30, on H200s, in three runs: {passed:,} passed and {ran.counts.failed} failed, and "
        f"{len(ran.not_run):,} were left when the time was up"
    ) in text
    assert (
        f"not run since, {layers.counts.passed} of layers of transformers (H200, 2026-11-29), the {large.counts.passed} of large "
        f"tensors (H200, 2026-11-26) and the {backend.counts.passed} of the backend of flash-linear-attention (H100, 2026-11-26)"
    ) in text
    assert list(backend.files) == ["tests.gpu.test_flash_linear_attention"]
    assert list(large.files) == ["tests.gpu.test_large_tensors"]
    assert list(layers.files) == ["tests.gpu.test_transformers"]
    assert [run.origin.device.split()[1] for run in ran.runs] == ["H100", *["H200"] * 5]
    assert [run.origin.date[8:10] for run in ran.runs] == ["26", "26", "29", *["30"] * 3]
    assert not ran.failed_tests


def test_the_text_of_language_models_among_the_limits() -> None:
    size, text = SIZES["full"].language, words("docs/limits.md")
    tokens = size.training["max_steps"] * size.training["batch_size"] * size.training["length"]
    assert "language models of the full size read PyTorch's source text, each token once" in text
    assert size.source == "pytorch" and f"a fifth of the {tokens / 1e6:.0f} million tokens of a training" in text


def test_claims_that_the_readme_counts() -> None:
    """Those that were measured and not resolved. Each says what would decide it, or its seeds came to different outcomes."""
    records = committed_records()
    open_ones = [claim for claim in claims_of() if records[claim.name].status == "not resolved"]
    assert all(records[claim.name].rows for claim in open_ones)
    assert [claim.name for claim in open_ones if not claim.to_decide] == ["C22", "C25"]
    counted = f"{NUMBERS[len(open_ones)].capitalize()} claims are not resolved by their measurements"
    assert counted in words("README.md")


def phase_ms(model: str, phase: str, *, fla: bool) -> tuple[float, float]:
    """With ours, and without: the medians over all turns."""
    column = {"model": model, "phase": phase, "fla": fla}
    turns = select(rows_of("transformers-models", "transformers"), measure="phase_ms", column=column)
    ours, theirs = (
        statistics.median(row.value for row in select(turns, column={"accelerated": accelerated}))
        for accelerated in (True, False)
    )
    return ours, theirs


def test_models_of_transformers() -> None:
    text, phases = words("docs/transformers.md"), ("training_step", "prompt", "decoding")
    step, prompt, decoding = (phase_ms("qwen3_next", phase, fla=False) for phase in phases)
    rows = rows_of("transformers-models", "transformers", "H200")
    (trained,), (read,), (new,) = (
        {
            (row.column["batch"], row.column["length"], row.column["new"])
            for row in select(rows, column={"phase": phase})
        }
        for phase in phases
    )
    assert (
        f"take {step[0]:.0f} ms for a training step of {trained[0]} x {trained[1]} tokens instead of {step[1]:.0f}, and "
        f"{prompt[0]:.0f} ms for a prompt of {read[1]:,} tokens instead of {prompt[1]:.0f}"
    ) in text
    version = rows[0].origin.versions["transformers"].rpartition(".")[0]
    assert f"transformers {version} without flash-linear-attention" in text
    ours, theirs = (ms / new[2] for ms in decoding)
    assert f"take {ours:.1f} ms with ours and {theirs:.1f} without" in text


def test_models_of_transformers_beside_flash_linear_attention() -> None:
    text = words("docs/transformers.md")
    qwen, kimi = (
        [ms for phase in ("training_step", "prompt") for ms in phase_ms(name, phase, fla=True)]
        for name in ("qwen3_next", "kimi_linear")
    )
    instead = "take {:.0f} ms for the step instead of {:.0f} and {:.0f} ms for the prompt instead of {:.0f}"
    assert instead.format(*qwen) in text
    assert "Those of Kimi-Linear take {:.0f} ms instead of {:.0f} and {:.0f} ms instead of {:.0f}".format(*kimi) in text
    both, (ours, theirs) = (
        [ms / 16 for ms in phase_ms(name, "decoding", fla=True)] for name in ("qwen3_next", "kimi_linear")
    )
    assert both == pytest.approx([6.6, 6.6], abs=0.05) and "They took 6.6 ms with both for Qwen3-Next" in text
    assert f"for Kimi-Linear {ours:.1f} with ours and {theirs:.1f} with flash-linear-attention" in text


AGREEMENT = ("answer_difference_nats", "largest_difference_nats", "float64_difference_nats")


def test_serving() -> None:
    text = words("docs/serving.md")
    soak = {row.measure: row.value for row in rows_of("serving-soak", "serving_soak")}
    assert f"sends {soak['requests']:,.0f} requests of random lengths to a server and cancels a third" in text
    assert soak["given_up"] == pytest.approx(soak["requests"] / 3, rel=0.01)
    assert f"{soak['answered']:,.0f} answers of {soak['tokens_written']:,.0f} tokens arrived" in text
    assert f"preempted sequences {soak['preemptions']:.0f} times. {soak['checked']:.0f} answers were compared" in text
    assert soak["wrong"] == soak["answers_of_wrong_length"] == 0
    assert not any(value for name, value in soak.items() if name.startswith("left_"))
    soak = {row.measure: row.value for row in rows_of("serving-soak-nvidia-h200", "serving_soak")}
    assert f"got {soak['requests']:,.0f} requests, 24 at a time, a third of them given up" in text
    answers = (
        f"In {soak['soak_s']:.0f} s {soak['answered']:,.0f} answers of {soak['tokens_written']:,.0f} tokens arrived"
    )
    assert f"{answers}, all of the length that was asked for, and {soak['preemptions']:.0f} times" in text
    assert soak["answers_of_wrong_length"] == 0 and not any(soak[name] for name in soak if name.startswith("left_"))
    assert f"All of the {soak['checked']:,.0f} answers that were compared were those of `generate()`" in text
    assert soak["wrong"] == soak["near_ties"] == soak["largest_departure"] == 0
    layers = rows_of("decode-layers", "decode_layer", "H200")
    pool, alone, *more = (
        f"{1e3 * value_of(layers, 'step_ms', mixer='gdn', column={'batch': batch, 'pool': in_pool, 'width': 1024}):.0f}"
        for batch in (64, 256)
        for in_pool in (True, False)
    )
    assert (
        f"takes {pool} us per step in the pool and {alone} alone with 64 sequences, {' and '.join(more)} with 256"
        in text
    )
    decoding = rows_of("serving-decode", "serving_decode", "H200")

    def measured(batch: int, measure: str, in_pool: bool = True) -> float:
        column = {"preset": "gdn-340m", "state_dtype": "float32", "batch": batch, "pool": in_pool}
        return value_of(decoding, measure, column=column)

    rates = {batch: measured(batch, "tokens_per_second") for batch in (64, 256)}
    speeds = [f"{round(rate, -2):,.0f}" for rate in rates.values()]
    parts = [f"{rate / measured(batch, 'tokens_per_second', False):.2f}" for batch, rate in rates.items()]
    assert f"reaches {speeds[0]} tokens per second with 64 sequences, {parts[0]} of the captured step" in text
    assert f"and {speeds[1]} with 256, {parts[1]} of it" in text
    same = [f"{measured(batch, 'same_tokens'):.0%}" for batch in rates]
    assert f"writes {same[0]} and {same[1]} of the greedy tokens" in text
    state = measured(64, "state_bytes") / preset("gdn-340m").num_hidden_layers
    assert f"A state of gdn takes {state:,.0f} bytes per sequence and layer" in text
    agreement = rows_of("serving-agreement", "serving_agreement")
    for name in MIXERS:
        differences = (value_of(agreement, measure, mixer=name) for measure in AGREEMENT)
        assert (
            " | ".join([f"`{name}`", *(f"{difference:.1e}" if difference else "0" for difference in differences)])
            in text
        )


def test_drafts_in_vllm() -> None:
    text, rows = words("docs/serving.md"), rows_of("serving-drafts", "serving_drafts", "H200")

    def found(measure: str, kind: str, drafts: int = 5) -> float:
        return value_of(rows, measure, column={"text": kind, "drafts": drafts})

    def speed(kind: str, drafts: int) -> str:
        return f"{found('plain_token_ms', kind, drafts) / found('token_ms', kind, drafts):.2f}"

    plain, drafted = (found(measure, "repeating") for measure in ("plain_token_ms", "token_ms"))
    told = (
        f"with drafts of 5 in {drafted:.2f} ms per token, without drafts in {plain:.2f}: {speed('repeating', 5)} times"
    )
    assert f"{told} as fast; with drafts of 10 it was {speed('repeating', 10)} times" in text
    assert f"{speed('random', 5)} and {speed('random', 10)} times as fast. In all four cases every token was" in text
    assert all(row.value == 1 for row in rows if row.measure == "same_tokens")


def test_steps_of_a_model_of_vllm() -> None:
    text, rows = words("docs/serving.md"), rows_of("serving-vllm-nvidia-h200", "serving_vllm")
    ms = [value_of(rows, "step_ms", column={"preset": "llama-of-vllm", "batch": batch}) for batch in (1, 64, 256)]
    assert f"took {ms[0]:.2f} ms with one sequence, {ms[1]:.2f} with 64 and {ms[2]:.2f} with 256" in text


def test_agreement_on_a_gpu() -> None:
    text, rows = words("docs/serving.md"), rows_of("serving-agreement-nvidia-h200", "serving_agreement")
    attending, solving = ("softmax", "vla-softmax"), "gka"

    def found(measure: str, mixer: str) -> float:
        return value_of(rows, f"{measure}_difference_nats", mixer=mixer)

    def ends(measure: str, *without: str) -> str:
        differences = [found(measure, name) for name in MIXERS if name not in (*attending, *without)]
        return f"{min(differences):.1e} to {max(differences):.1e}"

    assert f"memories differ in the same batch by {ends('answer')}" in text
    assert f"`gka` differs by {found('largest', solving):.1e}, where its own reading in float32 is" in text
    assert (
        f"is {found('float64', solving):.1e} from that in float64, and the others by {ends('largest', solving)}" in text
    )
    same, other = (" and ".join(f"{found(kind, name):.3f}" for name in attending) for kind in ("answer", "largest"))
    assert f"differ by {same} in the same batch and by {other} in other pieces" in text
    for name in MIXERS:
        line = " | ".join(f"{found(kind, name):.1e}" for kind in ("answer", "largest"))
        assert re.search(rf"\| `{name}` \|[^`]* \| {re.escape(line)} \|", text)


def test_throughput_in_vllm() -> None:
    text, rows = words("docs/serving.md"), rows_of("serving-bench", "serving_bench", "H200")

    def found(mixer: str, prompt: int, measure: str, launched: bool = False) -> float:
        return value_of(rows, measure, mixer=mixer, column={"prompt": prompt, "launched": launched})

    ratios = []
    for prompt, requests in ((16384, 64), (65536, 32)):
        assert f"| {requests} of {prompt:,} tokens | `gdn` |" in text
        assert {row.column["requests"] for row in select(rows, column={"prompt": prompt})} == {requests}
        for name in ("gdn", "softmax"):
            tokens, launched = (found(name, prompt, "tokens_per_second", way) for way in (False, True))
            written, first, step = (
                found(name, prompt, measure) for measure in ("written_tokens_per_second", "first_token_ms", "step_ms")
            )
            shown = f"| {tokens:,.0f} | {launched:,.0f} | {written:,.0f} | {first / 1e3:.2f} | {step:.1f} |"
            assert shown in text
        fast, slow = (found(name, prompt, "tokens_per_second") for name in ("gdn", "softmax"))
        ratios.append(f"{fast / slow:.1f}")
    assert f"`gdn` serves {ratios[0]} times the tokens of softmax attention at 16,384 and {ratios[1]} times" in text
    config = preset("gdn-340m")
    state = value_of(
        rows_of("serving-decode", "serving_decode", "H200"), "state_bytes",
        column={"preset": "gdn-340m", "state_dtype": "float32", "batch": 64, "pool": True},
    )  # fmt: skip
    assert f"A state of `gdn` takes {state / 2**20:.1f} MiB" in text
    of_token = config.num_hidden_layers * 2 * config.hidden_size * 2
    assert f"take {16384 * of_token / 2**30:.1f} GiB at 16,384 tokens and {65536 * of_token / 2**30:.1f} at" in text
    at_once = [45 * 2**30 // ((prompt + 128) * of_token) for prompt in (16384, 65536)]
    assert f"{at_once[0]} and {at_once[1]} of the requests run at a time" in text


def test_qwen3_next_in_vllm() -> None:
    text, rows = words("docs/serving.md"), rows_of("serving-models", "serving_models", "H200")
    assert value_of(rows, "same_tokens") == 1
    lines = [
        (f"first token of {prompt:,} tokens", "first_token_ms", {"prompt": prompt}) for prompt in (2048, 16384, 65536)
    ]
    lines += [(f"step of {n} {'sequence' if n == 1 else 'sequences'}", "step_ms", {"batch": n}) for n in (1, 64)]
    for what, measure, column in lines:
        theirs, ours = (
            value_of(rows, measure, column={**column, "kernels": kernels}) for kernels in ("vLLM", "fastweights")
        )
        assert f"| {what} | {theirs:.2f} | {ours:.2f} | {theirs / ours:.2f} |" in text


def test_recall_at_its_defaults() -> None:
    text = words("docs/rules.md")
    first = {name: first_recall(name, RESULTS) for name in MIXERS}
    by_seed = {name: sorted(first_recall(name, RESULTS, seed=seed) for seed in SEEDS) for name in ("softmax", *SLOW)}
    ranges = {name: f"{share(found[0])} to {share(found[-1])}" for name, found in by_seed.items()}
    *others, last = (f"`{name}` {ranges[name]}" for name in ("vla", "palimpsa-m", "vla-softmax", "mamba2"))
    assert (
        f"`palimpsa-d` reaches {ranges['palimpsa-d']}, {', '.join(others)} and {last}. All others reach .99 to 1.0"
        in text
    )
    rest = [x for name, x in first.items() if x and name not in ("vla-linear", "vla-deltanet", *SLOW)]
    assert share(min(rest)) >= ".99" and share(by_seed["softmax"][0]) == "1.00"
    assert f"reach {ranges['mamba2']} with `mamba2` and {ranges['palimpsa-m']} with `palimpsa-m`" in text
    assert f"it reaches {share(first['vla-softmax'])} on 4 pairs" in text
    summary = result("commands/recall_readme")["summary"]
    at_16 = next(row for row in summary if (row["mixer"], row["pairs"]) == ("softmax", 16))
    assert f"at chance ({share(at_16['accuracy'])}) after 600 steps" in text
