"""`fastweights distill` from a run file to a student, in stages, interrupted and continued."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from fastweights.cli import main
from fastweights.distillation import distill
from fastweights.distillation.check import check_distillation
from fastweights.distillation.distill import plan_distillation
from fastweights.models import HybridModel
from fastweights.results.distillation import load_distillation
from fastweights.results.language import load_result
from fastweights.training.language import train_language

from ..training.language.small import SHARD, log, small_run
from .runs import assert_same_bits, make_teacher, save

FILE = """
output = "{output}"
cache = "{folder}/cache"
teacher_dtype = "float32"
length = 32
batch_size = 2
max_steps = 4
learning_rate = 1e-2
log_every = 1
evaluate_every = 2
evaluation_rows = 7
checkpoint_every = 3
context_lengths = [16, 64]
context_texts = 2
needles = []
[model]
path = "{folder}/student"
[corpus]
paths = ["{folder}/texts"]
held_out_fraction = 0.2
[[stages]]
objective = "attention"
[[stages]]
name = "logits"
hidden_weight = 0.1
text_weight = 0.1
train = ["*.self_attn.*"]
[[stages]]
name = "long"
objective = "text"
length = 64
batch_size = 1
"""


def weights(run):
    return load_file(Path(run.output, "model", "model.safetensors"))


@pytest.mark.slow
def test_the_stages_of_a_run_file(models, tmp_path, capsys):
    output = tmp_path / "out"
    file = tmp_path / "run.toml"
    file.write_text(FILE.format(output=output, folder=models))
    assert main(["distill", str(file), "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "teacher 0.000" in plan and "trained parameters: " in plan and not output.exists()
    assert main(["distill", str(file), "--quiet"]) == 0
    results = [load_result(output / name / "result.json") for name in ("stage1", "logits", "long")]
    first, logits, long = results
    assert first.losses[-1] < 0.5 * first.losses[0]
    assert logits.held_out_kls[-1] < first.held_out_kls[-1] < first.held_out_kls[0]
    assert len(logits.held_out_kls) == len(logits.held_out_objectives) == len(logits.held_out_steps) == 2
    assert long.held_out_kls == [] and long.held_out_losses[-1] < logits.held_out_losses[-1]
    points = [json.loads(line) for line in (output / "logits" / "log.jsonl").read_text().splitlines()]
    assert {"step", "tokens", "held_out_loss", "held_out_objective", "held_out_kl"} in [set(point) for point in points]
    assert first.parameters < logits.parameters < long.parameters
    model = AutoModelForCausalLM.from_pretrained(output / "long" / "model")
    assert isinstance(model, HybridModel) and model.config.model_type == "fastweights_llama"
    assert "held-out loss" in (output / "long" / "model" / "README.md").read_text().lower()
    compared = load_distillation(output / "distillation.json")
    assert [row.length for row in compared.student.perplexities] == [16, 64]
    assert [row.loss for row in compared.student.perplexities] == [row["loss"] for row in long.perplexities]
    assert compared.kl_tokens == [128, 256, 384, 512] and compared.kls == first.held_out_kls + logits.held_out_kls
    assert "Teacher and student" in capsys.readouterr().out and (output / "distillation.png").exists()
    written = (output / "distillation.json").stat().st_mtime_ns
    assert main(["distill", str(file), "--quiet"]) == 0  # a finished one is neither trained nor measured again
    assert "Teacher and student" in capsys.readouterr().out
    assert (output / "distillation.json").stat().st_mtime_ns == written


def test_text_alone_beside_a_teacher_without_anything_to_draw(models, tmp_path, capsys):
    output, file = tmp_path / "out", tmp_path / "run.toml"
    start = FILE.format(output=output, folder=models).partition("[[stages]]")[0].replace("[16, 64]", "[]")
    file.write_text(f'objective = "text"\nteacher = "{models}/teacher"\n{start}')
    assert main(["distill", str(file), "--quiet"]) == 0
    assert "Teacher and student: KL" in capsys.readouterr().out
    assert (output / "distillation.json").exists() and not (output / "distillation.png").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"objective": "attention", "attention_loss": "cosine"}, marks=pytest.mark.slow),
        {"hidden_weight": 0.1, "temperature": 2.0, "cache_teacher": True},
    ],
    ids=lambda changes: changes.get("objective", "logits"),
)
def test_an_interrupted_training_ends_with_the_bits_of_another(make_run, tmp_path, changes):
    cached = changes.pop("cache_teacher", False)
    caches = [{"cache_teacher": str(tmp_path / name)} if cached else {} for name in ("one", "other")]
    whole, cut = (make_run(name, **changes, **cache) for name, cache in zip(("whole", "cut"), caches))
    distill(whole)
    assert distill(cut, stop_at=4) is None
    distill(cut)
    assert_same_bits(cut, whole)
    assert [point["step"] for point in log(cut) if "held_out_kl" in point] == [4, 6]


@pytest.mark.slow
def test_cached_outputs_are_those_that_are_computed(make_run, tmp_path, monkeypatch):
    plain, cached = make_run("plain"), make_run("cached", cache_teacher=str(tmp_path / "cache"))
    distill(plain)
    distill(cached)
    torch.testing.assert_close(
        load_result(Path(cached.output, "result.json")).losses, [p["loss"] for p in log(plain) if "loss" in p]
    )
    from fastweights.distillation.teacher import Teacher

    monkeypatch.setattr(Teacher, "_final_hidden", lambda *arguments: pytest.fail("computed again"))
    again = make_run("again", cache_teacher=str(tmp_path / "cache"))
    distill(again)
    assert_same_bits(again, cached)


def test_only_the_parameters_that_are_named_learn(make_run, models):
    run = make_run(train=("*.self_attn.memory.*", "model.norm.weight"))
    distill(run)
    before, after = load_file(models / "student" / "model.safetensors"), weights(run)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".memory." in name or name == "model.norm.weight" for name in changed)
    held = list(load_file(Path(run.output, f"checkpoints/checkpoint-6/{SHARD}")))
    assert all(any(name in moment for name in changed) for moment in held)


def test_a_teacher_that_has_changed_is_another_work(make_run, models, tmp_path):
    first, other = (save(make_teacher(initializer_range=x), models, tmp_path / f"{x}") for x in (0.02, 0.05))
    assert distill(make_run(teacher=first), stop_at=2) is None
    with pytest.raises(ValueError, match="holds another training: teacher_content is"):
        distill(make_run(teacher=other))


def test_a_plan_counts_the_teacher(make_run):
    plain, small = (plan_distillation(make_run(teacher_dtype=dtype))["models"][0] for dtype in ("float32", "int8"))
    assert "teacher" in plain["memory"] and plain["memory"] != small["memory"]
    run = check_distillation(make_run(fsdp=True))
    teacher = LlamaForCausalLM.from_pretrained(run.teacher)
    blocks = 4 * sum(p.numel() for p in teacher.model.layers.parameters())
    whole = 4 * teacher.num_parameters()
    assert run.memory_beside(2)["teacher"] == whole - blocks / 2 and run.memory_beside()["teacher"] == whole
    quantised = dataclasses.replace(run, fsdp=False, teacher_dtype="int8").memory_beside(2)["teacher"]
    matrices = [p for name, p in teacher.model.layers.named_parameters() if "_proj.weight" in name]
    assert quantised == whole / 2 - sum(p.numel() - 2 * len(p) for p in matrices)  # a byte per weight, two per scale
    with pytest.raises(ValueError, match="must fit|does not fit|too large|needs"):
        plan_distillation(make_run(batch_size=2**19), gpu="rtx3090")


def test_train_continues_a_hybrid(models, tmp_path):
    """`fastweights train` takes a hybrid as any model, and may freeze parameters too."""
    run = small_run(
        models,
        output=str(tmp_path / "out"),
        model={"path": str(models / "student")},
        train=("*.memory.*",),
        context_lengths=(),
        max_steps=4,
    )
    (result,) = train_language(run)
    before, after = load_file(models / "student" / "model.safetensors"), weights(run)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert result.name == "hybrid" and changed and all(".memory." in name for name in changed)
    assert result.parameters == sum(before[name].numel() for name in before if ".memory." in name)
