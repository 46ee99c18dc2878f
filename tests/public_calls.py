"""The public functions and classes of the library, with a valid call of each: its arguments by name.

A new public name without a valid call here, or a reason to have none, fails tests/test_every_public_call.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import fastweights
from fastweights import conversion
from fastweights.data import MQAR, LinearRegression, make_task
from fastweights.data.text import PackedRows, TextCorpus, TextTokenizer, TokenShards, prepare_text
from fastweights.distillation import DistillRun, SelectionSettings
from fastweights.evaluation import EvaluationSettings
from fastweights.layers import MIXERS, LayerCache, Mixer, MixerChoice, MixerOptions, build_mixer
from fastweights.models import FastWeightsConfig
from fastweights.results import ModelMeasures
from fastweights.training import RecallExperiment, RecallRun
from fastweights.training.language import LanguageRun

from .distillation import small as distillation
from .evaluation.small import TEXT, model, save, tokenizer
from .results.made_up import TRAINED, made_up

__all__ = ["CALLS", "COSTLY", "NAMED", "TAKEN", "UNTRIED", "WITHOUT", "public"]

# Public packages are those with __all__ outside these, which are the commands, kernels and what vLLM calls.
INSIDE = ("cli", "contract", "kernels", "serving", "shared", "framework")
OPS = "ops.framework.checks compares shapes and dtypes; tests/ops and tests/testing call every op with wrong values"
# Names without a call here, and why.
WITHOUT: dict[str, str] = {
    "training.StopSignals": "takes nothing",
    "integrations.flash_linear_attention.register": "takes nothing, needs flash-linear-attention",
    "integrations.flash_linear_attention.unregister": "takes nothing, needs flash-linear-attention",
    "data.Batch": "a tuple of the tensors that a task has drawn",
    "data.VectorBatch": "a tuple of the tensors that a task has drawn",
    "data.Draws": "made by Task.batch, which checks its arguments",
    "data.RecallTask": "a base class, whose tasks are called",
    "data.VectorTask": "a base class, whose tasks are called",
    "data.StateTracking": "a base class, whose tasks are called",
    "data.Task": "a base class, whose tasks are called",
    "layers.LayerCache": "made by layers in compiled graphs; Mixer.forward checks it",
    "layers.probe": "a context manager, which checks when it is entered; see tests/layers/test_probe.py",
    "models.FastWeightsConfig": "every field is tried in tests/models/test_bad_calls.py; others are those of transformers",
    "models.hybrid.Family": "an entry of FAMILIES",
    "ops.linear_rows.Normed": "a tuple of what multiply_rows takes; layers make it of their parameters",
    "ops.linear_rows.Product": "a tuple of what multiply_rows takes; layers make it of their parameters",
    "ops.linear_rows.RowProducts": "a tuple that multiply_rows returns",
    "models.hybrid.HybridCache": "made by hybrids and generate(), from the configuration of the model",
    "models.hybrid.HybridModel": "a base class; the classes of families are called in tests/models/hybrid",
    "models.hybrid.find_family": "tests/models/hybrid/test_bad_calls.py: linearize gives it the configuration of a model",
    "models.hybrid.hybrid_config": "takes a key of FAMILIES",
    "models.hybrid.hybrid_model": "takes a key of FAMILIES",
    "data.text.Document": "made by TextCorpus.documents, one per text: a check would cost more than the rest",
    "data.text.PreparedText": "made by prepare_text, which checks its arguments",
    "training.WeightDecayMixin": "a part of a Trainer of transformers, whose arguments it takes",
    "layers.HeadPart": "made where a model is divided among processes, by code that has checked it",
    "layers.Mixer": "a base class, whose layers are called",
    "layers.RuleCall": "made by MemoryLayer.forward, which checks its arguments",
    "layers.Seen": "made by probe, which checks its arguments",
    "layers.option": "writes a field of a dataclass: its mistakes end the import of the layer",
    **dict.fromkeys(
        (
            f"distributed.{name}"
            for name in ("ContextParallel", "context_parallel", "gather_tokens", "own_tokens", "sum_over_ranks")
        ),
        "needs a process group; tests/distributed calls it with wrong values there",
    ),
    **dict.fromkeys(
        (f"integrations.torchtitan.{name}" for name in ("check_version", "model_registry", "save_model_folder")),
        "refused without torchtitan; tests/integrations/torchtitan calls it with wrong values",
    ),
    "testing.OpCase": "the declaration of an op for the tests",
    "testing.OpInputs": "the inputs of an op for the tests",
}


def mamba_layer() -> dict[str, Any]:
    config = transformers.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, expand=2, state_size=8, n_groups=1, num_hidden_layers=1, vocab_size=20
    )
    return {"layer": transformers.Mamba2Model(config).layers[0].mixer, "config": config}


# Calls that cost much: wrong values are refused before the work, which is not done here.
COSTLY = {
    "conversion.convert_folder",
    "conversion.linearize_folder",
    "training.recall.run_recall",
    "training.recall.run_recall_parts",
    "training.language.train_language",
    "distillation.distill",
}
# What messages call an argument.
NAMED = {
    ("results.load_results", "path"): "result",
    ("training.recall.load_recall_file", "path"): "run file",
    ("training.language.load_run", "path"): "run file",
    ("evaluation.load_language_model", "path"): "MODEL",
    ("layers.MixerChoice", "name"): "mixer",
    ("layers.build_mixer", "name"): "mixer",
    ("layers.parse_mixers", "text"): "mixer",
    ("evaluation.word_tokens", "count"): "symbols",
    ("models.preset", "name"): "preset",
    ("models.presets.with_mixer", "name"): "preset",
    ("training.recall.RecallExperiment", "mixers"): "mixer",
    ("training.recall.run_recall_parts", "parts"): "experiment",
}
# Values that fit and cannot be refused: what they lead to, a caller's own code or a long text says.
UNTRIED = {("evaluation.regression_errors", "model", "a module"), ("evaluation.continue_text", "prompt", "long text")}
# Values that a function takes beside those of its annotation.
TAKEN = (
    {
        ("data.text.TextCorpus", name): {"text", "long text", "half a character"}
        for name in ("paths", "held_out", "excluded")
    }
    | {
        ("data.text.TextSource", name): {"text", "long text", "half a character"}
        for name in ("paths", "held_out", "excluded")
    }
    | {
        ("layers.DecayOptions", "long_memory"): {"True"},
        ("training.ParameterGroup", "parameters"): {"text", "long text", "half a character"},
    }
)


def public(top: Any = fastweights, inside: Collection[str] = INSIDE) -> dict[str, Any]:
    """Public functions and classes by name, where several packages have them that of the one where they are written. Public
    packages are those with __all__ outside `inside`."""
    found: dict[int, tuple[str, Any]] = {}
    for module in pkgutil.walk_packages(top.__path__, f"{top.__name__}."):
        parts = module.name.split(".")[1:]
        if not module.ispkg or any(part.startswith("_") or part in inside for part in parts) or len(parts) > 2:
            continue
        package = importlib.import_module(module.name)
        for name in getattr(package, "__all__", ()):
            value = getattr(package, name)
            if not (inspect.isroutine(value) or isinstance(value, type) and not issubclass(value, BaseException)):
                continue
            if id(value) not in found or value.__module__.startswith(f"{module.name}."):
                found[id(value)] = ".".join([*parts, name]), value
    return dict(found.values())


@cache
def results() -> list[Any]:
    return [made_up(mixer, pairs, rate) for mixer in ("gdn", "linear") for pairs in (4, 16) for rate in (0.01, 0.1)]


@cache
def experiment() -> RecallExperiment:
    return RecallExperiment(mixers=("gdn",), pairs=(4,), steps=2, test_examples=2, batch_size=2)


@cache
def other() -> Any:
    """A model that continues `model()` with another memory."""
    return conversion.convert(model(), to="pgdn")


def shards() -> TokenShards:
    Path("text.txt").write_text(TEXT)
    corpus = TextCorpus(paths=("text.txt",))
    return prepare_text(corpus, TextTokenizer(vocab_size=300), "tokens").train


def saved() -> str:
    return str(save(Path("model")))


def saved_teacher() -> str:
    distillation.pair()[1].save_pretrained("teacher")
    return "teacher"


def ids() -> Tensor:
    return torch.arange(40)[None]


def fields(value: Any) -> dict[str, Any]:
    """The fields of a record, which make it again."""
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}


SIZES = {"hidden_size": 16, "num_heads": 2}
LM: dict[str, Any] = {"model": model(), "tokenizer": tokenizer()}
TASK = {"pairs": 4, "vocab_size": 32}
SEEN = {"length": 8, "loss": 1.0, "last_loss": 1.0, "texts": 2, "joined": 1}
MEASURED: dict[str, Any] = {"parameters": 1, "state_sizes": {"8": 16}, "perplexities": [], "needles": []}
ANSWERED = {"length": 8, "examples": 2, "found": 0.5, "exact": 0.5, "answer_loss": 1.0}

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "analysis.mixers_table": dict,
    "analysis.recall_table": lambda: {"results": results()},
    "analysis.stage_table": lambda: {"results": results()},
    "analysis.save_plots": lambda: {"results": results(), "folder": Path()},
    "conversion.Conversion": lambda: fields(conversion.CONVERSIONS["gdn", "pgdn"]),
    "conversion.ConversionReport": lambda: {
        "conversions": {}, "layers": 1, "parameters": 2, "new_parameters": 1, "tokenizer": [], "training": None,
        "check": conversion.LogitsCheck(tokens=1, largest_logit=1.0, neutral=None, saved=0.0), "output": Path("out"),
    },
    "conversion.LogitsCheck": lambda: {"tokens": 1, "largest_logit": 1.0, "neutral": None, "saved": 0.0},
    "conversion.check_logits": lambda: {"source": model(), "converted": other(), "tokens_BT": ids()},
    "conversion.condition": lambda: {"conversion": conversion.CONVERSIONS["gdn", "pgdn"]},
    "conversion.convert": lambda: {"model": model(), "to": "pgdn"},
    "distillation.HeldOutKL": lambda: {"teacher": model(), "rows": distillation.rows(1)},
    "distillation.SelectionSettings": dict,
    "distillation.auto_layers": lambda: {"keep": "auto:2", "layers": 4},
    "distillation.compare_models": lambda: {
        "student": model(), "teacher": model(), "tokenizer": tokenizer(), "rows": distillation.rows(1),
        "documents": [[1, 2, 3] * 8], "settings": EvaluationSettings(lengths=(8,)),
    },
    "distillation.rank_layers": lambda: {
        **dict(zip(("student", "teacher"), distillation.pair(), strict=True)), "rows": distillation.rows(1),
    },
    "distillation.rows_of_documents": lambda: {
        "documents": [[1, 2, 3] * 8], "length": 8, "settings": SelectionSettings(),
    },
    "distillation.DistillRun": lambda: {"model": {"path": "student"}},
    "distillation.distill": lambda: {"run": DistillRun(model={"path": "missing"})},
    "distillation.hidden_loss": lambda: {"student_TD": torch.ones(3, 2), "teacher_TD": torch.ones(3, 2)},
    "distillation.summed_kl": lambda: dict.fromkeys(
        ("student_hidden_TD", "student_weight_VD", "teacher_hidden_TE", "teacher_weight_VE"), torch.ones(3, 3)
    ),
    "distributed.whole_sequences": lambda: {"model": other()},
    "conversion.convert_layer": mamba_layer,
    "conversion.convert_folder": lambda: {"source": saved(), "output": "new", "to": "pgdn", "tokens": 8, "options": {}},
    "data.register_task": lambda: {"task": MQAR},
    "data.make_task": lambda: {"name": "mqar", **TASK},
    "data.stream": lambda: {
        "task": make_task("mqar", pairs=4, vocab_size=32), "split": "train", "seed": 0, "batch_size": 2, "stop": 2,
    },
    "data.LinearRegression": lambda: {"pairs": 4},
    "data.text.PackedRows": lambda: {"shards": shards(), "length": 8},
    "data.text.TextCorpus": lambda: {"paths": ("text.txt",)},
    "data.text.TextSource": lambda: {"paths": ("text.txt",)},
    "data.text.TextTokenizer": dict,
    "data.text.TokenShards": lambda: {"folder": shards().folder, "split": "train"},
    "data.text.pack_rows": lambda: {"rows": [PackedRows(shards(), 8)[0]]},
    "data.text.prepare_text": lambda: {
        "corpus": TextCorpus(paths=(str(shards().folder.parent.parent / "text.txt"),)),
        "tokenizer": TextTokenizer(vocab_size=300), "cache": "tokens",
    },
    "data.text.pytorch_source": dict,
    "evaluation.EvaluationSettings": dict,
    "evaluation.RegressionErrors": lambda: {"model": [1.0], "ridge": [1.0], "kalman": [1.0]},
    "evaluation.TaskInWords": lambda: {
        "task": make_task("mqar", pairs=4, vocab_size=32), "tokens": torch.arange(32), "first": [1],
    },
    "evaluation.continue_text": lambda: {**LM, "prompt": "The", "max_new_tokens": 1},
    "evaluation.evaluate": lambda: {**LM, "settings": EvaluationSettings(lengths=(8,)), "documents": [[1, 2, 3] * 8]},
    "evaluation.load_language_model": lambda: {"path": saved()},
    "evaluation.needle_recall": lambda: {**LM, "task": "s-niah-1", "length": 200, "examples": 1},
    "evaluation.perplexity_by_length": lambda: {"model": model(), "documents": [[1, 2, 3] * 8], "lengths": [8]},
    "evaluation.recall_accuracy": lambda: {
        "model": model(), "task": make_task("mqar", pairs=4, vocab_size=32), "seed": 0, "examples": 2,
    },
    "evaluation.regression_errors": lambda: {"model": vectors(), "task": regression(), "seed": 0, "examples": 2},
    "evaluation.ruler_recall": lambda: {**LM, "task": "vt", "length": 400, "examples": 1},
    "evaluation.word_recall": lambda: {**LM, "task": "copy", "length": 40, "pairs": 2, "symbols": 16, "examples": 1},
    "evaluation.word_tokens": lambda: {"tokenizer": tokenizer(), "count": 4},
    "integrations.transformers.accelerate": dict,
    "integrations.transformers.restore": dict,
    "layers.MixerChoice": lambda: {"name": "gdn", "options": {"conv_size": 2}, "label": "small"},
    "layers.MixerSpec": lambda: fields(MIXERS["gdn"]),
    "layers.build_mixer": lambda: {"name": "gdn", **SIZES},
    "layers.in_block": lambda: {"choice": MixerChoice("gdn"), "block": "matched", "heads": 2},
    "layers.import_mixers": lambda: {"modules": ["math"]},
    "layers.parse_mixers": lambda: {"text": "gdn"},
    "layers.register_mixer": lambda: {
        "name": "of-a-test", "summary": "s", "equation": "e", "source": "s", "state": "s",
    },
    "models.hybrid.keep_layers": lambda: {"keep": "none", "layers": 4},
    "models.hybrid.linearize": lambda: {"teacher": distillation.pair()[1], "to": "gdn"},
    "conversion.LinearizationReport": lambda: {
        "to": "gdn", "converted": (0,), "kept": (), "parameters": 1, "new_parameters": 1, "state": {}, "first_values": [],
        "check": conversion.LogitsCheck(tokens=1, largest_logit=1.0, neutral=None, saved=0.0), "tokenizer": [],
        "output": Path("out"),
    },
    "conversion.linearize_folder": lambda: {"source": saved_teacher(), "output": "new", "to": "gdn", "tokens": 8},
    "models.FastWeightsCache": lambda: {"layers": [LayerCache()]},
    "models.FastWeightsForCausalLM": lambda: {"config": small_config()},
    "models.FastWeightsForQuestionAnswering": lambda: {"config": small_config()},
    "models.FastWeightsForSequenceClassification": lambda: {"config": small_config()},
    "models.FastWeightsForTokenClassification": lambda: {"config": small_config()},
    "models.FastWeightsModel": lambda: {"config": small_config()},
    "models.VectorModel": lambda: {"config": small_config(), "inputs": 3, "outputs": 1},
    "models.presets.Preset": lambda: fields(next(iter(fastweights.models.PRESETS.values()))),
    "models.preset": lambda: {"name": "gdn-340m"},
    "models.presets.with_mixer": lambda: {"name": "gdn-340m", "choice": MixerChoice("gdn")},
    "results.HarnessScore": lambda: {"task": "arc", "metric": "acc", "value": 0.5},
    "results.SuiteScores": lambda: {"source": "ruler", "size": "", "model": "GDN", "values": {"vt/4096": 1.0}, "average": 1.0},
    "results.LanguageResult": lambda: fields(TRAINED),
    "results.Distillation": lambda: {
        "held_out_kl": 0.5, "held_out_tokens": 8, "kl_tokens": [8], "kls": [0.5],
        "teacher": ModelMeasures(**MEASURED), "student": ModelMeasures(**MEASURED),
        "settings": {}, "versions": {}, "machine": {},
    },
    "results.LayerGain": lambda: {"layer": 0, "kl_with_it_kept": 0.5, "gain": 0.1, "rank": 1},
    "results.LayerRanking": lambda: {
        "base_kl": 0.6, "rows": 1, "tokens": 8, "settings": {}, "fingerprint": "0", "layers": [], "missing": [0],
    },
    "results.ModelMeasures": lambda: {**MEASURED},
    "results.LengthPerplexity": lambda: {**SEEN},
    "results.NeedleRecall": lambda: {"task": "s-niah-1", "depth": 0.5, **ANSWERED},
    "results.RecallResult": lambda: fields(made_up()),
    "results.RecallSummary": lambda: fields(fastweights.analysis.summarize(results())[0]),
    "results.RulerRecall": lambda: {"task": "vt", **ANSWERED},
    "results.WordRecall": lambda: {
        "task": "copy", "length": 8, "pairs": 2, "symbols": 4, "examples": 1, "accuracy": 0.5, "chance": 0.1,
    },
    "results.load_results": lambda: {"path": written()},
    "results.save_results": lambda: {"path": Path("results.json"), "experiment": {}, "results": results()},
    "results.still_falling": lambda: {"steps": [1, 2], "losses": [2.0, 1.0], "learning": [1.0, 1.0]},
    "results.summarize": lambda: {"results": results()},
    "results.undertrained": lambda: {"steps": [1, 2], "losses": [2.0, 1.0], "learning": [1.0, 1.0]},
    "testing.Agreement": lambda: {"differences": (0.1,), "tokens": (1,), "compared": 1},
    "testing.check_agreement": lambda: {"model": model(), "server": lambda asked: [[-5.0]], "prompts": [[0, 1]]},
    "testing.check_mixer": lambda: {"layer": build_mixer("linear", **SIZES), "hidden_size": 16, "length": 8},
    "training.recall.RecallExperiment": lambda: fields(experiment()),
    "training.recall.RecallFile": dict,
    "training.recall.RecallRun": lambda: fields(run()),
    "training.recall.Stage": lambda: {"pairs": 4, "steps": 2},
    "training.ParameterGroup": lambda: {"parameters": ("*",)},
    "training.learning_rate_factor": lambda: {"step": 1, "steps": 10, "warmup_steps": 2, "final": 0.1},
    "training.recall.load_recall_file": lambda: {"path": run_file("steps = 3\n")},
    "training.recall.run_recall": lambda: {"experiment": experiment(), "output": "out", "workers": 1},
    "training.recall.run_recall_parts": lambda: {"parts": {"": experiment()}, "outputs": {"": "out"}, "workers": 1},
    "training.recall.train_run": lambda: {"run": run(), "checkpoint": Path("a.checkpoint")},
    "training.undecayed_parameters": lambda: {"model": model()},
    "training.weight_decay_groups": lambda: {"model": model(), "weight_decay": 0.1},
    "training.language.BatchStage": lambda: {"batch_size": 2, "steps": 1},
    "training.language.LanguageRun": dict,
    "training.language.load_run": lambda: {"path": run_file("max_steps = 3\n")},
    "training.language.tiny_run": lambda: {"run": LanguageRun()},
    "training.language.train_language": lambda: {"run": LanguageRun(corpus=TextCorpus(paths=("missing",)))},
}  # fmt: skip
for _name in (
    "MQAR",
    "Copy",
    "Palindrome",
    "SelectiveCopy",
    "ShuffledMQAR",
    "OutOfDistributionMQAR",
    "OutOfDistributionShuffledMQAR",
):
    CALLS[f"data.{_name}"] = lambda: {**TASK}
for _name, _made in public().items():
    if isinstance(_made, type) and issubclass(_made, Mixer | MixerOptions) and _made is not Mixer:
        CALLS[_name] = lambda: {**SIZES}
    elif _made.__module__.startswith("fastweights.ops"):
        WITHOUT[_name] = OPS
for _name in ("S3", "S5", "Parity"):
    CALLS[f"data.{_name}"] = lambda: {"pairs": 4, "vocab_size": 256}


def run() -> RecallRun:
    return experiment().runs()[0]


def written() -> Path:
    fastweights.results.save_results(Path("results.json"), experiment={}, results=results())
    return Path("results.json")


def run_file(text: str) -> str:
    Path("run.toml").write_text(text)
    return "run.toml"


@cache
def small_config() -> FastWeightsConfig:
    return FastWeightsConfig(vocab_size=32, num_hidden_layers=1, **SIZES)


@cache
def vectors() -> Any:
    return fastweights.models.VectorModel(small_config(), inputs=9, outputs=1).eval()


def regression() -> LinearRegression:
    return LinearRegression(pairs=4)
