"""A whole training: the loss falls, everything is recorded, the saved model is the trained one."""

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastweights.analysis.language_plots import save_language_plots
from fastweights.analysis.tables import language_tables
from fastweights.data.text import PackedRows, TextTokenizer, pack_rows, prepare_text
from fastweights.results.language import load_result
from fastweights.training.language import train_language
from fastweights.training.language.folder import LanguageFolder
from fastweights.training.language.model import build_model, model_config
from fastweights.training.language.trainer import LanguageTrainer

from .small import log, losses


def test_trains_two_mixers_and_records_all_of_it(make_run):
    pytest.importorskip("matplotlib")
    run = make_run(
        mixers=("linear", "pgdn:conv_size=2@small"),
        model={"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2},
        max_steps=30,
        checkpoint_every=20,
        tensorboard=True,
    )
    results = train_language(run)
    assert [result.name for result in results] == ["linear", "small"]
    assert [Path(result.folder).parent.name for result in results] == ["linear", "small"]
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    for single, result in zip(run.models(), results, strict=True):
        points = log(single)
        assert result.losses == losses(single) and result.loss_steps == list(range(1, 31))
        assert abs(result.losses[0] - math.log(300)) < 0.2
        assert result.losses[-1] < result.losses[0] - 1.5 and result.held_out_loss < result.held_out_losses[0]
        assert result.held_out_steps == [4, 8, 12, 16, 20, 24, 28, 30]
        assert points[0].keys() == {"step", "tokens", "loss", "learning_rate", "gradient_norm"}
        assert result.tokens == points[-1]["tokens"] == 30 * 2 * 32
        assert [entry["length"] for entry in result.perplexities] == [16, 64]
        assert load_result(Path(single.output, "result.json")) == result
        assert {path.name for path in Path(single.output, "checkpoints").iterdir()} == {
            "checkpoint-20",
            "checkpoint-30",
        }
        assert list(Path(single.output, "tensorboard").iterdir())

        model = AutoModelForCausalLM.from_pretrained(result.folder).eval()
        tokenizer = AutoTokenizer.from_pretrained(result.folder)
        assert tokenizer.get_vocab() == text.tokenizer.get_vocab()
        assert model.config.eos_token_id == tokenizer.eos_token_id == 0
        assert model.num_parameters() == result.parameters
        rows = PackedRows(text.held_out, run.length)
        assert len(rows) >= run.evaluation_rows  # so that the loss of all is near that of those read
        loss = model(**pack_rows([rows[row] for row in range(len(rows))])).loss.item()
        assert abs(loss - result.held_out_loss) < 0.2
        assert model.config.use_cache and model(torch.tensor([[1, 2]])).past_key_values is not None
        card = Path(result.folder, "README.md").read_text()
        assert f"| Held-out loss | {result.held_out_loss:.4f} nats per token |" in card and "| Steps | 30 |" in card
        assert "AutoTokenizer" in card and str(Path(run.output).parent) not in card  # a card is published
    assert json.loads(Path(run.output, "results.json").read_text())[1]["name"] == "small"
    assert [[*map(str, table.columns[0].cells)] for table in language_tables(results)] == [["linear", "small"]] * 2
    assert [path.name for path in save_language_plots(results, Path(run.output))] == ["loss.png", "perplexity.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in Path(run.output).glob("*.png"))
    assert train_language(run) == results  # nothing is left to do


def test_accumulated_batches_are_one_large_batch(make_run):
    runs = [
        make_run("large", batch_size=4, max_steps=4),
        make_run("accumulated", batch_size=1, accumulation=4, max_steps=4),
        make_run("checkpointed", batch_size=4, max_steps=4, gradient_checkpointing=True),
    ]
    large, accumulated, checkpointed = [train_language(run)[0] for run in runs]
    for other in (accumulated, checkpointed):
        torch.testing.assert_close(other.losses, large.losses, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(other.held_out_losses, large.held_out_losses, rtol=1e-5, atol=1e-5)


def test_the_schedule_the_optimizer_and_the_data_are_those_of_the_run(make_run, monkeypatch):
    """One step of Trainer is one step written by hand."""
    from fastweights.data.text.packing import ShuffledRows
    from fastweights.training.optimization import weight_decay_groups

    run = make_run(
        max_steps=3,
        warmup_fraction=0.4,
        warmup_start=0.1,
        max_gradient_norm=0.5,
        weight_decay=0.3,
        beta1=0.5,
        beta2=0.5,
    )
    result = train_language(run)[0]
    text = prepare_text(run.corpus, run.tokenizer, run.cache)
    model = build_model(run, model_config(run, text.tokenizer)).train()
    optimizer = torch.optim.AdamW(weight_decay_groups(model, 0.3), lr=1.0, betas=(0.5, 0.5))
    rows = ShuffledRows(PackedRows(text.train, 32), seed=0, count=6)
    # Warm-up over one step from a tenth, then cosine from step 1 to step 3.
    rates = [0.1e-2, 1e-2, (0.1 + 0.9 * 0.5) * 1e-2]
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = model(**pack_rows([rows[2 * step], rows[2 * step + 1]])).loss
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        point = [point for point in log(run) if "loss" in point][step]
        assert point["learning_rate"] == pytest.approx(rate)
        assert point["loss"] == pytest.approx(loss.item(), abs=1e-5)
        assert point["gradient_norm"] == pytest.approx(norm.item(), rel=1e-3)
    assert result.held_out_steps == [3]


def test_every_seed_is_measured_on_the_same_held_out_rows(make_run, tmp_path):
    """And trained on rows in an order of its own."""
    held_out, trained = [], []
    for seed in (0, 5):
        run = make_run(seed=seed)
        text = prepare_text(run.corpus, run.tokenizer, run.cache)
        model = build_model(run, model_config(run, text.tokenizer))
        trainer = LanguageTrainer(run, model, text, LanguageFolder(tmp_path), [])
        assert len(trainer.held_out) == 7 < len(trainer.held_out.rows)
        held_out.append([tokens.tolist() for tokens, _ in map(trainer.held_out.__getitem__, range(7))])
        trained.append([tokens.tolist() for tokens, _ in map(trainer.rows.__getitem__, range(7))])
    assert held_out[0] == held_out[1] and trained[0] != trained[1]


def test_half_precision_learns_too(make_run):
    single, half = [train_language(make_run(name, precision=name))[0] for name in ("no", "bf16")]
    assert half.losses != single.losses
    torch.testing.assert_close(half.losses, single.losses, rtol=0.02, atol=0.02)


@pytest.mark.slow
def test_continues_a_model_as_another_mixer(make_run):
    """An interrupted training of it continues with the same losses."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "mixer": "mamba2"}
    source = train_language(make_run("source", model=small, max_steps=2, context_lengths=()))[0]
    model = {"path": source.folder, "mixer": {"name": "palimpsa-m", "b_scale": 0.5}}
    whole, cut = (
        make_run(name, model=model, tokenizer=TextTokenizer(), max_steps=4, context_lengths=())
        for name in ("whole", "cut")
    )
    (result,) = train_language(whole)
    assert train_language(cut, stop_at=2) is None
    assert train_language(cut)[0].losses == result.losses and result.name == "palimpsa-m"
    trained = AutoModelForCausalLM.from_pretrained(result.folder)
    assert trained.config.mixers() == [("palimpsa-m", {"b_scale": 0.5})]


def test_continues_a_model(make_run):
    first = make_run("first", max_steps=20)
    trained = train_language(first)[0]
    second = make_run("second", model={"path": trained.folder}, tokenizer=TextTokenizer(), learning_rate=1e-5)
    result = train_language(second)[0]
    assert abs(result.held_out_losses[0] - trained.held_out_loss) < 0.05
    assert result.parameters == trained.parameters


def test_models_of_one_seed_begin_alike_outside_their_mixers(make_run):
    """With seed_by_name; and another seed begins elsewhere."""
    first = {}
    for mixer, seed in (("linear", 0), ("gdn", 0), ("gdn", 1)):
        run = make_run(seed=seed, seed_by_name=True, model={**make_run().model, "mixer": mixer})
        model = build_model(run, model_config(run))
        first[mixer, seed] = {
            name: x for name, x in model.state_dict().items() if ".mixer." not in name and x.std() > 0
        }
    (one, other, another) = first.values()
    assert one.keys() == other.keys() and len(one) > 3
    for name in one:
        assert one[name].equal(other[name]) and not one[name].equal(another[name]), name
