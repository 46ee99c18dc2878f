"""lm-evaluation-harness on the tasks of examples/, without a network. It comes with the `eval` extra."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ..bad_calls import check_refused
from .small import model, save, tokenizer

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'fastweights[eval]'")

EXAMPLES = Path(__file__).parents[2] / "examples" / "lm_eval"
WORDS = tokenizer()
HARNESS_MODEL = model()


@pytest.fixture(scope="module", autouse=True)
def offline():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield


def total_log_likelihood(lm, context, continuation):
    whole, start = WORDS(context + continuation).input_ids, len(WORDS(context).input_ids)
    ids = torch.tensor([whole])
    with torch.no_grad():
        log_probs = F.log_softmax(lm(ids).logits[0], -1)
    return sum(log_probs[place - 1, token].item() for place, token in enumerate(whole) if place >= start)


def test_all_three_kinds_of_tasks():
    from fastweights.evaluation.harness import evaluate_with_harness

    scores = evaluate_with_harness(
        model(["gdn", "softmax"]),
        WORDS,
        ["facts_choice", "facts_answer", "facts_text"],
        include_path=EXAMPLES,
        batch_size=3,
    )
    found = {(score.task, score.metric): score.value for score in scores}
    assert {"acc", "exact_match", "bits_per_byte"} <= {metric for _, metric in found}
    assert 0 <= found["facts_choice", "acc"] <= 1 and found["facts_text", "bits_per_byte"] > 0


def test_likelihoods_and_continuations_are_the_models_own():
    from lm_eval.api.instance import Instance

    import fastweights.evaluation.harness_model as harness

    def ask(kind, arguments):
        requests = [
            Instance(request_type=kind, doc={}, arguments=each, idx=n, metadata=(None, n, 1))
            for n, each in enumerate(arguments)
        ]
        return getattr(wrapped, kind)(requests)

    lm = model(["gdn", "softmax"])
    wrapped = harness.FastWeightsLM(pretrained=lm, tokenizer=WORDS, batch_size=2)
    pairs = [("The import", " statement"), ("A much longer context of a", " list"), ("So", " it is")]
    for (value, _), pair in zip(ask("loglikelihood", pairs), pairs, strict=True):
        assert value == pytest.approx(total_log_likelihood(lm, *pair), rel=1e-4)
    (rolling,) = ask("loglikelihood_rolling", [("The import statement",)])
    assert rolling == pytest.approx(total_log_likelihood(lm, "<|end|>", "The import statement"), rel=1e-4)
    prompts = ["The import", "A much longer context of a"]  # padded on the left, read together
    answers = ask("generate_until", [(prompt, {"until": ["\n\n\n"], "max_gen_toks": 5}) for prompt in prompts])
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([WORDS(prompt).input_ids])
        alone = lm.generate(ids, max_new_tokens=5, do_sample=False, eos_token_id=0, pad_token_id=0)
        assert answer == WORDS.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)


def test_the_model_is_registered(tmp_path):
    from lm_eval.api.registry import get_model

    import fastweights.evaluation.harness_model as harness

    wrapped = get_model("fastweights")(pretrained=str(save(tmp_path / "model")), device="cpu")
    assert isinstance(wrapped, harness.FastWeightsLM)
    assert wrapped.max_length == 10**9 and wrapped.model.config.model_type == "fastweights"


@pytest.mark.parametrize(
    "tasks, folder, message",
    [
        (["facts_choice", "fatcs"], EXAMPLES, "knows no task 'fatcs'; .* need include_path"),
        (["facts_choice"], EXAMPLES / "none", "include_path must be a folder with task files"),
        (["facts_choice", ""], EXAMPLES, "tasks must be a list of names of tasks, none of them empty"),
    ],
)
@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["own", "whole"])
def test_bad_input(tasks, folder, message, whole, tmp_path, monkeypatch):
    """whole: with the harness's own tasks, of which there are 14,000 files to be read for a name that is unknown."""
    from fastweights.evaluation.harness import evaluate_with_harness

    if not whole:
        monkeypatch.setattr("lm_eval.tasks.manager.__file__", str(tmp_path / "manager.py"))
    with pytest.raises(ValueError, match=message):
        evaluate_with_harness(model(), WORDS, tasks, include_path=folder)


def test_a_number_of_examples_below_zero_is_refused():
    from fastweights.evaluation.harness import evaluate_with_harness

    with pytest.raises(ValueError, match="num_fewshot must be a whole number of at least 0"):
        evaluate_with_harness(model(), WORDS, ["facts_choice"], include_path=EXAMPLES, num_fewshot=-2)


LENGTHS_TASK = """
task: lengths
custom_dataset: !function lengths.documents
output_type: generate_until
test_split: test
doc_to_text: "{{input}}"
doc_to_target: "{{length}}"
process_results: !function lengths.score
metric_list:
  - metric: "4096"
    aggregation: mean
    higher_is_better: true
generation_kwargs:
  max_gen_toks: 2
"""
LENGTHS_CODE = """
import datasets
from transformers import AutoTokenizer

def documents(max_seq_lengths=(4096,), tokenizer=None, **others):
    size = len(AutoTokenizer.from_pretrained(tokenizer))
    rows = [{"input": "The import", "length": length, "size": size} for length in max_seq_lengths for _ in range(5)]
    return {"test": datasets.Dataset.from_list(rows)}

def score(doc, results):
    return {"4096": -1.0, str(doc["length"]): float(doc["size"])}
"""


@pytest.mark.slow
@pytest.mark.parametrize("lengths, wanted", [(None, ["4096"]), ((700, 300), ["300", "700"])], ids=str)
def test_lengths_and_tokenizer_reach_tasks_that_are_generated_as_those_of_ruler(tmp_path, lengths, wanted):
    """A task with RULER's interface to the harness; a length without examples, which RULER marks by -1, is left out."""
    from fastweights.evaluation.harness import evaluate_with_harness
    from fastweights.models.loading import load_language_model

    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "lengths.yaml").write_text(LENGTHS_TASK)
    (tmp_path / "tasks" / "lengths.py").write_text(LENGTHS_CODE)
    lm, words = load_language_model(save(tmp_path / "model"))
    scores = evaluate_with_harness(
        lm, words, ["lengths"], include_path=tmp_path / "tasks", ruler_lengths=lengths, limit=2
    )
    found = {score.metric: score.value for score in scores if "stderr" not in score.metric}
    assert found == dict.fromkeys(wanted, 400.0)  # the size of the tokenizer; with 2 of 5 examples at every length


@pytest.mark.parametrize("lengths", [[], [0], [4096.0], "4096"], ids=str)
def test_bad_ruler_lengths_are_refused(lengths):
    from fastweights.evaluation.harness import evaluate_with_harness

    with pytest.raises((ValueError, TypeError), match="^ruler_lengths must"):
        evaluate_with_harness(model(), WORDS, ["facts_choice"], include_path=EXAMPLES, ruler_lengths=lengths)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        *(("tasks", value) for value in ("facts_text", [], [""], [3], None, 3)),
        *(("model", value) for value in ("gdn", torch.nn.Linear(2, 2))),
        *(("tokenizer", value) for value in ("words", b"words")),
        *(("include_path", value) for value in ("", "nowhere", 3, b"tasks", "a\0b")),
        *(("limit", value) for value in (0, -1, 0.5, "1")),
        *(("num_fewshot", value) for value in (-1, 0.5, "1")),
        *(("batch_size", value) for value in (0, -1, 1.5, "auto", None)),
        *(("ruler_lengths", value) for value in ("4096", 4096, [], [0], [0.5], ["4096"])),
        *(("seed", value) for value in (-1, 0.5, "0", None)),
    ],
)
def test_bad_arguments(argument, value, tmp_path, monkeypatch):
    from fastweights.evaluation.harness import evaluate_with_harness

    monkeypatch.chdir(tmp_path)
    given = {"model": HARNESS_MODEL, "tokenizer": WORDS, "tasks": ["facts_text"], "include_path": EXAMPLES}
    given[argument] = value
    check_refused(argument, lambda: evaluate_with_harness(**given), tmp_path)
