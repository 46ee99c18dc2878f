"""The parts with language models in one block, from end to end at toy size: text, rates, budgets, measures, hybrids, resuming."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fastweights_studies.leaderboard import PARTS, SIZES, Request, load_board, run_part, table_of
from fastweights_studies.leaderboard.matched_language import Training, Variant
from fastweights_studies.leaderboard.matched_measures import GAP, find_identifiers, token_losses
from fastweights_studies.leaderboard.sizes import MatchedLanguageSize
from fastweights_studies.measure import code_text
from fastweights_studies.record import read_rows, select, write_rows

from fastweights.data.text import TextCorpus
from fastweights.layers import MIXERS, MixerChoice
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.training import WorkerError
from tests.fast_set import fast_where

from .toy import LANGUAGE, TOY

pytest.importorskip("accelerate")
PART, PROXIES, HYBRIDS = PARTS["language-matched"], PARTS["language-proxies"], PARTS["hybrids"]


@pytest.fixture(autouse=True)
def toy(monkeypatch, tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(6):
        names = [f"zq{number}_{place * place % 97}_kx" for place in range(400)]
        (text / f"{number}.txt").write_text(" ".join(names))
    corpus = TextCorpus(paths=[str(text)], held_out=[str(text / "0.txt"), str(text / "1.txt")])
    monkeypatch.setattr(MatchedLanguageSize, "own_text", lambda size: corpus)
    monkeypatch.setitem(SIZES, "small", TOY)


@pytest.fixture
def trained(monkeypatch):
    """The runs that were trained."""
    from fastweights.training.language import together

    began, train = [], together.train_language
    monkeypatch.setattr(together, "train_language", lambda run, **options: began.append(run) or train(run, **options))
    return began


def request(folder, *mixers, **more):
    choices = tuple(map(MixerChoice, mixers))
    return Request(**{"mixers": choices, "size": "small", "device": "cpu", "output": folder, "workers": 1, **more})


def names(runs):
    """Of the folders of runs, without their rates."""
    return [Path(run.output).name.partition("-lr")[0] for run in runs]


def of_proxies(runs):
    return [run for run in runs if "tokens500-" in run.output]


@pytest.mark.slow
def test_rates_come_from_proxies_and_numbers_from_test_text(tmp_path, trained):
    path = run_part(PART, request(tmp_path, "linear", "gdn"))
    rows = PART.rows("small", tmp_path, tmp_path)
    budgets = {(row.mixer, row.column["tokens"], row.seed) for row in rows}
    assert budgets == {(m, 1000, s) for m in ("linear", "gdn") for s in (0, 1)} | {("linear", 2000, 0)}
    assert len(of_proxies(trained)) == 4 and len(trained) == 4 + 5
    for mixer in ("linear", "gdn"):
        losses = {
            run.learning_rate: json.loads((Path(run.output) / "result.json").read_bytes())["held_out_losses"][-1]
            for run in of_proxies(trained)
            if f"/{mixer}/" in run.output
        }
        assert {row.run["learning_rate"] for row in select(rows, mixer=mixer)} == {min(losses, key=losses.get)}
    assert {run.model["mixer"]["output_gate"] for run in trained if "/gdn/" in run.output} == {
        None
    }  # the matched block
    (of_test,) = {run.corpus.singles[0].held_out for run in trained}
    assert [Path(one).name for one in of_test] == ["validation.jsonl.gz"]
    columns = {json.dumps(row.column) for row in select(rows, measure="loss", mixer="linear")}
    assert columns == {json.dumps(column.parameters) for column in PART.setting("small")}
    assert all(row.value is not None for row in rows)
    head, lines = table_of(PART, "small", rows, ["linear", "gdn", "rls"])
    assert "1K: test text, decoded tokens per second" in head and "1K: needle in 400, numbers found" in head
    assert "1K: context 64, bytes of state" not in head and lines[-1][-1] == "not run"
    (line,) = (line for line in lines if line[0] == "gdn")
    assert line[head.index("1K: needle in 400")].endswith("°") and "°" not in line[head.index("1K: context 64")]
    before = path.read_bytes()
    trained.clear()
    run_part(PART, request(tmp_path, "linear", "gdn"))
    assert trained == [] and path.read_bytes() == before


@pytest.mark.slow
def test_a_mean_over_positions_is_the_loss_of_the_row(tmp_path, trained):
    run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    rows = select(PART.rows("small", tmp_path, tmp_path), measure="loss", column={"tokens": 1000})
    at = {str(row.column["at"]): row.value for row in rows}
    assert at["None"] == pytest.approx((16 * at["[0, 16]"] + 239 * at["[16, 256]"]) / 255)
    curve = read_rows(tmp_path / "language-matched-curves-small.json")
    losses = {row.column["read"]: row.value for row in select(curve, measure="training_loss", column={"tokens": 1000})}
    result = json.loads(next(tmp_path.glob("trained/*/linear/softmax0-tokens1000-seed0-lr*/result.json")).read_bytes())
    assert losses == dict(zip(result["loss_tokens"], result["losses"])) and len(losses) == 2
    assert len(select(curve, measure="validation_loss", column={"tokens": 2000})) >= 4


@pytest.mark.slow
def test_a_new_mixer_and_a_new_seed_train_nothing_again(tmp_path, trained):
    run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    board = load_board(tmp_path / "language-matched-small.json").rows
    shutil.rmtree(tmp_path / "trained")
    trained.clear()
    run_part(PART, request(tmp_path, "linear", "kda", seeds=(0, 7)))
    linear = [run for run in trained if "/linear/" in run.output]
    assert names(linear) == ["softmax0-tokens1000-seed7", "softmax0-tokens2000-seed7"]  # at the rate of the board
    assert {run.learning_rate for run in linear} == {board[0].run["learning_rate"]}
    assert sum("/kda/" in run.output for run in trained) == 4
    assert load_board(tmp_path / "language-matched-small.json").rows[: len(board)] == board


@pytest.mark.slow
def test_a_search_whose_models_were_not_measured_keeps_its_rate(tmp_path, trained, monkeypatch):
    from fastweights_studies.leaderboard import matched_language

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(matched_language, "call_each", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_part(PROXIES, request(tmp_path, "linear", seeds=(0,)))
    path = tmp_path / "language-proxies-curves-small.json"
    curves = read_rows(path)
    (rate,) = {row.run["learning_rate"] for row in curves}
    shutil.rmtree(tmp_path / "trained")
    trained.clear()
    run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    assert {run.learning_rate for run in trained} == {rate} and not of_proxies(trained)
    shutil.rmtree(tmp_path / "trained")
    write_rows(path, [replace(row, run={**row.run, "length": 7}) for row in curves])  # of another setting
    trained.clear()
    run_part(PROXIES, request(tmp_path, "linear", seeds=(0,)))
    assert len(trained) == 2 and {row.run["length"] for row in read_rows(path)} == {
        PROXIES.size("small").training["length"]
    }


@pytest.mark.slow
def test_further_seeds_are_of_models_of_one_size(tmp_path, trained):
    path = run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    write_rows(path, [replace(row, run={**row.run, "intermediate_size": 1}) for row in read_rows(path)])
    trained.clear()
    run_part(PART, request(tmp_path, "linear", seeds=(0,)))  # asks for no further ones
    with pytest.raises(ValueError, match="output holds models of linear with another intermediate_size"):
        run_part(PART, request(tmp_path, "linear", seeds=(0, 1)))
    assert trained == []


def test_columns_choose_the_models_that_are_trained(tmp_path, trained):
    PART.check_columns(request(tmp_path, "linear", columns=("2K: ",)))
    with pytest.raises(ValueError, match="columns must be texts in titles of language-matched, got '3K'"):
        PART.check_columns(request(tmp_path, "linear", columns=("3K",)))
    run_part(PART, request(tmp_path, "linear", columns=("2K: test",)))
    assert "softmax0-tokens2000-seed0" in names(trained) and len(trained) == len(of_proxies(trained)) + 1
    found = {entry.column for entry in PART.entries(PART.rows("small", tmp_path, tmp_path))}
    assert len(found) == len(PART.setting("small")) / 2 and all(column.startswith("2K: ") for column in found)


@pytest.mark.slow
def test_an_interrupted_part_continues(tmp_path, trained, monkeypatch):
    from fastweights.training.language import together

    train = together.train_language

    def interrupted(run, **options):
        if len(trained) == 3:
            raise KeyboardInterrupt
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_part(PART, request(tmp_path, "linear"))
    monkeypatch.setattr(together, "train_language", train)
    run_part(PART, request(tmp_path, "linear"))
    assert len(trained) == len({run.output for run in trained}) == 2 + 3


@pytest.mark.slow
def test_a_model_that_diverges_has_rows_without_values(tmp_path, monkeypatch):
    from fastweights.training.language import together

    train = together.train_language

    def diverging(run, **options):
        if "tokens1000-seed1" in run.output:
            raise together.NonFiniteLoss("the loss is nan at step 1")
        return train(run, **options)

    monkeypatch.setattr(together, "train_language", diverging)
    run_part(PART, request(tmp_path, "linear"))
    entries = {entry.column: entry for entry in PART.entries(PART.rows("small", tmp_path, tmp_path))}
    assert entries["1K: test text"].seeds == (0,) and entries["1K: test text"].diverged == 1
    assert entries["2K: test text"].diverged == 0


@pytest.mark.slow
def test_proxies_are_a_part_whose_rates_the_larger_models_take(tmp_path, trained):
    """The first seed trains at every rate, and its best is the one that counts."""
    run_part(PROXIES, request(tmp_path, "linear"))
    rows = PROXIES.rows("small", tmp_path, tmp_path)
    assert names(trained) == ["softmax0-tokens500-seed0"] * 2 + ["softmax0-tokens500-seed1"]
    (rate,) = {row.run["learning_rate"] for row in rows}
    losses = {
        run.learning_rate: json.loads((Path(run.output) / "result.json").read_bytes())["held_out_losses"][-1]
        for run in trained[:2]
    }
    assert rate == trained[2].learning_rate == min(losses, key=losses.get)
    assert {row.seed for row in rows} == {0, 1} and {row.measure for row in rows} == {"loss", "found"}
    assert PROXIES.trainings(request(tmp_path, "linear")) == 3
    assert PROXIES.trainings(request(tmp_path, "linear", seeds=(7,))) == 3  # the first seed is trained too
    shutil.rmtree(tmp_path / "trained")
    trained.clear()
    run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    assert {run.learning_rate for run in trained} == {rate} and not of_proxies(trained)


def test_as_many_models_share_a_gpu_as_it_holds(tmp_path, monkeypatch):
    asked = []

    def train(runs, request):
        asked.append(request.processes())
        raise WorkerError("not here")

    monkeypatch.setattr("fastweights_studies.leaderboard.matched_language.train_models", train)
    monkeypatch.setattr("fastweights_studies.leaderboard.matched_language.check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    sizes = {"language-proxies": replace(TOY.matched_language["language-proxies"], at_once=3)}
    monkeypatch.setitem(SIZES, "small", replace(TOY, matched_language=sizes))
    for workers in (None, 5):
        with pytest.raises(WorkerError):
            run_part(PROXIES, request(tmp_path, "linear", device="cuda", workers=workers))
    assert asked == [6, 5]


@pytest.mark.slow
def test_text_that_a_part_does_not_read_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(code_text, "PIECE", 5000)
    run_part(PROXIES, request(tmp_path, "linear"))
    first, *others = sorted((tmp_path / "code-text").glob("train-*"))
    others[-1].unlink()
    run_part(PROXIES, request(tmp_path, "linear", "gdn"))
    with pytest.raises(ValueError, match=f"{others[-1].name} is missing"):
        run_part(PART, request(tmp_path, "linear"))
    first.unlink()
    with pytest.raises(ValueError, match=f"{first.name} is missing"):
        run_part(PROXIES, request(tmp_path, "gla"))


@pytest.mark.slow
def test_a_model_that_cannot_be_measured_loses_no_other_one(tmp_path, trained):
    """And the numbers of two processes are those of one."""
    board = run_part(PART, request(tmp_path, "linear", seeds=(0,)))
    alone = PART.entries(PART.rows("small", tmp_path, tmp_path))
    board.unlink()
    (broken,) = tmp_path.glob("trained/language-matched-small/linear/softmax0-tokens2000-seed0-lr*/model/config.json")
    broken.write_text("{")
    trained.clear()
    with pytest.raises(WorkerError, match="linear/softmax0-tokens2000-seed0 failed: ValueError"):
        run_part(PART, request(tmp_path, "linear", seeds=(0,), workers=2))
    together = {entry.column: entry for entry in PART.entries(PART.rows("small", tmp_path, tmp_path))}
    assert trained == [] and set(together) == {entry.column for entry in alone if entry.column.startswith("1K: ")}
    for entry in alone:
        if entry.column in together:
            assert together[entry.column].values == pytest.approx(entry.values, abs=1e-4)


def test_the_whole_registry_stands_for_the_declared_mixers(tmp_path):
    every = tuple(map(MixerChoice, MIXERS))
    assert PART.participants(every)[-1] == "rls-decay" and len(PART.participants(every)) == 17
    assert HYBRIDS.participants(every) == ["mamba2", "gdn", "kda"]
    assert HYBRIDS.participants((MixerChoice("mesa"),)) == ["mesa"]
    assert PART.trainings(request(tmp_path, "linear")) == 2 + 2 + 1


@fast_where(lambda given: given["name"] == "small")
@pytest.mark.parametrize("name", SIZES)
def test_hybrids_have_softmax_attention_in_every_nth_layer(name, monkeypatch):
    monkeypatch.undo()
    size = SIZES[name].matched_language["hybrids"]
    alone, _ = Variant(choice=MixerChoice("kda"), every=0).match(size)
    for every in size.softmax_every:
        matched, fields = Variant(choice=MixerChoice("kda"), every=every).match(size)
        config = FastWeightsConfig(**fields, mixer=matched.choice.entry, intermediate_size=matched.intermediate_size)
        layers = [mixer for mixer, _ in config.mixers()]
        assert [n for n, mixer in enumerate(layers, 1) if mixer == "softmax"] == list(
            range(every, len(layers) + 1, every)
        )
        assert dict(config.mixers())["softmax"]["conv_size"] == 4
        assert matched.choice.options["head_dim"] == alone.choice.options["head_dim"] and matched.given == {}
        assert abs(matched.parameters / alone.parameters - 1) < 0.01


@pytest.mark.slow
def test_full_models_have_about_100_million_parameters(monkeypatch):
    monkeypatch.undo()
    size = SIZES["full"].matched_language["language-matched"]
    for choice in PART._declared():
        matched, _ = Variant(choice=choice, every=0).match(size)
        assert abs(matched.parameters / 98e6 - 1) < 0.01, choice.label
    assert Training(Variant(choice=choice, every=0), 10, 1).name == "rls-decay/softmax0-tokens10-seed1"


@pytest.mark.slow
def test_hybrids_train_and_are_measured(tmp_path, trained):
    run_part(HYBRIDS, request(tmp_path, "gdn"))
    found = {entry.column: entry for entry in HYBRIDS.entries(HYBRIDS.rows("small", tmp_path, tmp_path))}
    assert {column.partition(",")[0] for column in found} == {"softmax in 1 of 4", "softmax in 1 of 2"}
    assert {len(run.model["softmax_layers"]) for run in trained} == {1, 2} and len(trained) == 2 * (2 + 1)
    state = {n: found[f"softmax in 1 of {n}, 1K: test text"].of("state_bytes") for n in (2, 4)}
    assert state[2] > state[4]  # keys and values of every token in one layer more


def test_another_text_or_none_is_refused(tmp_path, monkeypatch):
    debian = {**TOY.matched_language, "language-matched": replace(LANGUAGE, source="debian")}
    monkeypatch.setitem(SIZES, "small", replace(TOY, matched_language=debian))
    with pytest.raises(ValueError, match=r"code_text --output .*code-text` writes it"):
        run_part(PART, request(tmp_path, "linear"))
    (tmp_path / "code-text").mkdir()
    (tmp_path / "code-text" / "text.json").write_text('{"sha256": "0"}')
    with pytest.raises(ValueError, match="of other packages or versions"):
        run_part(PART, request(tmp_path, "linear"))


def test_identifiers_at_first_and_again():
    """Tokens of one character: short names do not count, nor do those that stood a moment ago."""
    words = ["alpha", "of", "alpha", "." * GAP, "alpha", "alphas"]
    text = " ".join(words)
    kinds = find_identifiers(text, [(n, n + 1) for n in range(len(text))])
    marked = "".join(str(kind) for kind in kinds)
    assert marked == f"111110000{'0' * 6}{'0' * GAP}0222220111111"
    cut = find_identifiers(text, [(n, n + 1) for n in range(20, len(text))])
    assert 2 not in cut and cut.count(1) == 11  # what stands before the row was not read


def test_losses_are_of_the_next_token():
    torch.manual_seed(0)
    model = FastWeightsForCausalLM(
        FastWeightsConfig(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_heads=2, mixer="linear")
    )
    ids = torch.randint(11, (9, 6))
    logits = model(ids).logits
    wanted = -logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    torch.testing.assert_close(token_losses(model, ids), wanted.detach())
