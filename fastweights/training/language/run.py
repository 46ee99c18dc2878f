"""The configuration of a training of language models: frozen, checked when created."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...checks import (
    LARGEST_COUNT,
    check_choice,
    check_flag,
    check_list,
    check_path,
    check_positive,
    check_size,
    check_text,
    check_texts,
    check_unicode,
    check_whole_number,
    describe_value,
    error_prefix,
)
from ...data.text import TextCorpus, TextTokenizer
from ...files import file_name
from ...layers import MixerChoice
from ...models.presets import with_mixer
from ..optimization import check_optimization

__all__ = ["LanguageRun"]

SIZES = (
    *("length", "batch_size", "accumulation", "max_steps"),
    *("log_every", "evaluation_rows", "checkpoint_every", "keep_checkpoints", "context_texts"),
)
TRACKERS = ("wandb", "trackio", "tensorboard")
# Beyond these the rows of a step would fill the memory, or a training would never end.
LARGEST = {"length": 2**24, "batch_size": 2**20, "accumulation": 2**20, "max_steps": 10**9}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageRun:
    """One training, or one for each of `mixers`, of a causal language model on text.

    Each process reads `length * batch_size * accumulation` tokens per step. Data order depends on seed and step alone, and
    two processes at batch_size b read the same tokens as one at 2 b.

    Attributes:
        output: folder for checkpoints, logs, results, plots and the model.
        model: fields of `FastWeightsConfig`; or {"preset": name} with changes to it; or {"path": folder} of a model or
            a training to continue from, with {"mixer": entry} as another memory (`fastweights.conversion`), or without.
            vocab_size is the tokenizer's where it is not given.
        mixers: train one model with each of these in every layer, and compare them; () trains `model` as it is. Each is a name, a
            text with options and a label such as "gka:ridge=0.01@a" (`fastweights.layers.parse_mixers`), a table with name,
            options and label, or a `MixerChoice`. Options of a preset's mixer hold for those that have them, and layers of
            softmax attention in a preset's hybrid stay.
        label: what tables, plots and progress call the model; its mixer, or "hybrid", where it is "".
        corpus: the text. Files in the folders output and cache are left out.
        tokenizer: the tokenizer; with {"path": folder} as model, the one in that folder, or its path where there is none.
        cache: folder where tokens are kept for later runs.
        length: tokens of a row; documents are packed into rows and do not see each other.
        batch_size: rows that a process reads at a time.
        accumulation: forward and backward passes before each step.
        max_steps: optimizer steps.
        learning_rate: the peak.
        warmup_fraction: part of max_steps over which the learning rate rises to its peak.
        warmup_start: the learning rate at the first step, as a part of the peak; 0 for the first of equal parts. Preconditioned
            DeltaNet's models were trained with 0.1.
        final_fraction: the learning rate at the end, as a part of the peak (cosine decay in between).
        weight_decay: AdamW's; norms, biases and decay parameters are left out.
        beta1, beta2: AdamW's.
        max_gradient_norm: the gradient is scaled down to this norm where it is larger.
        precision: "no" (float32), "bf16" or "fp16" (on a GPU) mixed precision.
        gradient_checkpointing: compute activations twice instead of keeping them.
        compile: what torch.compile compiles: "blocks" each block of layers, which starts sooner; True the whole model; False
            nothing. None is "blocks" on a GPU and False without one. With fsdp it must not be True. Losses differ by rounding.
            The held-out loss is computed without compiled code: its rows, fewer in their last batch, would be compiled for
            themselves.
        graphs: replay forward and backward as a CUDA graph: launching their kernels takes the host longer than they run. The
            graph keeps the memory of a step. True ends the training with a ValueError where its fourth batch cannot be captured,
            as where a layer waits for the GPU to read the lengths of documents. None captures with one process, a GPU, no fp16
            and no gradient_checkpointing; where that fails, a warning says why, and the training continues without.
        fsdp: shard parameters, gradients and optimizer over the processes (FSDP2) instead of copying them (DDP).
        reshard_after_forward: with fsdp, free the gathered parameters of a block after its forward, and gather them again for its
            backward. False keeps them: parameters are gathered once per pass, and the GPU holds all of them between the two.
        forward_prefetch: with fsdp, how many modules ahead of the one that computes start to gather their parameters in the
            forward; 0 for none.
        seed: of first weights and data order.
        log_every: steps between two points of the loss curve. Each is the mean over the steps in between.
        evaluate_every: steps between two measurements of the held-out loss, 0 for one at the end.
        evaluation_rows: how many rows of held-out text are read at most, always the same ones.
        checkpoint_every: steps between two checkpoints.
        keep_checkpoints: how many of the latest are kept.
        context_lengths: held-out perplexity is measured at these at the end; () for none.
        context_texts: number of texts in these measurements.
        prompt: a text that the trained model continues at the end; "" for none.
        tensorboard: write a TensorBoard log too, in the folder tensorboard of the output.
        report_to: "wandb", "trackio" or "tensorboard", or several of them. transformers' Trainer sends its points to the first
            two, which read their own settings from environment variables; "tensorboard" is as tensorboard = true.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    output: str = "runs/train"
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixers: tuple[str | MixerChoice, ...] = ()
    label: str = ""
    corpus: TextCorpus = TextCorpus()
    tokenizer: TextTokenizer = TextTokenizer()
    cache: str = "runs/tokens"
    length: int = 1024
    batch_size: int = 8
    accumulation: int = 1
    max_steps: int = 1000
    learning_rate: float = 1e-3
    warmup_fraction: float = 0.05
    warmup_start: float = 0.0
    final_fraction: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    max_gradient_norm: float = 1.0
    precision: str = "no"
    gradient_checkpointing: bool = False
    compile: bool | str | None = None
    graphs: bool | None = None
    fsdp: bool = False
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    seed: int = 0
    log_every: int = 10
    evaluate_every: int = 0
    evaluation_rows: int = 256
    checkpoint_every: int = 500
    keep_checkpoints: int = 2
    context_lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    context_texts: int = 16
    prompt: str = ""
    tensorboard: bool = False
    report_to: str | tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in SIZES:
            object.__setattr__(self, name, check_size(name, getattr(self, name), high=LARGEST.get(name, LARGEST_COUNT)))
        for name, largest in (
            ("evaluate_every", LARGEST_COUNT),
            ("forward_prefetch", LARGEST_COUNT),
            ("seed", 2**32 - 1),
        ):
            object.__setattr__(self, name, check_whole_number(name, getattr(self, name), high=largest))
        if self.length < 2:
            raise ValueError(
                f"length must be at least 2 tokens, of which the first predicts the next, got {self.length}"
            )
        check_positive("learning_rate", self.learning_rate)
        check_optimization(self)
        for name in ("gradient_checkpointing", "fsdp", "reshard_after_forward", "tensorboard"):
            check_flag(name, getattr(self, name))
        check_choice("precision", self.precision, ("no", "bf16", "fp16"))
        self._check_sharding()
        self._check_compile()
        self._check_graphs()
        for name in ("output", "cache"):
            check_path(name, check_text(name, getattr(self, name), what="the path of a folder"), "the path of a folder")
        check_unicode("prompt", self.prompt)
        check_unicode("label", self.label)
        mixers = check_list("mixers", self.mixers, "names of mixers")
        with error_prefix("mixers"):
            object.__setattr__(self, "mixers", tuple(MixerChoice.of(mixer).short for mixer in mixers))
        self._check_model()
        for name, made in (("corpus", TextCorpus), ("tokenizer", TextTokenizer)):
            if not isinstance(getattr(self, name), made):
                got = getattr(self, name)
                raise TypeError(f"{name} must be a {made.__name__}, a table in a run file, got {describe_value(got)}")
        trackers = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        object.__setattr__(self, "report_to", check_texts("report_to", trackers, what="names of trackers"))
        for tracker in self.report_to:
            check_choice("report_to", tracker, TRACKERS)
        lengths = check_list("context_lengths", self.context_lengths, "whole numbers")
        lengths = tuple(check_whole_number("context_lengths", length, low=2) for length in lengths)
        object.__setattr__(self, "context_lengths", lengths)
        labels = [MixerChoice.of(mixer).label for mixer in self.mixers]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"mixers must be different from each other, got {', '.join(labels)}; give one of them another label, NAME@LABEL"
            )

    @property
    def writes_tensorboard(self) -> bool:
        """Whether there is a TensorBoard log."""
        return self.tensorboard or "tensorboard" in self.report_to

    @property
    def trackers(self) -> list[str]:
        """The trackers that transformers' Trainer reports to."""
        return [tracker for tracker in self.report_to if tracker != "tensorboard"]

    def _check_sharding(self) -> None:
        if not self.fsdp and (self.forward_prefetch or not self.reshard_after_forward):
            raise ValueError(
                "reshard_after_forward must be True and forward_prefetch 0 without fsdp, which alone gathers parameters, got "
                f"{self.reshard_after_forward} and {self.forward_prefetch}; set fsdp = true, or leave them out"
            )

    def _check_compile(self) -> None:
        if not (self.compile is None or isinstance(self.compile, bool) or self.compile == "blocks"):
            kind = ValueError if isinstance(self.compile, str) else TypeError
            raise kind(f'compile must be "blocks", True, False or None, got {describe_value(self.compile)}')
        if self.fsdp and self.compile is True:
            raise ValueError(
                'compile must not be True with fsdp, which gathers the parameters of one block at a time; choose "blocks"'
            )

    def _check_graphs(self) -> None:
        if self.graphs is not None:
            check_flag("graphs", self.graphs)
        refused = {
            "fsdp": self.fsdp,
            "fp16": self.precision == "fp16",
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        if self.graphs and any(refused.values()):
            names = " and ".join(name for name, given in refused.items() if given)
            raise ValueError(f"graphs must be False or None with {names}, of which no CUDA graph is made")

    def _check_model(self) -> None:
        if not isinstance(self.model, Mapping) or not all(isinstance(key, str) for key in self.model):
            raise TypeError(
                f"model must be a table of FastWeightsConfig fields, preset or path, got {describe_value(self.model)}"
            )
        if "path" in self.model and (set(self.model) - {"path", "mixer"} or self.mixers):
            raise ValueError(
                "model must have nothing beside path but mixer, and mixers must be empty: a trained model's sizes stay as they "
                f"are, got {', '.join(sorted(self.model))} and mixers {list(self.mixers)}"
            )
        if self.mixers and "mixer" in self.model:
            raise ValueError("model must have no mixer where mixers are given; drop one of the two")

    def models(self) -> list[LanguageRun]:
        """One run per model: the run itself, or one per mixer, each in its own folder within `output`."""
        if not self.mixers:
            return [self]
        preset = self.model.get("preset")
        return [
            dataclasses.replace(
                self,
                mixers=(),
                model={**({"mixer": choice.entry} if preset is None else with_mixer(preset, choice)), **self.model},
                label=choice.label,
                output=f"{self.output.rstrip('/')}/{file_name(choice.label)}",
            )
            for choice in map(MixerChoice.of, self.mixers)
        ]
