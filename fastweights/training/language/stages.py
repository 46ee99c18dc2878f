"""The stages of a run: each a training of its own, in its own folder, on the model of the stage before."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ...checks import check_text, describe_value, error_prefix
from ..optimization import ParameterGroup
from ..run_files import from_mapping, read_fields
from .schedule import BatchStage, reset_alternatives

__all__ = ["LISTS", "make_lists", "reads_on", "resolve", "split_into_stages"]

# What all stages of a run share.
SHARED = ("output", "cache", "tokenizer", "mixers", "presets", "stages", "stage", "selection")
LISTS: dict[str, type[Any]] = {"batch_ramp": BatchStage, "groups": ParameterGroup}  # fields that are lists of tables


def make_lists(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, with what lists of tables describe in their place."""
    made = {
        name: tuple(from_mapping(kind, one, f"[[{name}]]") if isinstance(one, Mapping) else one for one in values[name])
        for name, kind in LISTS.items()
        if isinstance(values.get(name), (list, tuple))
    }
    return {**values, **made}


def split_into_stages(run: Any) -> list[Any]:
    """The runs of the stages of a `LanguageRun`, which knows this module.

    Raises:
        ValueError: a key or value of a stage that does not fit, or two stages of one name.
    """
    runs: list[Any] = []
    for number, table in enumerate(run.stages, 1):
        fields = make_lists(table)
        name = check_text("name of a stage", fields.pop("name", f"stage{number}"))
        if not name.replace("-", "").replace("_", "").isalnum() or name in [made.stage for made in runs]:
            raise ValueError(f"name of a stage must be its own, of letters, digits, - and _, got {name!r}")
        with error_prefix(f"stage {name!r}"):
            for key in SHARED:
                if key in fields:
                    raise ValueError(f"{key} must stand above the stages, which all share it; move it there")
            runs.append(_make_stage(run, runs[-1] if runs else None, name, fields))
    return runs


def _make_stage(run: Any, before: Any, name: str, fields: dict[str, Any]) -> Any:
    model, corpus = (fields.pop(key, {}) for key in ("model", "corpus"))
    for key, table in (("model", model), ("corpus", corpus)):
        if not isinstance(table, Mapping):
            raise TypeError(f"{key} must be a table of what differs, got {describe_value(table)}")
    start = run.model if before is None else {"path": before.output}
    text = run.corpus if before is None else run.corpus.from_start()
    own = {
        "output": f"{run.output.rstrip('/')}/{name}",
        "stage": name,
        "stages": (),
        "model": {**start, **model},
        "corpus": from_mapping(type(run.corpus), {**read_fields(text), **corpus}, "[corpus]"),
    }
    made = from_mapping(type(run), {**read_fields(run), **reset_alternatives(fields), **fields, **own}, "it")
    if before is not None and made.keep_optimizer and made.optimizer != before.optimizer:
        raise ValueError(
            "keep_optimizer must be false where optimizer is not that of the stage before, whose moments it would keep; set it "
            "to false, or leave optimizer as it was"
        )
    return made


def resolve(run: Any, processes: int) -> list[Any]:
    """The runs of the models and stages of a `LanguageRun` in so many processes, with max_steps in place of max_tokens. A stage
    reads on in the text of those before: by skip_tokens, and by continue_from in a stream."""
    resolved: list[Any] = []
    for model in run.models():
        before: list[tuple[Any, Any, int]] = []  # the stages before, their texts and tokens
        for stage in model.stage_runs():
            plan, corpus, text = stage.plan(processes), stage.corpus, _text_of(stage)
            earlier = [(other, tokens) for other, read, tokens in before if read == text]
            if earlier and corpus == corpus.from_start():  # no start of its own
                corpus = _continue_text(earlier)
            resolved.append(dataclasses.replace(stage, corpus=corpus, max_steps=plan.steps, max_tokens=None))
            before.append((resolved[-1], text, plan.tokens(plan.steps)))
    return resolved


def _text_of(run: Any) -> Any:
    """What is the same for stages that read one text, each where the one before has stopped."""
    corpus = run.corpus.from_start()
    return corpus if corpus.streaming else (corpus, run.length)


def _continue_text(earlier: Sequence[tuple[Any, int]]) -> Any:
    """The corpus of these stages from where the last of them stops. earlier: runs and how many tokens they read."""
    (first, _), (last, _) = earlier[0], earlier[-1]
    if first.corpus.streaming or first.corpus.continue_from is not None:
        return dataclasses.replace(first.corpus, skip_tokens=0, continue_from=last.output)
    skipped = int(first.corpus.skip_tokens) + sum(tokens for _, tokens in earlier)
    return dataclasses.replace(first.corpus, skip_tokens=skipped)


def reads_on(run: Any) -> bool:
    """Whether the run is a stage that continues the stream of one before it, which may not have ended."""
    before = run.corpus.continue_from
    return bool(run.stage) and before is not None and before.rpartition("/")[0] == run.output.rpartition("/")[0]
