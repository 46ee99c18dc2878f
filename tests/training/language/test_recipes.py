"""The run files of examples/papers: the numbers that the papers print, the same runs made small, and their dry runs."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate")

from fastweights.cli import main
from fastweights.models import PRESETS
from fastweights.training.language import LanguageRun, load_run, tiny_run, train_language
from fastweights.training.language.folder import LanguageFolder
from fastweights.training.language.model import model_config
from fastweights.training.language.planning import plan_training
from fastweights.training.optimization import ParameterGroup

ROOT = Path(__file__).parents[3]
FILES = {
    file.stem: file for file in sorted((ROOT / "examples" / "papers").iterdir()) if file.suffix in (".toml", ".py")
}
M, B = 10**6, 10**9
GPUS = 8  # for which the files are written

Stage = dict[str, Any]  # fields of a stage, and "step", its tokens per step; as printed
Printed = tuple[str, list[str], list[Stage]]  # dataset, presets, stages

# Palimpsa, section 3.3 and its appendix on language modelling: "We utilize a cosine learning rate scheduler with a 2,000-step
# warmup", "170M and 760M parameters, and for 15B and 30B tokens"; "fine-tuned ... starting from 14BT", "2B tokens starting from
# the 28B token checkpoint"; "a shortened 200-step warmup", "the peak learning rate is reduced to 1/10".
FINEWEB = "HuggingFaceFW/fineweb-edu"


def palimpsa(size: str, tokens: int, rate: float, rows: list[str]) -> dict[str, Printed]:
    rest = tokens // 15
    first = {"schedule": "cosine", "learning_rate": rate, "warmup_steps": 2000}
    second = {"schedule": "cosine", "learning_rate": rate / 10, "warmup_steps": 200, "max_tokens": rest}
    whole, cut = {**first, "max_tokens": tokens}, {**first, "max_tokens": tokens - rest, "schedule_tokens": tokens}
    return {
        f"palimpsa-{size}": (FINEWEB, [row.format(size) for row in rows], [whole]),
        f"palimpsa-{size}-d-continued": (FINEWEB, [f"palimpsa-d-plain-{size}"], [cut, second]),
        f"palimpsa-{size}-m-continued": (FINEWEB, [f"mamba2-{size}-palimpsa"], [cut, second]),
    }


TABLE_2 = ["transformer-{}-palimpsa", "gdn-{}-palimpsa", "palimpsa-d-plain-{}", "mamba2-{}-palimpsa"]
FULLY_TRAINED = [*TABLE_2[:3], "palimpsa-d-{}", TABLE_2[3], "palimpsa-m-{}"]

# Gated KalmaNet, appendix D: "AdamW optimizer with initial learning rate 1e-3, 5% warm-up steps, cosine schedule, gradient
# clipping with maximum norm 1"; table 4; section 5.3: "25B tokens of long documents at 128K context length".
DCLM = "mlfoundations/dclm-baseline-1.0-parquet"
KALMAN = {"schedule": "cosine", "learning_rate": 1e-3, "warmup_fraction": 0.05, "max_gradient_norm": 1.0}
SMALL = {**KALMAN, "max_tokens": 8 * B, "length": 2048, "step": M}
MIDDLE = {**KALMAN, "max_tokens": 20 * B, "length": 2048, "step": 2 * M}
BIG = {**KALMAN, "max_tokens": 100 * B, "length": 4096, "step": 2 * M}
LONG = {"max_tokens": 25 * B, "length": 131072}
TABLE_5 = ["gla", "gdn", "deltanet"]

# Lattice, section 5 and appendix A: "110M params / 2.4B tokens", "340M params / 7.5B tokens", "the training batch size is fixed
# at 0.5 million tokens, irrespective of sequence length".
PILE, BOOKS = "EleutherAI/the_pile_deduplicated", "emozilla/pg19"
COLUMNS = {
    "pile-8k": 8192,
    **{f"books-{k}": n for k, n in zip(("512", "1k", "2k", "4k", "8k", "16k"), (2**i for i in range(9, 15)))},
}


def lattice(size: str, kinds: tuple[str, ...] = ("lattice", "lattice-encode", "lattice-similarity")) -> list[str]:
    """The rows of tables 2 and 3."""
    baselines = ("transformer", "linear", "mamba2", "deltanet", "gdn", "ttt")
    return [*(f"{name}-{size}-lattice" for name in baselines), *(f"{name}-{size}" for name in kinds)]


def column(length: int, tokens: int = 2_400 * M) -> list[Stage]:
    return [{"max_tokens": tokens, "length": length, "step": 0.5 * M}]


def shortened(rows: list[str]) -> list[str]:
    """Those that have a number at 16k."""
    return [row for row in rows if not row.startswith(("transformer", "lattice-encode"))]


# Preconditioned DeltaNet, appendix E.1.
SLIM = "cerebras/SlimPajama-627B"
PDN = {
    "schedule": "cosine", "learning_rate": 4e-4, "warmup_tokens": 500 * M, "warmup_start": 0.1, "final_learning_rate": 4e-5,
    "weight_decay": 0.01, "max_gradient_norm": 1.0, "length": 2048, "step": 0.5 * M,
}  # fmt: skip
TABLES_6_AND_7 = [
    *(
        "gdn",
        "pgdn",
        "pmamba2",
        "pgdn-unstable",
        "pgdn-tied",
        "gdn-negative",
        "pgdn-unit",
        "pgdn-damped",
        "pgdn-fading",
    ),
    *("pgdn-tanh", "pgdn-amplify", "pgdn-dampen", "mesa"),
]
TRIPLES = [
    row
    for name in ("deltanet", "gdn", "kda")
    for row in (name, {"deltanet": "pdn"}.get(name, f"p{name}"), f"{name}-negative")
]

PRINTED: dict[str, Printed] = {
    **palimpsa("170m", 15 * B, 3e-3, FULLY_TRAINED),
    **palimpsa("760m", 30 * B, 1.25e-3, TABLE_2),
    "gka-440m": (DCLM, [f"{name}-440m-gka" for name in ("transformer", *TABLE_5)] + ["gka-440m"], [SMALL]),
    "gka-1b": (DCLM, [f"{name}-1b-gka" for name in ("transformer", "mamba2", *TABLE_5)] + ["gka-1b"], [MIDDLE]),
    "gka-2.8b": (DCLM, [f"{name}-2.8b-gka" for name in ("mamba2", *TABLE_5)] + ["gka-2.8b"] * 2, [BIG, LONG]),
    "gka-2.8b-attention": (DCLM, ["transformer-2.8b-gka", "gka-hybrid-2.8b"], [BIG, LONG]),
    "gka-2.8b-ablations": (DCLM, ["gka-2.8b"] * 7, [BIG]),
    "lattice-110m": (PILE, lattice("110m"), column(2048)),
    "lattice-340m": (PILE, lattice("340m"), column(2048, 7_500 * M)),
    **{
        f"lattice-110m-{name}": (
            PILE if name.startswith("pile") else BOOKS,
            shortened(lattice("110m")) if name == "books-16k" else lattice("110m"),
            column(length),
        )
        for name, length in COLUMNS.items()
    },
    "lattice-110m-ablation": (
        PILE,
        ["deltanet-110m-lattice", "ttt-110m-lattice", "lattice-orthogonal-110m", "lattice-normalized-110m", "lattice-110m"],
        column(2048),
    ),
    "pdn-340m": (SLIM, [f"{row}-340m" for row in TRIPLES], [{**PDN, "max_tokens": 15 * B}]),
    "pdn-340m-ablations": (SLIM, [f"{row}-340m" for row in TABLES_6_AND_7], [{**PDN, "max_tokens": 15 * B}]),
    "pdn-1b": (SLIM, [f"{row}-1b" for row in ("gdn", "pgdn", "kda", "pkda")], [{**PDN, "max_tokens": 50 * B}]),
}  # fmt: skip
LONG_FILES = ("gka-2.8b", "gka-2.8b-attention")  # whose second stage is made for an H200


def test_there_is_a_row_of_numbers_for_every_file():
    assert set(PRINTED) == set(FILES)


@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_has_the_numbers_that_its_paper_prints(name):
    dataset, presets, stages = PRINTED[name]
    models = load_run(FILES[name]).models()
    assert [model.model.get("preset", model.label) for model in models] == presets
    for model in models:
        parts = model.stage_runs()
        assert parts[0].corpus.dataset == dataset and all(part.corpus.streaming for part in parts)
        for part, printed in zip(parts, stages, strict=True):
            fields = {key: value for key, value in printed.items() if key != "step"}
            assert {key: getattr(part, key) for key in fields} == pytest.approx(fields)
            plan, step = part.plan(GPUS), printed.get("step")
            assert plan.tokens(1) == pytest.approx(2 * M if part.length > 10**5 else step or 0.5 * M, rel=0.05)
            assert 0 <= plan.tokens(plan.steps) - printed["max_tokens"] < plan.tokens(1)


def test_gated_kalmanet_reads_with_the_tokenizer_of_gpt2_and_long_documents_in_its_second_stage():
    for name in (name for name in FILES if name.startswith("gka")):
        run = load_run(FILES[name])
        assert run.tokenizer.name == "openai-community/gpt2"
        long = run.models()[-1].stage_runs()[1:]
        assert len(long) == (name in LONG_FILES) and all(part.corpus.min_tokens == 2**16 for part in long)


def test_the_continuations_of_palimpsa_draw_b_scale_between_a_tenth_and_one():
    for size in ("170m", "760m"):
        for kind in "dm":
            plain, metaplastic = load_run(FILES[f"palimpsa-{size}-{kind}-continued"]).stage_runs()
            mixer, options = model_config(plain).mixer_of(0)
            assert mixer == {"d": "palimpsa-d", "m": "mamba2"}[kind] and not options.get("metaplasticity", False)
            assert metaplastic.model["mixer"] == {"name": f"palimpsa-{kind}", "b_scale": [0.1, 1.0]}


def test_the_ablations_of_gated_kalmanet():
    """Appendices F.1, F.2, G and H; F.3 is in the file of the models that have the stage with long documents."""
    options = [model_config(model).mixer_of(0)[1] for model in load_run(FILES["gka-2.8b-ablations"]).models()]
    common = model_config(LanguageRun(model={"preset": "gka-2.8b"})).mixer_of(0)[1]
    changes = [
        {},
        {"ridge": 0.25, "adaptive_ridge": False},
        {"decay": "none"},
        {"ridge": 0.01},
        {"ridge": 0.05},
        {"ridge": 0.1},
    ]
    assert options == [{**common, **change} for change in [*changes, {"sketch": 32}]]
    *_, whole, without = load_run(FILES["gka-2.8b"]).models()
    assert model_config(whole).mixer_of(0)[1] == common and whole.label == "gka-2.8b"
    assert model_config(without).mixer_of(0)[1] == {**common, "alpha_connection": False} and without.label == "no-alpha"


def kinds(run: LanguageRun) -> tuple[Any, ...]:
    """What a small model must have in common with the whole one."""
    config = model_config(run)
    entries = [entry for number, entry in enumerate(config.mixers()) if entry not in config.mixers()[:number]]
    return entries, config.tie_word_embeddings, bool(config.intermediate_size), config.norm, config.scale_residuals


# One file of each paper, with stages and without; the others are like them.
FEW = {
    "palimpsa-170m",
    "palimpsa-760m-m-continued",
    "gka-440m",
    "gka-2.8b-attention",
    "lattice-110m-ablation",
    "pdn-1b",
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FEW else pytest.mark.slow) for name in FILES])
def test_a_tiny_recipe_has_the_models_and_stages_of_the_whole_one(name):
    whole, tiny = load_run(FILES[name]), load_run(FILES[name], tiny=True)
    assert tiny.output == f"{whole.output}-tiny" and tiny.corpus.is_local and not tiny.tokenizer.exists
    for model, small in zip(whole.models(), tiny.models(), strict=True):
        assert kinds(small) == kinds(model) and small.label == model.label
        assert model_config(small).hidden_size == 64 and model_config(small).num_hidden_layers == 2
        parts, small_parts = model.stage_runs(), small.stage_runs()
        assert [part.stage for part in small_parts] == [part.stage for part in parts]
        for part, made in zip(parts, small_parts, strict=True):
            assert made.plan(1).steps in (4, 16) and made.learning_rate == part.learning_rate and made.corpus.is_local
            assert made.corpus.streaming and bool(made.corpus.min_tokens) == bool(part.corpus.min_tokens)
            for key in ("warmup_steps", "warmup_tokens", "schedule_tokens"):
                assert (getattr(made, key) is None) == (getattr(part, key) is None)
        assert [part.length for part in small_parts] == (
            [64, 256] if len(parts) > 1 and parts[1].length > 2048 else [64] * len(parts)
        )


def test_a_tiny_run_scales_ramps_and_keeps_local_text_and_layouts(tmp_path):
    (tmp_path / "run.toml").write_text("""
output = "out/"
length = 512
batch_size = 16
max_steps = 1000
warmup_tokens = "819200"
mixers = ["gdn", "kda"]
fsdp = true
[model]
preset = "gka-hybrid-2.8b"
vocab_size = 1000
[[batch_ramp]]
batch_size = 8
steps = 500
[[groups]]
parameters = ["*.bias"]
learning_rate = 1e-4
[corpus]
paths = ["text"]
skip_tokens = 1024
""")
    run = load_run(tmp_path / "run.toml", tiny=True, overrides=["max_steps=20", "corpus.max_megabytes=1"])
    assert (run.output, run.max_steps, run.fsdp) == ("out-tiny", 20, False)
    assert (run.corpus.paths, run.corpus.max_megabytes, run.corpus.skip_tokens) == (("text",), 1, 0)
    (ramp,) = run.batch_ramp
    assert (ramp.batch_size, ramp.steps, run.plan(1).tokens(20)) == (1, 8, 64 * (8 + 24))
    assert run.groups == (ParameterGroup(parameters=("*.bias",), learning_rate=1e-4),)
    some = load_run(FILES["pdn-1b"], tiny=True, overrides=['presets=["kda-1b"]', "length=128"])
    assert [model_config(model).hidden_size for model in some.models()] == [64] and some.length == 128
    assert load_run(FILES["pdn-1b"], tiny=True, presets=("kda-1b",), length=128) == some
    for model, name in zip(run.models(), ("gdn", "kda")):
        config = model_config(dataclasses.replace(model, model={**model.model, "vocab_size": 512}))
        assert [mixer for mixer, _ in config.mixers()] == [name, "softmax"] and config.mixer_of(1)[1]["qk_norm"]
    layers = ["gdn", "gdn", {"name": "gdn", "conv_size": 2}, "softmax"]
    listed = LanguageRun(model={"mixer": layers, "num_hidden_layers": 4, "hidden_size": 128, "num_heads": 4})
    small = model_config(tiny_run(listed))
    assert [mixer for mixer, _ in small.mixers()] == ["gdn", "gdn", "softmax"] and small.mixer_of(1)[1] == {
        "conv_size": 2
    }


def test_presets_are_trained_in_folders_of_their_own(make_run):
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 16}
    wide = {"name": "gdn-340m", "label": "wide", "hidden_size": 32}
    run = make_run(model=small, presets=["pgdn-340m", wide], max_steps=1, context_lengths=())
    first, second = train_language(run)
    assert (first.label, second.label) == ("pgdn-340m", "wide") and first.parameters < second.parameters
    assert [Path(result.folder).parent.name for result in (first, second)] == ["pgdn-340m", "wide"]
    assert len(json.loads(Path(run.output, "results.json").read_text())) == 2
    assert "presets" not in LanguageFolder(Path(run.output)).describe(run.models()[0])  # as in the folders of before
    with pytest.raises(ValueError, match='presets is .*"wide".* there and .* here'):
        train_language(dataclasses.replace(run, presets=("pgdn-340m",)))


def train_tiny(name: str, folder: Path) -> None:
    run = load_run(FILES[name], tiny=True, output=str(folder / "out"), cache=str(folder / "cache"))
    results = train_language(run)
    assert results is not None and len(results) == sum(len(model.stage_runs()) for model in run.models())
    for result in results:
        assert result.steps in (4, 16) and 4 < result.held_out_loss < 6.5  # 6.24 by chance
    assert len({result.folder for result in results}) == len(results)


@pytest.mark.slow
def test_a_tiny_recipe_trains_and_continues_with_metaplasticity(tmp_path):
    train_tiny("palimpsa-170m-m-continued", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FILES if name != "palimpsa-170m-m-continued"])
def test_every_tiny_recipe_trains(name, tmp_path):
    train_tiny(name, tmp_path)


def test_a_dry_run_of_a_recipe_says_what_it_needs_and_refuses_what_cannot_fit(capsys):
    file, one = str(FILES["pdn-1b"]), ("--set", 'presets=["gdn-1b"]')
    assert main(["train", file, "--dry-run", "--gpu", "8xh100", *one]) == 0
    printed = capsys.readouterr().out
    for said in (
        "parameters: 1,052",
        "steps: 95,368",
        "tokens: 50,000,297,984",
        "8 processes x",
        "memory: about",
        "hours on 8 h100",
    ):
        assert said in printed
    assert main(["train", file, "--dry-run", "--gpu", "rtx4090", *one]) == 2
    assert "must fit into the 21.0 GiB that one rtx4090 has to give" in capsys.readouterr().err
    assert main(["train", file, "--tiny", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "output: runs/papers/pdn-1b-tiny/pkda-1b" in printed and "steps: 16" in printed
    with pytest.raises(ValueError, match=r"must fit into the 42.0 GiB that one l40s"):
        plan_training(load_run(FILES["gka-2.8b-attention"], fsdp=False, presets=("transformer-2.8b-gka",)), gpu="l40s")


@pytest.mark.slow
def test_mamba2_with_rows_of_131072_tokens_does_not_fit_into_80_gb():
    with pytest.raises(ValueError, match=r"must fit into the 70.0 GiB that one h100"):
        plan_training(load_run(FILES["gka-2.8b"]), gpu="8xh100")


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_a_dry_run_of_every_recipe_is_what_the_documentation_says(name):
    presets, stages = PRINTED[name][1:]
    planned = plan_training(load_run(FILES[name]), gpu="8xh200" if name in LONG_FILES else "8xh100")["models"]
    assert len(planned) == len(presets) * len(stages)
    days = 0.0
    for number, plan in enumerate(planned):
        size = PRESETS[presets[number // len(stages)]].size or ""
        stated = float(size[:-1]) * {"M": M, "B": B}[size[-1]]
        assert plan["parameters"] == pytest.approx(stated, rel=0.35)  # an embedding may count twice
        assert plan["tokens"] == pytest.approx(stages[number % len(stages)]["max_tokens"], rel=0.01)
        assert plan["steps"] > 1000 and "GiB of" in plan["memory"] and "may not fit" not in plan["memory"]
        value, unit = re.match(r"about ([\d.,]+) (\w+) on 8 h", plan["time"]).groups()
        days += float(value.replace(",", "")) / {"minutes": 1440, "hours": 24, "days": 1}[unit]
    assert documented(name)[-1].split()[0] == (f"{days:.2g}" if days < 10 else f"{days:.0f}")


def documented(name: str) -> list[str]:
    """The cells of a file's row in docs/recipes.md."""
    (row,) = [
        line
        for line in (ROOT / "docs" / "recipes.md").read_text().splitlines()
        if f"papers/{FILES[name].name})" in line
    ]
    return [cell.strip() for cell in row.strip("| ").split("|")]


@pytest.mark.parametrize("name", FILES)
def test_the_documentation_lists_every_recipe(name):
    _, models, _, tokens, _ = documented(name)
    _, presets, stages = PRINTED[name]
    assert models.startswith(f"{len(presets)}") and tokens == " + ".join(
        f"{stage['max_tokens'] / B:g}B" for stage in stages
    )
