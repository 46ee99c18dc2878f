"""Claims about trained models: recall experiments and small language models whose results become numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch

from fastweights.data.text import TextTokenizer, pytorch_source
from fastweights.files import file_name
from fastweights.layers import MixerChoice, in_block
from fastweights.models import FastWeightsForCausalLM
from fastweights.results import LanguageResult, RecallResult, still_falling
from fastweights.results.experiment import best_results
from fastweights.results.language import load_result
from fastweights.training import RecallExperiment, RecallRun, learning_rate_factor, run_recall_parts
from fastweights.training.folder import as_stored
from fastweights.training.pool import usual_workers
from fastweights.training.recall.folder import ExperimentFolder

from ..rate_search import search_rates
from .claim import Claim
from .conditions import Conditions, Unmeasured
from .measurement import UNDERTRAINED, Column, Measurement, Number, mark_undertrained
from .words import Quantity

__all__ = [
    "LANGUAGE_NUMBERS",
    "RATES",
    "RECALL_NUMBERS",
    "VLA_SETTINGS",
    "ZOOLOGY_SETTINGS",
    "Part",
    "language_models",
    "list_lost",
    "mixer_fields",
    "passes_over_text",
    "rate_field",
    "recall_experiment",
    "small_model",
    "train_best_rates",
    "train_parts",
    "train_size",
    "trained_model",
]

Trains = Callable[[str, Mapping[str, Mapping[str, Any]], Conditions], dict[str, list[RecallResult]]]

LANGUAGE_WORKERS = 3  # language models that share one GPU
RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # the grid of learning rates for every mixer

# Zoology's multi-query associative recall, smaller than the papers' runs of it.
ZOOLOGY_SETTINGS: dict[str, Any] = {
    "task": "mqar", "task_options": {"random_non_queries": False}, "vocab_size": 8192, "layers": 2, "width": 128,
    "tie_word_embeddings": True, "initializer_range": 0.02, "steps": 2000, "batch_size": 64, "learning_rates": RATES,
}  # fmt: skip

# Variational Linear Attention, tables 3 and 6. The cosine's end, first values and the form of the MLP are printed nowhere.
VLA_SETTINGS: dict[str, Any] = {
    "task": "mqar-shuffled", "vocab_size": 128, "width": 128, "heads": 4, "layers": 2, "initializer_range": 0.02,
    "intermediate_size": 256, "tie_word_embeddings": True, "steps": 2000, "batch_size": 64, "learning_rates": (3e-4,),
    "final_fraction": 0.0, "weight_decay": 0.01, "test_examples": 960,
    "mixers": ("vla", "vla-softmax", "vla-linear", "vla-deltanet"),
}  # fmt: skip


RECALL_NUMBERS = {
    "accuracy": Quantity("{subject}"),
    "stage_accuracy": Quantity("{subject}, stage {stage}"),
    "diverged_trainings": Quantity("diverged trainings of {subject}"),
    UNDERTRAINED: Quantity("{subject}"),
}
LANGUAGE_NUMBERS = {
    "loss": Quantity("{mixer}", "nats"),
    "context_loss": Quantity("{mixer}, context {context}", "nats"),
    "gradient_spike": Quantity("{mixer}, {share:.1%} quantile of gradient norms over the median"),
    UNDERTRAINED: Quantity("{mixer}"),
}


@dataclass(frozen=True)
class Part:
    """One experiment of a claim: fields of `RecallExperiment`, and the column of its numbers, beside the pairs."""

    settings: Mapping[str, Any]
    column: Column = field(default_factory=dict)


def mixer_fields(result: RecallResult) -> dict[str, Any]:
    """The mixer and the options of a `Number` of a training."""
    record = result.run["mixer"]
    return {"mixer": record} if isinstance(record, str) else {"mixer": record["name"], "options": record["options"]}


def rate_field(result: RecallResult) -> Column:
    """The learning rate of a training, as `run` of a `Number`."""
    return {"learning_rate": result.run["learning_rate"]}


def train_parts(
    claim: str, parts: Mapping[str, Mapping[str, Any]], conditions: Conditions
) -> dict[str, list[RecallResult]]:
    """Trains experiments by name ("" where there is one), each with fields of `RecallExperiment`, or reads their results."""
    experiments = {part: experiment(settings, conditions) for part, settings in parts.items()}
    workers = conditions.workers or usual_workers(conditions.device)
    outputs = {part: part_folder(claim, part, conditions) for part in parts}
    return run_recall_parts(experiments, outputs, workers=workers)


def trained_model(
    claim: str, part: str, settings: Mapping[str, Any], result: RecallResult, conditions: Conditions
) -> Any:
    """The model of a result of `train_parts` or `train_best_rates`, whose settings have `save_models`."""
    run = next(run for run in experiment(settings, conditions).runs() if as_stored(run.record()) == result.run)
    searched = rate_folder(claim, part, run, conditions) / f"seed{run.seed}"
    folders = (ExperimentFolder(folder).model(run) for folder in (part_folder(claim, part, conditions), searched))
    model = FastWeightsForCausalLM.from_pretrained(next(folder for folder in folders if folder.exists()))
    return model.to(conditions.device).eval()  # type: ignore[arg-type]  # transformers' wrapper hides self


def experiment(settings: Mapping[str, Any], conditions: Conditions) -> RecallExperiment:
    return RecallExperiment(**settings, seeds=conditions.seeds, device=conditions.device)


def part_folder(claim: str, part: str, conditions: Conditions) -> Path:
    return conditions.folder / claim / (part.replace(" ", "-") or "all")


def rate_folder(claim: str, part: str, run: RecallRun, conditions: Conditions) -> Path:
    """Where `train_best_rates` has the trainings of one mixer and number of pairs."""
    return part_folder(claim, part, conditions) / file_name(run.choice.label) / f"pairs{run.pairs}"


def train_best_rates(
    claim: str, parts: Mapping[str, Mapping[str, Any]], conditions: Conditions
) -> dict[str, list[RecallResult]]:
    """As `train_parts`, but the first seed alone takes every learning rate and chooses that of the others. The results are those
    at the chosen rates, per mixer and number of pairs."""
    experiments, outputs, parts_of = {}, {}, {}
    for part, settings in parts.items():
        whole = experiment(settings, conditions)
        for run in replace(whole, learning_rates=whole.learning_rates[:1], seeds=whole.seeds[:1]).runs():
            name = "/".join([*filter(None, [part]), run.choice.label, f"{run.pairs} pairs"])
            experiments[name] = replace(whole, mixers=(run.mixer,), pairs=(run.pairs,))
            outputs[name] = rate_folder(claim, part, run, conditions)
            parts_of[name] = part
    workers = conditions.workers or usual_workers(conditions.device)
    searches, failure = search_rates(experiments, outputs, workers=workers)
    if failure is not None:
        raise failure
    results: dict[str, list[RecallResult]] = {part: [] for part in parts}
    for name, search in searches.items():
        results[parts_of[name]].extend(search.chosen)
    return results


def train_size(
    claim: Claim, parts: Mapping[str, Mapping[str, Any]], conditions: Conditions
) -> dict[str, list[RecallResult]]:
    """`train_parts`, or `train_best_rates` for the larger size of a claim, with folders of the result's name."""
    name = claim.result_name(conditions.device)
    return (train_parts if name == claim.name else train_best_rates)(name, parts, conditions)


def recall_experiment(
    claim: str, parts: Mapping[str, Part], train: Trains = train_parts
) -> Callable[[Conditions], Measurement]:
    """Trains experiments, by the name of their folder, with `train_parts` or `train_best_rates`: `RECALL_NUMBERS` at the best
    learning rate of each mixer and number of pairs. Trainings that diverged are counted, and have an accuracy of 0."""

    def measure(conditions: Conditions) -> Measurement:
        found: list[Number] = []
        for name, results in train(claim, {name: part.settings for name, part in parts.items()}, conditions).items():
            groups: dict[tuple[str, int], list[RecallResult]] = {}
            for result in results:
                groups.setdefault((result.mixer, result.run["pairs"]), []).append(result)
            for (_, pairs), runs in groups.items():
                found += count_recall(best_results(runs), {"pairs": pairs, **parts[name].column})
        return Measurement(tuple(found))

    return measure


def count_recall(results: Sequence[RecallResult], column: Column) -> Iterator[Number]:
    """`RECALL_NUMBERS` of the trainings of one mixer and number of pairs, one per seed."""
    fields = mixer_fields(results[0])
    for result in results:
        yield Number(
            "accuracy", result.counted_value, column, **fields, run=rate_field(result), seed=result.run["seed"]
        )
    for stage, _ in enumerate(results[0].run.get("curriculum", ())):
        for result in results:
            reached = {**column, "stage": stage + 1}
            yield Number("stage_accuracy", result.stage_values[stage], reached, **fields, seed=result.run["seed"])
    diverged = sum(result.diverged for result in results)
    if diverged:
        yield Number("diverged_trainings", diverged, column, **fields)
    if any(result.undertrained for result in results):
        yield mark_undertrained(column, **fields)


def language_models(claim: str, choices: Sequence[MixerChoice], **settings: Any) -> Callable[[Conditions], Measurement]:
    """Trains one language model per mixer and seed, several at the same time: `LANGUAGE_NUMBERS`, the held-out loss in nats per
    token at the end and by context length; NaN for a training whose loss was no longer finite. With log_every=1 also how
    gradients spike: quantiles of their norms over the median. The seed sets first weights and the order of the data. Text is read
    once at most: where there is too little of it, nothing is measured. Layers are in their published block."""

    def measure(conditions: Conditions) -> Measurement:
        try:
            from fastweights.training.language import LanguageRun
            from fastweights.training.language.together import train_together
        except ImportError as error:
            raise Unmeasured(f"needs {error.name}; pip install 'fastweights[train]'") from None
        cuda = torch.device(conditions.device).type == "cuda"
        if cuda != torch.cuda.is_available():
            raise Unmeasured(
                "language models train on the GPU where there is one; pass --device cuda there, and cpu elsewhere"
            )
        runs = {}
        for choice in choices:
            for seed in conditions.seeds:
                folder = conditions.folder / claim / f"{choice.label.replace(' ', '-')}-seed{seed}"
                sizes = settings.get("model", {})
                published = in_block(choice, "published", sizes.get("num_heads", 1))
                model = {**sizes, "mixer": published.entry}
                own = {"model": model, "output": str(folder), "seed": seed}
                runs[choice.label, seed] = LanguageRun(**{**settings, **own, "precision": "bf16" if cuda else "no"})
        passes = passes_over_text(next(iter(runs.values())))
        if passes > 1:
            raise Unmeasured(
                f"the training reads its text {passes:.1f} times, and would learn it by heart; needs more text"
            )
        workers = conditions.workers or (usual_workers(conditions.device, LANGUAGE_WORKERS) if cuda else 1)
        diverged = train_together(list(runs.values()), workers, conditions.device)
        found: list[Number] = []
        for choice in choices:
            fields: dict[str, Any] = {"mixer": choice.name, "options": choice.options}
            results = []
            for seed in conditions.seeds:
                run = runs[choice.label, seed]
                results.append(None if run.output in diverged else language_result(run))
                found += [replace(one, **fields, seed=seed) for one in count_language(run, results[-1])]
            if any(result is not None and still_learning(result) for result in results):
                found.append(mark_undertrained({}, **fields))
        return Measurement(tuple(found))

    return measure


def count_language(run: Any, result: LanguageResult | None) -> Iterator[Number]:
    """`LANGUAGE_NUMBERS` of a `LanguageRun` with its result, None where its loss did not stay finite."""
    yield Number("loss", math.nan if result is None else result.held_out_loss)
    losses = {row["length"]: row["loss"] for row in result.perplexities} if result else {}
    for length in run.context_lengths:
        yield Number("context_loss", losses.get(length, math.nan), {"context": length})
    if run.log_every == 1:
        norms = sorted(gradient_norms(run))
        for share in (0.99, 0.999):
            spike = math.nan if result is None else norms[math.ceil(share * len(norms)) - 1] / statistics.median(norms)
            yield Number("gradient_spike", spike, {"share": share})


def list_lost(found: Measurement, choices: Iterable[MixerChoice]) -> list[str]:
    """The labels of the mixers with a language model whose loss did not stay finite."""
    return [choice.label for choice in choices if any(map(math.isnan, found.values("loss", choice)))]


def passes_over_text(run: Any) -> float:
    """How many times a `LanguageRun` reads its train text, which is tokenized for it."""
    from fastweights.data.text import PackedRows, prepare_text

    corpus = replace(run.corpus)  # a corpus caches the list of its files, which would be sent to every process
    text = prepare_text(corpus, run.tokenizer, run.cache, read_all=False)
    return float(run.max_steps * run.batch_size / len(PackedRows(text.train, run.length)))


def language_result(run: Any) -> LanguageResult:
    """The result of a `LanguageRun` that has ended."""
    return load_result(Path(run.output) / "result.json")


def gradient_norms(run: Any) -> list[float]:
    """The gradient's norm before it is scaled down, at every logged step of a `LanguageRun` where it was finite."""
    from fastweights.training.language.callbacks import read_log

    points = read_log(Path(run.output) / "log.jsonl")
    return [point["gradient_norm"] for point in points if point.get("gradient_norm") is not None]


def small_model(layers: int = 6, width: int = 512, heads: int = 4, length: int = 1024, **more: Any) -> dict[str, Any]:
    """Fields of `LanguageRun`: 500 steps of 32 rows of 1024 tokens, of the source text of the installed PyTorch. Python's own
    text, the default corpus, has a fifth of these tokens."""
    return {
        "model": {
            "hidden_size": width, "num_hidden_layers": layers, "num_heads": heads, "tie_word_embeddings": True,
            **more.pop("model", {}),
        },
        "corpus": pytorch_source(max_megabytes=60),
        "tokenizer": TextTokenizer(vocab_size=8192),
        "length": length,
        "batch_size": 32 * 1024 // length,
        "max_steps": 500,
        "learning_rate": 2e-3,
        "context_lengths": (),
        "compile": False,  # several trainings share a GPU, and compiling them takes longer than it saves
        **more,
    }  # fmt: skip


def still_learning(result: LanguageResult) -> bool:
    """Whether the loss of a language model was still falling when its training ended, by the learning rates of its run."""
    run = result.run
    warmup = math.ceil(run["warmup_fraction"] * run["max_steps"])
    factors = (
        learning_rate_factor(
            step, steps=run["max_steps"], warmup_steps=warmup, final=run["final_fraction"], start=run["warmup_start"]
        )
        for step in range(run["max_steps"])
    )
    learning = list(accumulate(factors))
    return still_falling(result.loss_steps, result.losses, [learning[step - 1] for step in result.loss_steps])
