"""The same run made small: a training of minutes on a CPU that goes through all that the whole one does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...data.text import TextCorpus, TextTokenizer
from ...kinds import checked
from ...models import FastWeightsConfig
from .model import model_config
from .run import LanguageRun, Run

__all__ = ["tiny_run"]

WIDTH, HEADS, LAYERS = 64, 2, 2
LENGTH, LONGEST = 64, 256  # tokens of the shortest rows, and of those of a stage with longer ones at most
ROWS = 2  # of a pass, and passes of a step
STEPS, FEWEST = 16, 4  # of the stage with the most tokens, and of others
TOKENS = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")  # of the tokenizer that is trained
EVERYWHERE: dict[str, Any] = {
    "precision": "no",
    "compile": None,
    "graphs": None,
    "fsdp": False,
    "reshard_after_forward": True,
    "forward_prefetch": 0,
    "reduce_dtype": "float32",
    "context_parallel": 1,
    "log_every": 2,
    "evaluate_every": 0,
    "evaluation_rows": 8,
    "checkpoint_every": 8,
    "context_lengths": (LENGTH, LONGEST),
    "context_texts": 2,
    "report_to": (),
}


@checked
def tiny_run(run: Run) -> Run:
    """The run with every model, kind of layer, option, stage and shape of schedule, at sizes that a CPU trains in minutes.

    Models have two layers, or one of each kind, of width 64 with two heads. Rows have 64 tokens, up to 256 where a stage has
    longer ones. Tokens and steps are scaled to 16 steps, and at least 4 per stage. The text is that of local files, or Python's
    own in place of a dataset. The tokenizer, with 512 tokens, is trained on it. The output is `run.output` + "-tiny".

    Raises:
        ValueError: the run continues a saved model, whose sizes stay as they are; or an option of a mixer does not fit.
    """
    if "path" in run.model:
        raise ValueError("a tiny run must begin with a new model, got model with path, whose sizes stay as they are")
    models = run.models()
    parts = models[0].stage_runs()
    whole = _shrink_schedule(run, parts)
    corpus = _shrink_corpus(run.corpus, whole["length"])
    stages = []
    for table, part in zip(run.stages, parts):  # none where the run has no stages
        schedule = _shrink_schedule(part, parts)
        kept = {key: value for key, value in table.items() if key not in EVERYWHERE}
        own = _differing(_shrink_corpus(part.corpus, schedule["length"]), corpus)
        stages.append({**kept, **schedule, **({"corpus": own} if "corpus" in table else {})})
    sizes = [_shrink_model(model_config(model)) for model in models]
    fields = {key: value for key, value in run.model.items() if key not in TOKENS}
    return dataclasses.replace(
        run,
        **EVERYWHERE,
        **whole,
        output=f"{run.output.rstrip('/')}-tiny",
        model=fields if run.presets else {**fields, **sizes[0]},
        presets=tuple(map(_shrink_preset, run.presets, sizes)),
        corpus=corpus,
        tokenizer=TextTokenizer(vocab_size=512, sample_megabytes=0.5),
        stages=tuple(stages),
    )


def _shrink_preset(entry: str | Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    kept = {"name": entry} if isinstance(entry, str) else {key: x for key, x in entry.items() if key not in TOKENS}
    return {**kept, **sizes}


def _shrink_model(config: FastWeightsConfig) -> dict[str, Any]:
    """Changes to a configuration: of layers two, or one of each kind."""
    sizes = {
        "hidden_size": WIDTH,
        "num_heads": HEADS,
        "num_hidden_layers": min(LAYERS, config.num_hidden_layers),
        "intermediate_size": 2 * WIDTH if config.intermediate_size else 0,
    }
    if isinstance(config.mixer, (list, tuple)):
        kinds = [entry for number, entry in enumerate(config.mixer) if entry not in config.mixer[:number]]
        return {**sizes, "num_hidden_layers": len(kinds), "mixer": kinds}
    return {**sizes, "softmax_layers": [LAYERS - 1]} if config.softmax_layers else sizes


def _shrink_schedule(part: LanguageRun, parts: list[LanguageRun]) -> dict[str, Any]:
    """What a stage reads and learns, or the run of the stages `parts` as a whole, in fewer and smaller steps."""
    plan, *plans = (one.plan(one.context_parallel) for one in (part, *parts))  # of one context group
    length = min(LONGEST, LENGTH * part.length // min(one.length for one in parts))
    batch_size, accumulation = min(ROWS, part.batch_size), min(ROWS, part.accumulation)
    share = plan.tokens(plan.steps) / max(one.tokens(one.steps) for one in plans)
    steps = max(FEWEST, round(STEPS * share))
    tokens = steps * batch_size * accumulation * length
    scales = {"steps": steps / plan.steps, "tokens": tokens / plan.tokens(plan.steps)}
    made: dict[str, Any] = {"length": length, "batch_size": batch_size, "accumulation": accumulation}
    made |= {"max_steps": steps} if part.max_tokens is None else {"max_tokens": tokens}
    for name in ("warmup_steps", "warmup_tokens", "schedule_tokens"):
        if getattr(part, name) is not None:
            made[name] = max(1, round(getattr(part, name) * scales[name.rpartition("_")[2]]))
    if part.batch_ramp:
        made["batch_ramp"] = tuple(
            dataclasses.replace(
                ramp,
                batch_size=max(1, ramp.batch_size * batch_size // part.batch_size),
                **{
                    unit: max(1, int(getattr(ramp, unit) * scale))
                    for unit, scale in scales.items()
                    if getattr(ramp, unit) is not None
                },
            )
            for ramp in part.batch_ramp
        )
    return made


def _shrink_corpus(corpus: TextCorpus, length: int) -> TextCorpus:
    """Local text in place of a dataset. Where only long documents are read, they fill a row of this length."""
    small: dict[str, Any] = {"min_tokens": length} if corpus.min_tokens else {}
    if corpus.streaming:
        small |= {"streaming": True, "shuffle_megabytes": 0.25, "held_out_megabytes": 0.1}
    elif not corpus.sources:
        small["max_megabytes"] = 2.0
    return (
        dataclasses.replace(corpus.from_start(), max_tokens=None, **small) if corpus.is_local else TextCorpus(**small)
    )


def _differing(made: TextCorpus, usual: TextCorpus) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(made)]
    return {name: getattr(made, name) for name in names if getattr(made, name) != getattr(usual, name)}
