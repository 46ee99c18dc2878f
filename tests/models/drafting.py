"""Assistants that draft tokens for a model, for the tests of assisted decoding."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

from fastweights.models import FastWeightsForCausalLM

from .small import model

PROMPT = torch.tensor([[3, 4, 5, 6, 7, 3, 4, 5, 6, 7, 3, 4, 5]])
NEW = 10
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": 1, "min_new_tokens": NEW}


INSTALLED = tuple(map(int, transformers.__version__.split(".")[:2]))
# transformers 5.15 takes one token out of a draft model's cache, however many were refused.
MODELS_DRAFT = INSTALLED != (5, 15)
# Before 5.14 prompt lookup may write a token more than was asked for, with models of transformers too.
LOOKUP_ENDS = INSTALLED >= (5, 14)


def without_surplus(tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """The tokens that were asked for."""
    return tokens if LOOKUP_ENDS else tokens[:, : wanted.shape[1]]


def large(mixer: Any, **options: Any) -> FastWeightsForCausalLM:
    return model(mixer, initializer_range=0.5, **options)


def draft_of(lm: FastWeightsForCausalLM) -> FastWeightsForCausalLM:
    """A model that agrees with another one often, and not always."""
    draft = copy.deepcopy(lm)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for x in draft.parameters():
            x.add_(0.01 * torch.randn(x.shape, generator=generator))
    return draft


def assistants(lm: Any) -> dict[str, dict[str, Any]]:
    lookup = {"lookup": {"prompt_lookup_num_tokens": 3}}
    if not MODELS_DRAFT:
        return lookup
    drafting = {"draft": {"assistant_model": draft_of(lm)}, "same": {"assistant_model": lm}}
    return {**lookup, **drafting, "early exit": {"assistant_early_exit": 1}}
