"""RULER's tasks of lm-evaluation-harness: its scores of our texts are ours, and its own texts are read at any length."""

from __future__ import annotations

import json
import re

import pytest
import torch

from fastweights.evaluation.answers import Question, _tokens, answer_prompts, score_answers
from fastweights.evaluation.reading import prompt_tokens
from fastweights.evaluation.ruler_text import write_prompt

from .harness_calls import WORDS, ask
from .small import TEXT, model

pytest.importorskip("wonderwords", reason="RULER's packages are missing: pip install 'fastweights[eval]'")
pytestmark = pytest.mark.slow  # wonderwords and nltk take seconds to start


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("nltk.download", lambda *_, **__: False)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")


def harness_item(length):
    """An item of niah_single_1 as the harness generates it."""
    from lm_eval.tasks.ruler.niah_utils import TEMPLATE
    from lm_eval.tasks.ruler.prepare_niah import generate_samples, get_haystack

    (item,) = generate_samples(
        get_haystack(type_haystack="repeat"), max_seq_length=length, template=TEMPLATE, type_haystack="repeat",
        type_needle_k="words", type_needle_v="numbers", num_samples=1, TOKENIZER=WORDS,
    )  # fmt: skip
    return item


def questions():
    """Items of ours and one of the harness. Half of what is wanted stands in what the model says, which it says by chance."""
    lm = model("linear")
    for task in ("mk-niah-1", "vt", "fwe"):
        prompt, draft = write_prompt(
            task,
            length=600,
            seed=0,
            index=0,
            words=TEXT.split(),
            count_tokens=lambda text: len(prompt_tokens(WORDS, text)),
        )
        yield lm, prompt, draft.answer
    item = harness_item(700)
    yield lm, f"{item['input']} {item['gen_prefix']}", item["outputs"][0]


def test_both_give_the_same_score_to_the_same_items(tmp_path):
    import lm_eval.tasks.ruler

    from fastweights.evaluation.harness import evaluate_with_harness

    folder = lm_eval.tasks.ruler.__path__[0]
    for number, (lm, prompt, answer) in enumerate(questions()):
        (asked,) = answer_prompts(lm, WORDS, [Question(prompt, answer, [answer])], 512)
        wanted = [re.search("[a-zA-Z]{2,}", asked.continuation)[0], "never said"]
        ours = score_answers(lm, WORDS, [Question(prompt, answer, wanted)], 512)["found"]
        new = len(_tokens(WORDS, Question(prompt, answer, wanted))[1]) + 16
        row = {"input": prompt, "outputs": wanted, "gen_prefix": "", "max_length": 4096}
        (tmp_path / "item.jsonl").write_text(json.dumps(row))
        (tmp_path / "item.yaml").write_text(
            f"include: {folder}/niah_single_1.yaml\ntask: item_{number}\ncustom_dataset: null\ndataset_path: json\n"
            f"dataset_name: null\ndataset_kwargs: {{data_files: {{test: {tmp_path / 'item.jsonl'}}}}}\n"
            f"generation_kwargs: {{until: [], max_gen_toks: {new}, do_sample: false}}\n"
        )
        scores = evaluate_with_harness(lm, WORDS, [f"item_{number}"], include_path=tmp_path)
        theirs = {score.metric: score.value for score in scores}["4096"]
        assert theirs == ours == 0.5


def test_an_item_of_131_072_tokens_is_read_whole():
    item = harness_item(131_072)
    prompt = f"{item['input']} {item['gen_prefix']}"
    ids = torch.tensor([WORDS(prompt, verbose=False).input_ids])
    assert 130_000 < ids.shape[1] <= 131_072
    lm, read = model("linear"), []
    by_hand = lm.generate(ids, max_new_tokens=6, do_sample=False, eos_token_id=0, pad_token_id=0)[0, ids.shape[1] :]
    lm.model.embed_tokens.register_forward_hook(lambda module, given, embedded: read.append(embedded[..., 0].numel()))
    (said,), _ = ask(lm, "generate_until", [(prompt, {"until": [], "max_gen_toks": 6})])
    assert said == WORDS.decode(by_hand, skip_special_tokens=True) and sum(read) == ids.shape[1] + 5
    assert max(read) == 512
