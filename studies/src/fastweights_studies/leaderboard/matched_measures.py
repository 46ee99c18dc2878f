"""What is measured of a language model of `matched_language`: losses of test text, hidden numbers, decoding and state."""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..measure.code_text import text_in
from .sizes import MatchedLanguageSize

__all__ = ["find_identifiers", "measure_losses", "measure_speed"]

NEEDLE = "s-niah-1"
IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# Of an identifier: the tokenizer has shorter ones as words, which a model knows without having read them.
FEWEST_TOKENS = 3
GAP = 128  # tokens from the last time: a shorter way back is open to a model without a memory
FROM_DOCUMENT = 4  # rows of a document at most
ROWS_AT_ONCE = 8
CONTEXTS_AT_ONCE = 4  # of which softmax attention keeps 9 GB in float32, in 8 layers of width 512 after 65,536 tokens


def measure_losses(size: MatchedLanguageSize, folder: str, text: str, device: str) -> dict[str, dict[str, float]]:
    """Of the model in a folder, by measure and column: the losses, and the share of the hidden numbers that it says."""
    from fastweights.evaluation import load_language_model, needle_recall, perplexity_by_length

    model, tokenizer = load_language_model(Path(folder) / "model", device=device)
    losses: dict[str, float] = {}
    found: dict[str, float] = {}
    documents = tokenize_documents(Path(text), tokenizer)
    in_rows: list[Tokenized] = []  # those that rows are taken from; of the others nobody needs the places
    rows_BT, kinds_BT = choose_rows(size, _noted(documents, in_rows))
    at_BT = token_losses(model, rows_BT)
    losses["test"] = at_BT.mean().item()
    for first, end in itertools.pairwise(size.positions):
        losses[f"position {first}-{end}"] = at_BT[:, first:end].mean().item()  # place p predicts token p + 1
    for kind, name in ((1, "first"), (2, "again")):
        chosen = at_BT[kinds_BT[:, 1:] == kind]
        if not len(chosen):
            raise ValueError(
                f"text must hold test documents with identifiers of {FEWEST_TOKENS} tokens that stand there {name}"
            )
        losses[f"identifiers {name}"] = chosen.mean().item()
    for one in perplexity_by_length(
        model, (one.ids for one in itertools.chain(in_rows, documents)), size.contexts, texts=size.context_texts,
        separator=tokenizer.eos_token_id, batch_size=CONTEXTS_AT_ONCE,
    ):  # fmt: skip
        losses[f"context {one.length}"] = one.loss
    for length in size.needles:
        asked = [
            needle_recall(
                model, tokenizer, NEEDLE, length=length, depth=depth, examples=size.examples, batch_size=size.examples
            )
            for depth in size.depths
        ]
        losses[f"needle {length}"] = statistics.fmean(one.answer_loss for one in asked)
        found[f"needle {length}"] = statistics.fmean(one.found for one in asked)
    return {"loss": losses, "found": found}


@torch.no_grad()
def measure_speed(size: MatchedLanguageSize, folder: str, device: str) -> dict[str, dict[str, float]]:
    """Tokens per second of decoding one sequence after a prompt of a row's length, whose reading counts, and the bytes that the
    memories then hold. In bfloat16 on a GPU."""
    from fastweights.evaluation import load_language_model

    on_gpu = torch.device(device).type == "cuda"
    dtype = "bfloat16" if on_gpu else None
    model, tokenizer = load_language_model(Path(folder) / "model", device=device, dtype=dtype)
    length = int(size.training["length"])
    ids = torch.arange(length, device=device)[None] % model.config.vocab_size
    layers = model(ids, use_cache=True).past_key_values.layers
    state = sum(x.numel() * x.element_size() for layer in layers for x in layer.memory.values())

    def decode() -> float:
        began = time.perf_counter()
        model.generate(
            ids, max_new_tokens=size.decoded, min_new_tokens=size.decoded, do_sample=False,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        if on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    decode()  # compiles, and captures the step
    seconds = statistics.median(decode() for _ in range(size.decodings))
    return {"tokens_per_second": {"test": size.decoded / seconds}, "state_bytes": {"test": float(state)}}


class Tokenized(NamedTuple):
    """A document, its tokens, and where each begins and ends in the text."""

    text: str
    ids: list[int]
    places: list[tuple[int, int]]


def tokenize_documents(text: Path, tokenizer: Any) -> Iterator[Tokenized]:
    """The documents of the test text in this folder."""
    for document in text_in(text, "test").held_out_documents():
        encoded = tokenizer(document.text, return_offsets_mapping=True, verbose=False)
        yield Tokenized(document.text, encoded.input_ids, encoded.offset_mapping)


def _noted(documents: Iterator[Tokenized], noted: list[Tokenized]) -> Iterator[Tokenized]:
    for one in documents:
        noted.append(one)
        yield one


def choose_rows(size: MatchedLanguageSize, documents: Iterable[Tokenized]) -> tuple[Tensor, Tensor]:
    """Rows of test text, each of one document, and what `find_identifiers` says of their tokens; both int64 [rows, length].

    Raises:
        ValueError: no document is as long as a row.
    """
    length, rows, kinds = int(size.training["length"]), [], []
    for text, ids, places in documents:
        for start in range(0, min(len(ids) - length, (FROM_DOCUMENT - 1) * length) + 1, length):
            rows.append(torch.tensor(ids[start : start + length]))
            kinds.append(torch.tensor(find_identifiers(text, places[start : start + length])))
            if len(rows) == size.rows:
                return torch.stack(rows), torch.stack(kinds)
    if not rows:
        raise ValueError(f"text must hold a test document of at least {length} tokens; write it from more packages")
    return torch.stack(rows), torch.stack(kinds)


def find_identifiers(text: str, places: Sequence[tuple[int, int]]) -> list[int]:
    """Of tokens at these places of a text: 1 in an identifier that stands here for the first time, 2 in one that stood at least
    `GAP` tokens before, 0 in others and outside. Identifiers have at least `FEWEST_TOKENS` tokens."""
    kinds = [0] * len(places)
    last: dict[str, int] = {}
    token = 0
    for match in IDENTIFIER.finditer(text, places[0][0], places[-1][1]):
        while token < len(places) and places[token][1] <= match.start():
            token += 1
        end = token
        while end < len(places) and places[end][0] < match.end():
            end += 1
        before = last.get(match.group())
        if end - token >= FEWEST_TOKENS and (before is None or token - before >= GAP):
            kinds[token:end] = [1 if before is None else 2] * (end - token)
        last[match.group()] = token
    return kinds


@torch.no_grad()
def token_losses(model: Any, rows_BT: Tensor) -> Tensor:
    """Of every token but the first, float32 [rows, length - 1] on the CPU."""
    found = []
    for ids_BT in rows_BT.split(ROWS_AT_ONCE):
        ids_BT = ids_BT.to(model.device)
        logits_BTV = model(ids_BT[:, :-1]).logits.float()
        losses = F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none")
        found.append(losses.view(len(ids_BT), -1).cpu())
    return torch.cat(found)
