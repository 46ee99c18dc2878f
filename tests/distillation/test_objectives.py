"""The losses that students learn by, against what they say in so many words."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from fastweights.data.text import pack_rows
from fastweights.distillation.objectives import Objective
from fastweights.distillation.teacher import INPUTS, OUTPUTS, Teacher
from fastweights.models import linearize

from .runs import SIZES, distill_run, make_teacher

LENGTH = 12
DOCUMENTS = [(0, 5), (5, 12), (12, 24)]  # in two rows


@pytest.fixture
def batch():
    torch.manual_seed(1)
    rows = torch.randint(0, 300, (2, LENGTH)).numpy()
    starts = torch.tensor([0, 5]).numpy(), torch.tensor([0]).numpy()
    return pack_rows(list(zip(rows, starts)))


def small(kind, config, **changes):
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "attention_bias"}
    return kind(config(vocab_size=300, head_dim=8, sliding_window=4, **sizes, **changes)).eval()


TEACHERS = {
    "llama": make_teacher,
    "tied": lambda: make_teacher(tie_word_embeddings=True),
    # whose experts lie in files one by one
    "moe": lambda: small(
        Qwen3MoeForCausalLM, Qwen3MoeConfig, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "gemma2": lambda: small(Gemma2ForCausalLM, Gemma2Config, final_logit_softcapping=0.5),
    "gemma3": lambda: small(
        Gemma3ForCausalLM, Gemma3TextConfig, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
}


def made(kind, tmp_path, models, **changes):
    """A teacher, a student that is no longer its copy, and its objective."""
    teacher = TEACHERS[kind]()
    teacher.save_pretrained(tmp_path / "teacher")
    student = linearize(teacher, to="gdn", keep=[1]).train()
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    run = distill_run(models, teacher=str(tmp_path / "teacher"), **changes)
    layers = list(student.memory_layers()) if run.objective == "attention" else []
    read = Teacher(run.teacher, "float32", torch.device("cpu"), layers=layers, length=LENGTH)
    plain = copy.deepcopy(student)
    return teacher, plain, student, Objective(run, student, read), read


def apart(model, ids):
    """The outputs of each document by itself."""
    return [model(input_ids=ids[:, slice(*span)], output_hidden_states=True) for span in DOCUMENTS]


@pytest.mark.parametrize("kind", TEACHERS)
def test_logits_hidden_states_and_text(kind, batch, tmp_path, models):
    weights = {"kl_weight": 2.0, "hidden_weight": 3.0, "text_weight": 0.5, "temperature": 1.5}
    teacher, plain, student, objective, read = made(kind, tmp_path, models, **weights)
    loss = objective(**batch, **read.read(batch, observe=False))["loss"]
    total = torch.zeros(())
    for span, ours, theirs in zip(DOCUMENTS, apart(plain, batch["input_ids"]), apart(teacher, batch["input_ids"])):
        p, q = (x.logits[0, :-1].double() / 1.5 for x in (theirs, ours))
        total += 2 * 1.5**2 * F.kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="sum", log_target=True)
        total += 3 * (ours.hidden_states[-1] - theirs.hidden_states[-1])[0, :-1].square().mean(-1).sum()
        target = batch["input_ids"][0, slice(*span)][1:]
        total += 0.5 * F.cross_entropy(ours.logits[0, :-1], target, reduction="sum")
    wanted = total / (2 * LENGTH - len(DOCUMENTS))
    torch.testing.assert_close(loss.double(), wanted.detach().double(), rtol=1e-5, atol=1e-6)
    loss.backward()
    wanted.backward()
    for name, parameter in plain.named_parameters():
        found = student.get_parameter(name).grad
        torch.testing.assert_close(
            found, parameter.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize(("kind", "how"), [("llama", "mse"), ("gemma3", "mse"), ("llama", "cosine")])
def test_attention(kind, how, batch, tmp_path, models):
    """Every memory by itself, on what the teacher gave its attention in its own forward."""
    teacher, plain, student, objective, read = made(kind, tmp_path, models, objective="attention", attention_loss=how)
    lesson = read.read(batch, observe=True)
    assert lesson[INPUTS].shape == lesson[OUTPUTS].shape == (2, 1, 2 * LENGTH, 32)
    loss = objective(**batch, **lesson)["loss"]
    total = torch.zeros(())
    for span in DOCUMENTS:
        for layer in plain.memory_layers():
            seen = {}
            name = f"model.layers.{layer}.self_attn"

            def note(module, args, kwargs, output, seen=seen):
                seen.update(kwargs, output=output[0])

            hook = teacher.get_submodule(name).register_forward_hook(note, with_kwargs=True)
            teacher(input_ids=batch["input_ids"][:, slice(*span)], use_cache=False)
            hook.remove()
            wanted = seen.pop("output").detach()
            answer, _ = plain.get_submodule(name)(
                **{x: y.detach() if x == "hidden_states" else y for x, y in seen.items()}
            )
            ours, theirs = answer[0, :-1], wanted[0, :-1]
            far = (ours - theirs).square().mean(-1) if how == "mse" else 1 - F.cosine_similarity(ours, theirs, -1)
            total += far.sum()
    wanted = total / (2 * LENGTH - len(DOCUMENTS))
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-5, atol=1e-7)
    loss.backward()
    wanted.backward()
    learnt = {name for name, parameter in student.named_parameters() if parameter.grad is not None}
    assert learnt and all(".self_attn." in name and ".layers.1." not in name for name in learnt)
    for name in learnt:
        torch.testing.assert_close(
            student.get_parameter(name).grad, plain.get_parameter(name).grad, rtol=1e-4, atol=1e-6
        )


def test_the_loss_of_a_step_is_divided_by_the_labels_of_all_its_batches(batch, tmp_path, models):
    _, _, _, objective, read = made("llama", tmp_path, models)
    lesson, labels = read.read(batch, observe=False), 2 * LENGTH - len(DOCUMENTS)
    own, shared = (objective(**batch, **lesson, num_items_in_batch=n)["loss"] for n in (None, 2 * labels))
    torch.testing.assert_close(own, 2 * shared)


def test_held_out_measures(batch, tmp_path, models):
    _, plain, student, objective, read = made("llama", tmp_path, models, objective="attention")
    lesson = read.read(batch, observe=True)
    learnt = objective(**batch, **lesson)["loss"]
    student.eval()
    text, measured, kl = objective(**batch, **lesson)["measured"]
    assert objective.measured == ("eval_loss", "eval_objective", "eval_kl")
    torch.testing.assert_close(text, plain(**batch).loss)
    torch.testing.assert_close(measured, learnt)
    assert kl > 0
