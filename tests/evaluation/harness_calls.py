"""Calls of the harness's class for our models, and the same likelihoods by hand."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .small import tokenizer

WORDS = tokenizer()
WORDS.model_max_length = 1024  # GPT-2's, which is no limit of these models


def ask(lm, kind, arguments, documents=None, **options):
    """The answers of the harness's class, and what it cut."""
    from lm_eval.api.instance import Instance

    from fastweights.evaluation.harness import FastWeightsLM

    wrapped = FastWeightsLM(lm, tokenizer=WORDS, **options)
    requests = [
        Instance(request_type=kind, doc={}, arguments=each, idx=0, metadata=("task", document, 1))
        for each, document in zip(arguments, documents or range(len(arguments)), strict=True)
    ]
    return getattr(wrapped, kind)(requests, disable_tqdm=True), wrapped.cuts


def likelihood_by_hand(lm, prompt, answer):
    """ln p of the answer by one forward over everything, and how many tokens that has."""
    whole = WORDS(prompt + answer, verbose=False).input_ids
    size = len(whole) - len(WORDS(prompt, verbose=False).input_ids)
    with torch.no_grad():
        logits = lm(torch.tensor([whole])).logits[0, -size - 1 : -1]
    return -F.cross_entropy(logits, torch.tensor(whole[-size:]), reduction="sum").item(), len(whole)
