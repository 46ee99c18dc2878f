"""Prompts of lm-evaluation-harness are read whole, whatever their length and the tokenizer's, or cut and counted."""

from __future__ import annotations

import json
import math

import pytest
import torch

from fastweights.evaluation.reading import prompt_tokens
from fastweights.evaluation.ruler_text import documentation, write_prompt

from .harness_calls import WORDS, ask, likelihood_by_hand
from .small import TEXT, model

pytest.importorskip("lm_eval", reason="lm-evaluation-harness is missing: pip install 'fastweights[eval]'")


def needle_prompt(length):
    """A needle near the beginning of a text of `length` tokens, and the answer."""
    prompt, draft = write_prompt(
        "s-niah-2",
        length=length,
        depth=0.05,
        seed=0,
        index=0,
        words=documentation().split(),
        count_tokens=lambda text: len(prompt_tokens(WORDS, text)),
    )
    return prompt, f" {draft.answer}"


NEEDLE_TASK = """
task: needle_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: {kind}
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
target_delimiter: ""
metric_list: [{{metric: {metric}, aggregation: {aggregation}, higher_is_better: true}}]
generation_kwargs: {{until: [], max_gen_toks: 3, do_sample: false}}
"""


def write_tasks(folder, prompt, answer, continuation):
    """A task for each kind of request about one prompt."""
    for kind, metric, aggregation, wanted in (
        ("loglikelihood", "perplexity", "perplexity", answer),
        ("generate_until", "exact_match", "mean", continuation),
    ):
        data = folder / f"{kind}.jsonl"
        data.write_text(json.dumps({"prompt": prompt, "answer": wanted}))
        text = NEEDLE_TASK.format(kind=kind, data=data, metric=metric, aggregation=aggregation)
        (folder / f"{kind}.yaml").write_text(text)


@pytest.mark.slow
@pytest.mark.parametrize("length", [10_000, 40_000, 131_072], ids=str)
def test_a_needle_in_a_long_text_is_read_whole(length, tmp_path, monkeypatch):
    """Linear attention never forgets: its answers depend on the first token of the prompt."""
    from fastweights.evaluation.harness import evaluate_with_harness

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    lm = model("linear")
    prompt, answer = needle_prompt(length)
    by_hand, tokens = likelihood_by_hand(lm, prompt, answer)
    assert length - 200 < tokens <= length
    ids = torch.tensor([WORDS(prompt, verbose=False).input_ids])
    new = lm.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=0, pad_token_id=0)[0, ids.shape[1] :]
    write_tasks(tmp_path, prompt, answer, WORDS.decode(new))
    tasks = ["needle_loglikelihood", "needle_generate_until"]

    def measure(**options):
        scores = evaluate_with_harness(lm, WORDS, tasks, include_path=tmp_path, **options)
        return {score.metric: score for score in scores if "stderr" not in score.metric}

    whole = measure()
    assert -math.log(whole["perplexity"].value) == pytest.approx(by_hand, rel=1e-4)
    assert whole["exact_match"].value == 1 and not any(score.cut_prompts for score in whole.values())
    cut = measure(max_length=1024)
    assert abs(-math.log(cut["perplexity"].value) - by_hand) > 0.01 and cut["exact_match"].value == 0
    assert {(score.cut_prompts, score.cut_tokens) for score in cut.values()} == {
        (1, tokens - 1025),  # the last token of the answer is not read
        (1, ids.shape[1] + 3 - 1024),
    }


def test_a_text_is_scored_in_one_piece_block_by_block():
    lm = model(["linear", "softmax"])
    by_hand, tokens = likelihood_by_hand(lm, "<|end|>", TEXT[:8000])
    (whole,), cuts = ask(lm, "loglikelihood_rolling", [(TEXT[:8000],)], block=300)
    assert whole == pytest.approx(by_hand, rel=1e-5) and not cuts
    (windows,), cuts = ask(lm, "loglikelihood_rolling", [(TEXT[:8000],)], max_length=500)
    assert windows != pytest.approx(by_hand, rel=1e-5) and cuts == {"task": (1, tokens - 1 - 500)}


def test_an_example_with_several_answers_is_cut_once_and_by_the_longest():
    pairs = [(TEXT[:900], " it is that which"), (TEXT[:900], " so"), ("So", " it is")]
    sizes = [len(WORDS(prompt + answer).input_ids) for prompt, answer in pairs]
    _, cuts = ask(model(), "loglikelihood", pairs, documents=[0, 0, 1], max_length=100)
    assert cuts == {"task": (1, max(sizes) - 101)}


def test_a_prompt_is_read_once_for_all_its_answers():
    lm, read = model(["gdn", "softmax"]), []
    lm.model.embed_tokens.register_forward_hook(lambda module, given, embedded: read.append(embedded[..., 0].numel()))
    pairs = [(TEXT[:3000], answer) for answer in (" so", " it is that", " which", " list of")]
    found, _ = ask(lm, "loglikelihood", pairs)
    assert sum(read) < 1.1 * len(WORDS(TEXT[:3000], verbose=False).input_ids)
    for (value, _), pair in zip(found, pairs, strict=True):
        assert value == pytest.approx(likelihood_by_hand(lm, *pair)[0], rel=1e-4)


@pytest.mark.parametrize("batch_size, block", [(1, 7), (3, 512), ("auto", 64)])
def test_batches_and_blocks_change_nothing(batch_size, block):
    lm = model(["gdn", "softmax"])
    pairs = [(TEXT[:400], " so it is"), ("", "So it is"), (TEXT[:90], " list"), (TEXT[:400], " which")]
    found, _ = ask(lm, "loglikelihood", pairs, batch_size=batch_size, block=block)
    for (value, exact), (prompt, answer) in zip(found, pairs, strict=True):
        assert value == pytest.approx(likelihood_by_hand(lm, prompt or "<|end|>", answer)[0], rel=1e-4) and not exact


@pytest.mark.parametrize(
    "kind, arguments, options, message",
    [
        ("loglikelihood", ("So", TEXT[:200]), {"max_length": 3}, "max_length must be at least .* tokens of an answer"),
        (
            "generate_until",
            ("So", {"until": []}),
            {"max_length": 256},
            "greater than the 256 tokens that task generates",
        ),
        ("loglikelihood", ("So", " it"), {"max_length": 0}, "max_length must be a positive"),
        ("loglikelihood", ("So", " it"), {"block": 0}, "block must be"),
        ("loglikelihood", ("So", " it"), {"truncation": True}, "truncation must be False: max_length alone"),
    ],
)
def test_what_does_not_fit_is_refused(kind, arguments, options, message):
    with pytest.raises(ValueError, match=message):
        ask(model(), kind, [arguments], **options)


def test_an_adapter_is_part_of_the_model():
    peft = pytest.importorskip("peft")
    lm = peft.get_peft_model(
        model(["gdn", "softmax"]), peft.LoraConfig(target_modules="all-linear", init_lora_weights=False)
    ).eval()
    pair = (TEXT[:400], " so it is")
    ((value, _),), _ = ask(lm, "loglikelihood", [pair], block=64)
    assert value == pytest.approx(likelihood_by_hand(lm, *pair)[0], rel=1e-4)
    with lm.disable_adapter():
        assert value != pytest.approx(likelihood_by_hand(lm, *pair)[0], rel=1e-3)
