"""The model card: README.md beside a saved model, which says what the model is and how to load it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ..files import FILE, what_stands, write_bytes
from ..layers.registry import MIXERS
from ..untrusted import one_line

__all__ = ["TOKENIZER_FILES", "USES", "find_use", "has_tokenizer", "is_card", "model_card", "write_card"]

SIGNATURE = re.compile(r"\n<!-- written by fastweights: ([0-9a-f]{16}) -->\n$")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
STATE_AT = (1_000, 10_000)  # tokens


class Use(NamedTuple):
    """What a class of models is for."""

    auto_class: str  # of transformers, which loads the model
    task: str  # in the Hugging Face hub's words
    title: str
    sentence: str
    output: str


LANGUAGE_MODEL = "Language model", "A causal language model"
USES = {
    **dict.fromkeys(
        ("FastWeightsForCausalLM", "HybridModel"),
        Use("AutoModelForCausalLM", "text-generation", *LANGUAGE_MODEL, "logits"),
    ),
    "FastWeightsForSequenceClassification": Use(
        "AutoModelForSequenceClassification",
        "text-classification",
        "Classifier of texts",
        "A model with labels of texts",
        "logits",
    ),
    "FastWeightsForTokenClassification": Use(
        "AutoModelForTokenClassification",
        "token-classification",
        "Classifier of tokens",
        "A model with labels of tokens",
        "logits",
    ),
    "FastWeightsForQuestionAnswering": Use(
        "AutoModelForQuestionAnswering",
        "question-answering",
        "Model of answers",
        "A model that finds where the answer to a question starts and ends in a text",
        "start_logits",
    ),
    "FastWeightsModel": Use("AutoModel", "text-generation", *LANGUAGE_MODEL, "last_hidden_state"),
}


def find_use(model: Any) -> Use:
    """What a model is for. The classes that FSDP2 makes are subclasses and count as their base."""
    kinds = (USES[kind.__name__] for kind in type(model).__mro__ if kind.__name__ in USES)
    return next(kinds, USES["FastWeightsModel"])


def write_card(folder: Path, model: Any, facts: Mapping[str, str] | None = None) -> None:
    """Write the card of a model that is saved in the folder. A README.md that a person wrote or changed is kept.

    facts: settings and results of the training by the names that the card shows ("Steps", "Learning rate").
    """
    path = folder / "README.md"
    if not os.path.lexists(path) or is_card(path):
        text = model_card(model, facts, tokenizer=has_tokenizer(folder))
        write_bytes(path, f"{text}\n<!-- written by fastweights: {_digest(text)} -->\n".encode())


def model_card(model: Any, facts: Mapping[str, str] | None = None, *, tokenizer: bool = False) -> str:
    """The card as Markdown. tokenizer: whether the example reads text, or token ids."""
    config = model.config
    layers = [name for name, _ in config.mixers()]
    own = sorted({name for name in layers if not MIXERS[name].layer.__module__.startswith("fastweights.")})
    use = find_use(model)
    usage = _write_usage(use, reads_text=tokenizer)
    needed = (
        f"\nFirst import the module that registers {', '.join(own)}, which the library does not have.\n" if own else ""
    )
    states = " and ".join(f"{model.state_size(length):,} after {length:,} tokens" for length in STATE_AT)
    rows = "".join(f"| {one_line(name)} | {_write_cell(value)} |\n" for name, value in (facts or {}).items())
    training = f"| | |\n|---|---|\n{rows}" if rows else "Nothing is recorded here.\n"
    return f"""\
---
library_name: fastweights
pipeline_tag: {use.task}
tags: [fastweights, linear-attention]
---

# {use.title} with {" and ".join(dict.fromkeys(layers))} layers

{use.sentence} of the Python library fastweights: memory layers in place of softmax attention.

| | |
|---|---|
| Memory layers | {_describe_layers(layers)} |
| Width, heads | {config.hidden_size:,}, {config.num_attention_heads:,} |
| Vocabulary | {config.vocab_size:,} tokens |
| Parameters | {model.num_parameters():,} |
| State | {states}, in numbers per sequence |

## Use
{needed}
```python
{usage}
```

Without `import fastweights.models`, transformers says that it does not recognise the model type `{config.model_type}`.

## Training

{training}
## Licence

Not stated. Whoever publishes the model names one here, and as `license` at the top of this file. The library is under the MIT
licence, which says nothing about weights.
"""


def _write_usage(use: Use, *, reads_text: bool) -> str:
    """The example that loads the model and calls it. reads_text: whether it uses the tokenizer, or token ids."""
    generates = reads_text and use.auto_class == "AutoModelForCausalLM"
    called = (
        "tokenizer.decode(model.generate(tokens, max_new_tokens=20)[0])" if generates else f"model(tokens).{use.output}"
    )
    tokens = "torch.tensor([[0, 1, 2]])  # there was no tokenizer beside the model when this was written"
    if reads_text:
        tokens = 'tokenizer("The", return_tensors="pt").input_ids'
    lines = [
        "import fastweights.models  # makes the Auto classes of transformers know the model",
        *([] if reads_text else ["import torch"]),
        f"from transformers import {', '.join(sorted([use.auto_class, *['AutoTokenizer'] * reads_text]))}",
        "",
        'folder = "."  # this folder, or the name of the model on the Hugging Face hub',
        *(["tokenizer = AutoTokenizer.from_pretrained(folder)"] if reads_text else []),
        f"model = {use.auto_class}.from_pretrained(folder)",
        f"tokens = {tokens}",
        f"print({called})",
    ]
    return "\n".join(lines)


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer is saved in the folder."""
    return any((folder / name).is_file() for name in TOKENIZER_FILES)


def _describe_layers(layers: list[str]) -> str:
    """[a, a, b] as "a in layers 0-1, b in layer 2"."""
    parts = []
    for name, places in groupby(enumerate(layers), key=lambda place: place[1]):
        indices = [index for index, _ in places]
        one = len(indices) == 1
        parts.append(f"`{name}` in layer {indices[0]}" if one else f"`{name}` in layers {indices[0]}-{indices[-1]}")
    return ", ".join(parts)


def _write_cell(value: str) -> str:
    return one_line(value).replace("|", "\\|")


def is_card(path: Path) -> bool:
    """Whether the file is a card that nobody has changed: its signature fits its content."""
    try:
        text = path.read_text("utf-8") if what_stands(path) == FILE else ""
    except (OSError, UnicodeDecodeError):
        return False
    signed = SIGNATURE.search(text)
    return signed is not None and signed[1] == _digest(text[: signed.start()])


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
