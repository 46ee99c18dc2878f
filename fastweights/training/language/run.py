"""The configuration of a training of language models: frozen, checked when created."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

from ...checks import (
    LARGEST_COUNT,
    check_choice,
    check_flag,
    check_list,
    check_path,
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
from ...ops.context_parallel.group import WAYS
from .choices import split_preset
from .schedule import Schedule
from .stages import split_into_stages

__all__ = ["LanguageRun", "Run"]

SIZES = ("log_every", "evaluation_rows", "checkpoint_every", "keep_checkpoints", "context_texts")
TRACKERS = ("wandb", "trackio", "tensorboard")
UNSHARDED = ("muon", "adafactor")  # optimizers whose step needs whole matrices
BESIDE_PATH = {"path", "mixer", "options"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageRun(Schedule):
    """One training, or one for each of `mixers` or `presets`, of a causal language model on text.

    Each process, or group of `context_parallel` processes, reads `length * batch_size * accumulation` tokens per step. Data order
    depends on seed and step alone, and two processes at batch_size b read the same tokens as one at 2 b. A number of tokens is a
    whole number or a text such as "15B" (K, M, B, T: 10^3, 10^6, 10^9, 10^12).

    Attributes:
        output: folder for checkpoints, logs, results, plots and the model.
        model: fields of `FastWeightsConfig`; or {"preset": name} with changes to it; or {"path": folder} of a model or
            a training to continue from. vocab_size is the tokenizer's where it is not given. Beside path, "mixer" (a name, or
            {"name": ..., option: ...}) converts the layers that continue as this mixer (`fastweights.conversion.convert`), and
            "options" ({mixer: {option: value}}) sets options of layers whose weights keep their shapes, such as rope_theta.
        mixers: train one model with each of these in every layer, and compare them; () trains `model` as it is. Each is a name, a
            text with options and a label such as "gka:ridge=0.01@a" (`fastweights.layers.parse_mixers`), a table with name,
            options and label, or a `MixerChoice`. Options of a preset's mixer hold for those that have them, and layers of
            softmax attention in a preset's hybrid stay.
        presets: train each of these models, and compare them; () trains `model`. Each is the name of a preset
            (`fastweights.models.PRESETS`), or a table with its name, a label and changes to it (fields of `FastWeightsConfig`).
            Fields of `model` are changes to all of them.
        label: what tables, plots and progress call the model; its mixer, or "hybrid", where it is "".
        corpus: the text. Files in the folders output and cache are left out.
        tokenizer: the tokenizer; with {"path": folder} as model, the one in that folder, or its path where there is none.
        cache: folder where tokens are kept for later runs.
        length: tokens of a row; documents are packed into rows and do not see each other.
        batch_size: rows that a process, or a group of context_parallel processes, reads at a time.
        accumulation: forward and backward passes before each step.
        context_parallel: how many neighbouring processes divide the tokens of their rows among them (a context group), so that
            each keeps the activations of its part alone. It divides the number of processes. Losses are those of one process.
        context_way: how memories work on rows that are divided: "heads" exchanges heads for tokens, "state" passes states on,
            which not every rule can, and "auto" takes for each op the one that is expected to take less time.
        batch_ramp: the first steps, with batches of other sizes, as `BatchStage`: batch_size, and steps or tokens.
        max_steps: optimizer steps.
        max_tokens: in place of max_steps, the tokens that all steps together read. A training has the fewest steps that read at
            least so many, so that it reads less than one step more.
        learning_rate: the peak.
        warmup_fraction: part of the steps over which the learning rate rises to its peak.
        warmup_steps, warmup_tokens: in place of warmup_fraction, the steps of the warm-up, or the tokens that they read (the
            fewest steps that read at least so many).
        warmup_start: the learning rate at the first step, as a part of the peak; 0 for the first of equal parts. Preconditioned
            DeltaNet's models were trained with 0.1.
        schedule: of the learning rate after the warm-up: "cosine" or "linear" decay, "wsd" (warmup-stable-decay: constant up to a
            decay over the last part of the steps) or "constant".
        schedule_tokens: the tokens after which the schedule reaches its end, where that is not the end of the training: a
            checkpoint at 28B of 30B tokens has max_tokens "28B" and schedule_tokens "30B". None for the end of the training.
        decay_fraction, decay_shape: of "wsd": the part of the steps that it decays over, and how: "linear", "cosine" or "sqrt"
            (1 - sqrt(p) after the part p).
        final_fraction: the learning rate at the end of the schedule, as a part of the peak.
        final_learning_rate: in place of final_fraction, that rate itself.
        optimizer: "adamw"; "muon", for the linear layers of the blocks, with AdamW for all else; or "adafactor". Of torch. The
            last two need whole matrices and are refused with fsdp.
        optimizer_options: further arguments of the optimizer's class in torch.optim, such as {"momentum": 0.9} of Muon.
        weight_decay: of the optimizer; norms, biases and decay parameters are left out.
        groups: parameters with a weight decay or a learning rate of their own, as `ParameterGroup`: parameters (names or
            patterns), weight_decay, learning_rate.
        beta1, beta2: AdamW's.
        max_gradient_norm: the gradient is scaled down to this norm where it is larger.
        precision: "no" (float32), "bf16" or "fp16" (on a GPU) mixed precision.
        gradient_checkpointing: compute activations twice instead of keeping them.
        compile: what torch.compile compiles: "blocks" each block of layers, which starts sooner; True the whole model; False
            nothing. None is "blocks" on a GPU and False without one. With fsdp it must not be True. Losses differ by rounding.
            The held-out loss is computed without compiled code: its rows, fewer in their last batch, would be compiled for
            themselves.
        graphs: replay forward and backward as a CUDA graph: launching their kernels takes the host longer than they run. In
            several processes the exchange of gradients and of sharded parameters is part of the graph. The graph keeps the
            memory of a step. True ends the training with a ValueError where its first graph cannot be made, as where a layer
            waits for the GPU to read the lengths of documents. None captures with a GPU, no fp16, no gradient_checkpointing, and
            with fsdp one pass per step; where that fails, a warning says why, and the training continues without.
        fsdp: shard parameters, gradients and optimizer over the processes (FSDP2) instead of copying them (DDP). None
            shards them where copies might not fit into a GPU, by the estimate of `--dry-run`.
            A training continues with it or without.
        reshard_after_forward: with fsdp, free the gathered parameters of a block after its forward, and gather them again for its
            backward. False keeps them: parameters are gathered once per pass, and the GPU holds all of them between the two.
        forward_prefetch: with fsdp, how many modules ahead of the one that computes start to gather their parameters in the
            forward; 0 for none.
        reduce_dtype: in which several processes add up their gradients: "float32", or with precision "bf16" also "bfloat16",
            which halves the bytes sent and rounds the sums. Parameters, clipping and the optimizer stay in float32.
        seed: of first weights and data order.
        seed_by_name: whether the first values of each module depend on the seed and its name alone. Models that differ in their
            mixers then begin alike outside these, and their differences are paired by the seed. A model that is continued keeps
            its weights.
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
        train: names of the parameters that learn, or patterns of names such as "*.mixer.*". All others keep their first values.
            () for all.
        keep_optimizer: begin with the moments of the optimizer from the last checkpoint of the training whose folder `model`
            names as path. Rates and decays are those of this run. False begins without moments.
        stages: trainings that follow each other, each on the model of the one before: tables of fields that differ from
            those of the run, and a `name`, the folder of the stage in `output` ("stage1", ... where it is not given). A
            stage's `corpus` has the fields that differ, its `model` the keys that may stand beside path. Where text and length
            are those of earlier stages, a stage reads on where they stopped.
        stage: the name of the stage, in the runs of single stages; left out otherwise.

    Raises:
        ValueError: a value that does not fit.
        TypeError: a value of a wrong kind.
    """

    COMMAND: ClassVar[str] = "train"  # which takes such runs
    output: str = "runs/train"
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    mixers: tuple[str | MixerChoice, ...] = ()
    presets: tuple[str | Mapping[str, Any], ...] = ()
    label: str = ""
    corpus: TextCorpus = TextCorpus()
    tokenizer: TextTokenizer = TextTokenizer()
    cache: str = "runs/tokens"
    precision: str = "no"
    context_way: str = "auto"
    gradient_checkpointing: bool = False
    compile: bool | str | None = None
    graphs: bool | None = None
    fsdp: bool | None = None
    reshard_after_forward: bool = True
    forward_prefetch: int = 0
    reduce_dtype: str = "float32"
    seed: int = 0
    seed_by_name: bool = False
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
    train: tuple[str, ...] = ()
    keep_optimizer: bool = False
    stages: tuple[Mapping[str, Any], ...] = ()
    stage: str = ""

    def __post_init__(self) -> None:
        for name in SIZES:
            object.__setattr__(self, name, check_size(name, getattr(self, name), high=LARGEST_COUNT))
        for name, largest in (
            ("evaluate_every", LARGEST_COUNT),
            ("forward_prefetch", LARGEST_COUNT),
            ("seed", 2**32 - 1),
        ):
            object.__setattr__(self, name, check_whole_number(name, getattr(self, name), high=largest))
        self.check_schedule()
        for name in (
            "gradient_checkpointing",
            "reshard_after_forward",
            "tensorboard",
            "keep_optimizer",
            "seed_by_name",
        ):
            check_flag(name, getattr(self, name))
        check_choice("precision", self.precision, ("no", "bf16", "fp16"))
        check_choice("context_way", self.context_way, WAYS)
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
        object.__setattr__(self, "presets", check_list("presets", self.presets, "names of presets"))
        self._check_model()
        for name, made in (("corpus", TextCorpus), ("tokenizer", TextTokenizer)):
            if not isinstance(getattr(self, name), made):
                got = getattr(self, name)
                raise TypeError(f"{name} must be a {made.__name__}, a table in a run file, got {describe_value(got)}")
        trackers = (self.report_to,) if isinstance(self.report_to, str) else self.report_to
        object.__setattr__(self, "report_to", check_texts("report_to", trackers, what="names of trackers"))
        for tracker in self.report_to:
            check_choice("report_to", tracker, TRACKERS)
        names = check_texts("train", self.train, what="names of parameters", empty=False)
        object.__setattr__(self, "train", names)
        lengths = check_list("context_lengths", self.context_lengths, "whole numbers")
        lengths = tuple(check_whole_number("context_lengths", length, low=2) for length in lengths)
        object.__setattr__(self, "context_lengths", lengths)
        labels = [label for label, _ in self._choices()]
        if len(set(labels)) < len(labels):
            raise ValueError(
                f"{'presets' if self.presets else 'mixers'} must be different from each other, got {', '.join(labels)}; give "
                'one of them another label, {name = "NAME", label = "LABEL"}, or NAME@LABEL for a mixer'
            )
        object.__setattr__(self, "stages", check_list("stages", self.stages, "tables of fields", Mapping))
        check_text("stage", self.stage)
        if self.stages:  # to check their fields
            _ = self.models() if self.mixers or self.presets else self.stage_runs()

    @property
    def writes_tensorboard(self) -> bool:
        """Whether there is a TensorBoard log."""
        return self.tensorboard or "tensorboard" in self.report_to

    def trained_parameters(self, model: Any) -> tuple[str, ...]:
        """Names or patterns of the parameters of `model` that learn, () for all."""
        return self.train

    def models_read(self) -> tuple[str, ...]:
        """The folders of the models that the training begins with."""
        return (str(self.model["path"]),) if "path" in self.model else ()

    def fingerprints(self) -> dict[str, str]:
        """What run.json keeps of what the training reads, beside text and tokenizer."""
        return {}

    def memory_beside(self, processes: int = 1) -> dict[str, float]:
        """Bytes per process of what stands beside the model, by what it is."""
        return {}

    @property
    def settings_without_graphs(self) -> list[str]:
        """Those of this run with which no step is captured as a CUDA graph, in words."""
        settings = {
            # Between the passes of a step FSDP2 keeps gradients where no graph finds them.
            "fsdp and an accumulation above 1": self.fsdp and self.accumulation > 1,
            "fp16": self.precision == "fp16",
            "gradient_checkpointing": self.gradient_checkpointing,
        }
        return [name for name, given in settings.items() if given]

    @property
    def trackers(self) -> list[str]:
        """The trackers that transformers' Trainer reports to."""
        return [tracker for tracker in self.report_to if tracker != "tensorboard"]

    def _check_sharding(self) -> None:
        if self.fsdp is not None:
            check_flag("fsdp", self.fsdp)
        if not self.fsdp and (self.forward_prefetch or not self.reshard_after_forward):
            raise ValueError(
                "reshard_after_forward must be True and forward_prefetch 0 without fsdp, which alone gathers parameters, got "
                f"{self.reshard_after_forward} and {self.forward_prefetch}; set fsdp = true, or leave them out"
            )
        check_choice("reduce_dtype", self.reduce_dtype, ("float32", "bfloat16"))
        if self.reduce_dtype == "bfloat16" and self.precision != "bf16":
            raise ValueError(
                f'reduce_dtype must be "float32" with precision "{self.precision}", whose gradients are not those of bfloat16; '
                'set precision = "bf16", or leave it out'
            )
        if self.fsdp and self.optimizer in UNSHARDED:
            raise ValueError(
                f'optimizer must be "adamw" with fsdp, got "{self.optimizer}", whose step needs whole matrices; choose "adamw", '
                "or set fsdp = false"
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
        if self.graphs and self.settings_without_graphs:
            names = " and ".join(self.settings_without_graphs)
            raise ValueError(f"graphs must be False or None with {names}, of which no CUDA graph is made")

    def _check_model(self) -> None:
        if not isinstance(self.model, Mapping) or not all(isinstance(key, str) for key in self.model):
            raise TypeError(
                f"model must be a table of FastWeightsConfig fields, preset or path, got {describe_value(self.model)}"
            )
        if "path" in self.model and (self.model.keys() - BESIDE_PATH or self.mixers):
            raise ValueError(
                "model must have nothing beside path but mixer and options, and mixers must be empty: a trained model's sizes "
                f"stay as they are, got {', '.join(sorted(self.model))} and mixers {list(self.mixers)}"
            )
        if self.keep_optimizer and ("path" not in self.model or "mixer" in self.model):
            raise ValueError(
                "keep_optimizer must be false unless model has a path and no mixer: only a model with the same parameters can "
                "take the optimizer's moments; set it to false"
            )
        if self.mixers and "mixer" in self.model:
            raise ValueError("model must have no mixer where mixers are given; drop one of the two")
        refused = sorted({"preset", "path", "mixer"} & self.model.keys()) + ["mixers"] * bool(self.mixers)
        if self.presets and refused:
            raise ValueError(
                f"presets must be () beside {' and '.join(refused)}, which name models too; drop one of the two"
            )

    def models(self) -> list[LanguageRun]:
        """One run per model: the run itself, or one per mixer or preset, each in its own folder within `output`."""
        return [
            dataclasses.replace(
                self,
                mixers=(),
                presets=(),
                model=model,
                label=label,
                output=f"{self.output.rstrip('/')}/{file_name(label)}",
            )
            for label, model in self._choices()
        ] or [self]

    def _choices(self) -> list[tuple[str, dict[str, Any]]]:
        """Label and `model` of each of the mixers or presets."""
        if self.presets:
            return [(label, {**self.model, **fields}) for label, fields in map(split_preset, self.presets)]
        preset, choices = self.model.get("preset"), [MixerChoice.of(mixer) for mixer in self.mixers]
        return [
            (
                choice.label,
                {**({"mixer": choice.entry} if preset is None else with_mixer(preset, choice)), **self.model},
            )
            for choice in choices
        ]

    def stage_runs(self) -> list[LanguageRun]:
        """One run per stage, each in its own folder within `output`; the run itself where there are no stages."""
        return split_into_stages(self) if self.stages else [self]


Run = TypeVar("Run", bound=LanguageRun)
