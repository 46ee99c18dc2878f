"""What a distillation refuses before any work: one line that says what to do."""

import pytest
from transformers import (
    AutoTokenizer,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from fastweights.distillation import DistillRun, distill
from fastweights.distillation.check import check_distillation
from fastweights.distillation.distill import plan_distillation
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, linearize
from fastweights.training.language import load_run, train_language

from .runs import make_teacher, save


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {}}, r"model must have a path, the folder of a student"),
        ({"objective": "kl"}, r"objective must be one of 'attention', 'logits', 'text', got 'kl'"),
        ({"attention_loss": "l1"}, r"attention_loss must be one of 'mse', 'cosine'"),
        ({"teacher_dtype": "int4"}, r"teacher_dtype must be one of 'bfloat16', 'float32', 'int8'"),
        ({"kl_weight": 0}, r"kl_weight or hidden_weight must be above 0"),
        ({"kl_weight": -1.0}, r"kl_weight must be"),
        ({"compile": True}, r'compile must be "blocks", False or None in a distillation'),
        ({"temperature": 0}, r"temperature must be"),
        ({"needles": ("s-niah-9",)}, r"a needle task must be one of"),
        ({"context_parallel": 2}, r"context_parallel must be 1 in a distillation"),
        ({"train": ("",)}, r"train must be a list of names"),
        ({"selection": {"token": 5}}, r"selection: the table has no key 'token' \(did you mean 'tokens'"),
        ({"selection": {"tokens": 0}}, r"selection: tokens must be"),
        ({"stages": ({"selection": {}},)}, r"selection must stand above the stages"),
    ],
)
def test_settings(make_run, changes, message):
    with pytest.raises(ValueError, match=message):
        make_run(**changes)


@pytest.mark.parametrize("cache", [True, 3, ""])
def test_a_cache_that_is_no_folder(make_run, cache):
    with pytest.raises(TypeError, match="cache_teacher must be the path of a folder, or False"):
        make_run(cache_teacher=cache)


def refused(run, message):
    with pytest.raises(ValueError, match=message) as error:
        distill(run)
    assert "\n" not in str(error.value)


def test_a_student_that_is_no_hybrid(make_run, models, tmp_path):
    refused(make_run(model={"path": str(models / "teacher")}), "must hold a model of type 'fastweights'")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_heads": 2, "vocab_size": 300}
    other = save(FastWeightsForCausalLM(FastWeightsConfig(**sizes)), models, tmp_path / "other")
    refused(make_run(model={"path": other}), "must be the folder of a hybrid")
    refused(
        make_run(model={"path": str(models / "student"), "mixer": "gla"}), "nothing beside path where that is a hybrid"
    )


def test_a_teacher_that_is_not_there(make_run, models, tmp_path):
    student = linearize(make_teacher(), to="gdn")
    unnamed = save(student, models, tmp_path / "unnamed")
    refused(make_run(model={"path": unnamed}), "teacher must be set")
    for objective in ("logits", "text"):  # which only measures beside it, at the end
        missing = make_run(teacher=str(tmp_path / "none"), objective=objective)
        refused(missing, "teacher must be the folder of a saved model, got .*none', which is none")
    student.config.teacher = "a-name"
    named = save(student, models, tmp_path / "named")
    refused(make_run(model={"path": named}), "got 'a-name', the name of the model that the student was made of, which")


def test_a_teacher_with_another_vocabulary(make_run, models, tmp_path):
    other = save(make_teacher(vocab_size=301), models, tmp_path / "other")
    for objective in ("logits", "text"):
        refused(make_run(teacher=other, objective=objective), "the student's vocabulary of 300 tokens, but .* has 301")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "must have the student's 3 layers of attention"),
        ({"hidden_size": 16}, "must have the student's hidden_size of 32"),
    ],
)
def test_a_teacher_of_another_architecture(make_run, models, tmp_path, changes, message):
    other = save(make_teacher(**changes), models, tmp_path / "other")
    run = make_run(teacher=other)
    assert check_distillation(run).teacher == other  # its logits can be learnt
    for objective in ({"objective": "attention"}, {"hidden_weight": 1.0} if "hidden_size" in changes else {}):
        if objective:
            refused(make_run(teacher=other, **objective), message)
            refused(
                make_run(teacher=other, stages=({"name": "first", **objective},)),
                f"stage 'first': the teacher {message}",
            )


def test_a_teacher_of_a_kind_that_is_not_known(make_run, models, tmp_path):
    sizes = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    neo = save(GPTNeoXForCausalLM(GPTNeoXConfig(**sizes)), models, tmp_path / "neo")
    assert check_distillation(make_run(teacher=neo)).teacher == neo
    refused(
        make_run(teacher=neo, objective="attention"), "layers of attention .* is a GPTNeoXForCausalLM with 0 layers"
    )
    mamba = save(
        MambaForCausalLM(MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=3)), models, tmp_path / "mamba"
    )
    refused(make_run(teacher=mamba), "whose forward takes .*position_ids, which that of a MambaForCausalLM does not")


def test_parameters_that_are_not_there_or_get_no_gradient(make_run):
    refused(
        make_run(train=("*.self_attn.memry.*",)),
        r"train must name parameters of the model, none is '\*.self_attn.memry.\*'",
    )
    refused(make_run(train=("model.norm.weigth",)), r"did you mean 'model.norm.weight'\?")
    refused(
        make_run(objective="attention", train=("*.mlp.*",)),
        "train must name parameters of attention modules with a memory",
    )


def test_an_output_layer_without_gradient(make_run):
    hidden = {"kl_weight": 0.0, "hidden_weight": 1.0}
    refused(make_run(**hidden, train=("lm_head.*", "*.memory.*")), "train must not name parameters of the output layer")
    plan = plan_distillation(make_run(**hidden))["models"][0]
    assert plan["parameters"] - plan["trained parameters"] == 300 * 32


def test_a_needle_that_does_not_fit(make_run):
    refused(make_run(context_lengths=(64, 16)), "needles must fit into the shortest of context_lengths: ")


def test_a_tokenizer_that_is_not_the_teachers(make_run, models, tmp_path):
    changed = AutoTokenizer.from_pretrained(models / "teacher")
    changed.add_tokens(["<new>"])
    teacher = save(LlamaForCausalLM.from_pretrained(models / "teacher"), models, tmp_path / "teacher", changed)
    refused(
        make_run(teacher=teacher),
        "tokenizer must be the one of the teacher in .*, but its 300 tokens are not those 301",
    )


def test_a_tokenizer_that_rewrites_the_end_of_text(make_run, models, tmp_path):
    """A chat model ends texts with a token of its own, in place of which the loader puts <|endoftext|>."""
    chat = AutoTokenizer.from_pretrained(models / "teacher")
    chat.eos_token = chat.convert_ids_to_tokens(5)
    teacher = save(LlamaForCausalLM.from_pretrained(models / "teacher"), models, tmp_path / "teacher", chat)
    refused(make_run(teacher=teacher), r"its eos_token is '<\|endoftext\|>' in place of ")


def test_a_tokenizer_that_is_another_one_once_it_is_saved(make_run, monkeypatch):
    from fastweights.distillation import check

    load = check.load_any_tokenizer

    def load_changed(folder, **options):
        tokenizer = load(folder, **options)
        tokenizer.eos_token = tokenizer.convert_ids_to_tokens(5)
        return tokenizer

    monkeypatch.setattr(check, "load_any_tokenizer", load_changed)
    refused(make_run(), "tokenizer must be the same once it is saved with the student, but its eos_token is ")


def test_runs_of_the_other_command(make_run, tmp_path):
    run = make_run()
    with pytest.raises(TypeError, match="run must be a LanguageRun"):
        train_language(run)
    file = tmp_path / "run.py"
    file.write_text("from fastweights.training.language import LanguageRun\nrun = LanguageRun()\n")
    with pytest.raises(ValueError, match="must define `run`, a DistillRun"):
        load_run(file, kind=DistillRun)
    with pytest.raises(ValueError, match="teacher must be set"):
        plan_distillation(make_run(model={"path": make_untaught(tmp_path)}))


def make_untaught(folder):
    linearize(make_teacher(), to="gdn").save_pretrained(folder / "untaught")
    return str(folder / "untaught")
