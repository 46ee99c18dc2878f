"""transformers' Trainer for packed rows of text: its data order, optimizer, schedule, held-out loss and checkpoints."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import prepare_data_loader
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from ...cuda_graphs import capturing_stream
from ...data.text import PackedRows, PreparedText, TokenShards, pack_rows
from ...data.text.packing import ShuffledRows
from ...evaluation.reading import evaluating
from ...files import partial_path, publish_folder, write_json
from ...models import FastWeightsForCausalLM
from ...models.card import write_card
from ...models.loading import SAVED_MODEL
from ...private_huggingface import TrainerHooks, use_one_gpu
from ...untrusted import read_json_object
from ..checkpoints import loading, saving
from ..optimization import WeightDecayMixin
from .background import BackgroundCheckpoints
from .callbacks import BeforeTraining, check_finite
from .compiling import compile_model, mark_document_count_dynamic, what_to_compile
from .context import ContextGroups
from .folder import LanguageFolder
from .graphs import WARM_DDP, GraphedGradients, what_to_graph
from .optimizers import build_optimizer
from .processes import from_main_process, world_size
from .reducing import reduce_in_bfloat16
from .rows import DataStart, find_start, load_rows, save_rows, training_rows
from .run import LanguageRun
from .sharded_checkpoints import load_moments, load_weights
from .sharding import ForwardPrefetch, autocast_policy, cast_to_float32, fsdp_config

__all__ = ["LanguageTrainer", "held_out_rows", "held_out_sample"]

HELD_OUT_SEED = 0  # which held-out rows are read does not depend on the run
COUNTED = "num_items_in_batch"  # predicted tokens of a step, by which transformers' Trainer divides its losses
SCHEDULE = "scheduler.pt"  # transformers' name for the state of the schedule
BUCKETS = 16  # of gradients, each of which DDP reduces at a time: fewer kernels of NCCL beside those of the backward
SMALL_BUCKET = 25  # MB, torch's own size
OPEN_LOSS = "open_loss.json"  # in a checkpoint: the losses since the last point of the loss curve


class LanguageTrainer(WeightDecayMixin, TrainerHooks, Trainer):
    """Trains `model` as `run` says. `text` are the tokens, `folder` is where checkpoints go, `earlier` is a checkpoint of
    another training whose optimizer's moments this one begins with, `start` is what `find_start` returned, if it was asked."""

    model: Any
    optimizer: Any

    def __init__(
        self,
        run: LanguageRun,
        model: torch.nn.Module,
        text: PreparedText,
        folder: LanguageFolder,
        callbacks: list[TrainerCallback],
        earlier: Path | None = None,
        start: DataStart | None = None,
    ) -> None:
        self.run, self.folder = run, folder
        self.measured: tuple[str, ...] = ("eval_loss",)  # on held-out text, in transformers' words
        self._staging: Path | None = None
        self.checkpoints = BackgroundCheckpoints(folder.checkpoints, run.keep_checkpoints)
        self.plan, self.groups = run.plan(world_size()), ContextGroups.of(run)
        self.held_out = held_out_sample(run, text)
        self.start = find_start(run, text) if start is None else start
        self.rows = training_rows(run, text, self.start, count=self.plan.rows(self.plan.steps))
        super().__init__(
            model,
            training_arguments(run, folder.checkpoints, self.blocks_of(model), bucket_size(model)),
            data_collator=pack_rows,
            train_dataset=self.rows,
            eval_dataset=self.held_out,
            processing_class=text.tokenizer,
            callbacks=callbacks,
        )
        # Gradients are then once in memory. Over several passes a graph adds them up elsewhere.
        self.accelerator.ddp_handler.gradient_as_bucket_view = run.accumulation == 1
        self.remove_callback(PrinterCallback)
        self.add_callback(self.checkpoints)
        if earlier is not None:
            self.add_callback(BeforeTraining(partial(self.load_moments, earlier)))
        if run.reduce_dtype == "bfloat16" and not run.fsdp:
            self.add_callback(BeforeTraining(lambda: reduce_in_bfloat16(self.model_wrapped)))
        if run.forward_prefetch:
            self.add_callback(ForwardPrefetch(run.forward_prefetch))
        self._sharded_bf16 = run.fsdp and run.precision == "bf16"
        if self._sharded_bf16:
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = autocast_policy(run.reduce_dtype)
            # With tied weights FSDP2 gathers embedding and output layer together, and may cast the output of the latter alone.
            self.model.get_input_embeddings().register_forward_hook(cast_to_float32)
        self.groups.divide(self.model)
        self._compiled = what_to_compile(run)
        compile_model(self.model, self._compiled, run.cache, self.blocks_of(self.model))
        self._graphed: GraphedGradients | None = None
        self._replays = what_to_graph(run)
        if self._replays:
            self.add_callback(BeforeTraining(self._begin_graphs))
        # transformers forgets its own sum of losses at every checkpoint; a point of the curve would depend on where it is.
        self._losses = torch.zeros((), dtype=torch.float64, device=self.args.device)
        self._last_point = 0  # step

    def blocks_of(self, model: Any) -> list[torch.nn.Module]:
        """The modules of the model that are compiled, and sharded by FSDP2, one by one."""
        return list(model.model.layers)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As in transformers. With graphs and several processes all of it is on the stream of the captures, where DDP must have
        been made whose steps are captured."""
        several = self._replays and world_size() > 1
        try:
            with capturing_stream(self.args.device) if several else nullcontext():
                return super().train(*args, **kwargs)
        finally:
            if self._graphed is not None:
                self._graphed.release()

    def _begin_graphs(self) -> None:
        """FSDP2 has put other parameters in the place of the model's first ones by now."""
        several: dict[str, Any] = {}
        if world_size() > 1:  # one process adds up nothing: a second graph would only keep the memory of a second step
            several["reduces"] = lambda: self.accelerator.sync_gradients
            if not self.run.fsdp:
                several["warm"] = WARM_DDP
        self._graphed = GraphedGradients(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad], self._gradients,
            passes=self.run.accumulation, required=self.run.graphs is True, **several,
        )  # fmt: skip

    def training_step(
        self, model: torch.nn.Module, inputs: dict[str, Any], num_items_in_batch: torch.Tensor | int | None = None
    ) -> torch.Tensor:
        if self._graphed is None:
            loss = super().training_step(model, inputs, num_items_in_batch)
        else:
            batch = self.prepare_inputs(inputs)
            if num_items_in_batch is not None:
                batch[COUNTED] = torch.as_tensor(num_items_in_batch, device=self.args.device)
            loss = self._graphed(batch)
        self._losses += loss
        return loss

    def _gradients(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        rest = {name: x for name, x in batch.items() if name != COUNTED}
        return super().training_step(self.model_wrapped, rest, batch.get(COUNTED))

    def autocast_smart_context_manager(self, *args: Any, **kwargs: Any) -> Any:
        """autocast, which accelerate leaves out with FSDP2."""
        if self._sharded_bf16:
            return self.accelerator.autocast()
        return super().autocast_smart_context_manager(*args, **kwargs)

    def prepare_inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        batch = super().prepare_inputs(inputs)
        return mark_document_count_dynamic(batch) if self._compiled else batch

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Points of the loss curve hold the mean loss of all processes since the point before."""
        step = self.state.global_step
        if "loss" in logs:
            logs["loss"] = self._summed_losses() / (step - self._last_point)
            check_finite(logs, step, self.checkpoints.complete, fp16=self.run.precision == "fp16")
            if not self._is_point(step):  # a stop in between, of which the finished curve shows nothing
                return
            self._losses.zero_()
            self._last_point = step
        super().log(logs, *args, **kwargs)

    def _is_point(self, step: int) -> bool:
        every = (self.run.log_every, self.run.checkpoint_every, self.run.max_steps)
        return any(step % steps == 0 for steps in every)

    def _summed_losses(self) -> float:
        return self.accelerator.reduce(self._losses, "mean").item()

    def get_train_dataloader(self) -> DataLoader:
        """Batches in the order of the rows: context group p of n takes batches p, p + n, p + 2 n."""
        pinned = self.args.dataloader_pin_memory
        batches: Any = self.plan  # yields lists of row numbers, as a sampler of batches does
        return prepare_data_loader(  # accelerator.prepare would give every process batches of its own
            DataLoader(self.rows, batch_sampler=batches, collate_fn=pack_rows, pin_memory=pinned),
            self.args.device,
            num_processes=self.groups.count,
            process_index=self.groups.index,
            put_on_device=True,
            even_batches=False,
            non_blocking=self.accelerator.non_blocking,
        )

    def create_optimizer(self, model: torch.nn.Module | None = None) -> torch.optim.Optimizer:
        if self.optimizer is None:
            self.optimizer = build_optimizer(self.run, self.model if model is None else model)
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> LambdaLR:
        if self.lr_scheduler is None:
            factor = partial(self.run.rate_factor, plan=self.plan)
            self.lr_scheduler = LambdaLR(self.optimizer if optimizer is None else optimizer, factor)
        return self.lr_scheduler

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """The held-out loss: the mean over all predicted tokens, for any number of processes; in subclasses all of `measured`."""
        metrics = dict(zip(self.measured, self._held_out_means(), strict=True))
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _held_out_means(self) -> list[float]:
        summed = torch.zeros(len(self.measured) + 1, dtype=torch.float64, device=self.args.device)  # sums, tokens
        size, groups = self.run.batch_size, self.groups
        # Held-out rows, fewer in their last batch, would be compiled for themselves.
        with evaluating(self.model), torch.compiler.set_stance("force_eager") if self._compiled else nullcontext():
            for start in range(groups.index * size, len(self.held_out), groups.count * size):
                rows = range(start, min(start + size, len(self.held_out)))
                summed += self._sum_up(rows)
            if self.is_fsdp_enabled:  # every process takes part in every forward
                batches = -(-len(self.held_out) // size)
                if groups.index >= batches % groups.count > 0:
                    self._sum_up(range(1))
        *totals, tokens = self.accelerator.reduce(summed, "sum").tolist()
        return [total / tokens for total in totals]

    def _sum_up(self, rows: range) -> torch.Tensor:
        """Of `measured` the sums over the predicted tokens of held-out rows, and how many tokens they are."""
        batch = self.prepare_inputs(pack_rows([self.held_out[row] for row in rows]))
        tokens = (batch["labels"] >= 0).sum().double()
        with self.autocast_smart_context_manager():
            means = self.measure(batch)
        return torch.stack([*(mean.double() * tokens for mean in means), tokens])

    def measure(self, batch: dict[str, Any]) -> list[torch.Tensor]:
        """The means of `measured` over the predicted tokens of a batch."""
        few = {"logits_to_keep": 1} if isinstance(self.model, FastWeightsForCausalLM) else {}  # beside its chunked loss
        return [self.model(**batch, use_cache=False, **few).loss]

    def save_to(self, path: Path, facts: Mapping[str, str]) -> None:
        """Save the model, its tokenizer and a card with the facts of its training as the folder `path`, whole or not at all."""
        partial = _agreed_partial(path)
        with saving("the model", partial, self.folder.checkpoints):
            self.save_model(str(partial))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                (partial / "training_args.bin").unlink(missing_ok=True)  # the run file holds the same settings
                write_card(partial, self.accelerator.unwrap_model(self.model), facts)
                publish_folder(partial, path, SAVED_MODEL)
            self.accelerator.wait_for_everyone()  # all see it from here on

    def save_checkpoint(self, model: Any, trial: Any) -> None:
        """All but weights and moments as in transformers, into a folder of another name. It is renamed in the background, when
        these are in it too; then old checkpoints go. A training that stops now waits for it."""
        self.checkpoints.finish()
        step, folder = self.state.global_step, self.folder.checkpoints
        losses = self._summed_losses()
        self._staging = _agreed_partial(folder / f"checkpoint-{step}")
        made, main = self._staging / f"checkpoint-{step}", self.args.should_save
        with saving(f"the checkpoint of step {step}", self._staging, folder):
            super().save_checkpoint(model, trial)
            read = self.plan.rows(step)
            save_rows(self.rows, self.start, made, run=self.run, read=read, main=main)
            if main:
                write_json(made / OPEN_LOSS, {"since_step": self._last_point, "sum": losses})
        self._staging = None
        self.checkpoints.begin(made, self.model, self._plain_optimizer)
        if self.control.should_training_stop:
            self.checkpoints.finish()

    def save_optimizer(self, folder: str) -> None:
        """The state of the schedule; moments are saved in the background."""
        assert self.lr_scheduler is not None
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(folder, SCHEDULE))

    @property
    def _plain_optimizer(self) -> torch.optim.Optimizer:
        """The optimizer without accelerate's wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)

    def load_model(self, checkpoint: str, model: Any) -> None:
        with loading(checkpoint):
            load_weights(self.model, Path(checkpoint))

    def load_optimizer(self, checkpoint: str | None) -> None:
        assert checkpoint is not None and self.lr_scheduler is not None
        folder = Path(checkpoint)
        with loading(folder):
            load_moments(self.model, self._plain_optimizer, folder)
            self.lr_scheduler.load_state_dict(torch.load(folder / SCHEDULE, weights_only=True))
            for group, rate in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
                group["lr"] = rate
            self._load_losses(folder)
            load_rows(self.rows, folder)

    def load_moments(self, checkpoint: Path) -> None:
        """Take the optimizer's moments of another training, once this one is prepared, and nothing else."""
        with loading(checkpoint):
            load_moments(self.model, self._plain_optimizer, checkpoint)

    def _load_losses(self, checkpoint: Path) -> None:
        self._losses.zero_()
        self._last_point = self.state.global_step
        if (checkpoint / OPEN_LOSS).exists():  # earlier versions logged a point at every checkpoint
            saved = read_json_object(checkpoint / OPEN_LOSS)
            self._losses += saved["sum"]
            self._last_point = saved["since_step"]

    def load_random_states(self, checkpoint: str | None) -> None:
        with loading(str(checkpoint)):
            super().load_random_states(checkpoint)

    def checkpoints_folder(self, trial: Any) -> str:
        return super().checkpoints_folder(trial) if self._staging is None else str(self._staging)


def _agreed_partial(path: Path) -> Path:
    """`partial_path`, the same one in every process."""
    return partial_path(path, from_main_process(secrets.token_hex(4)))


def held_out_rows(shards: TokenShards, length: int) -> PackedRows:
    """Rows of `length` tokens; a single one of all tokens where they are fewer.

    Raises:
        ValueError: there are less than two tokens.
    """
    return PackedRows(shards, max(2, min(length, len(shards))))


def held_out_sample(run: LanguageRun, text: PreparedText) -> ShuffledRows:
    """The rows of held-out text that a run reads."""
    rows = held_out_rows(text.held_out, run.length)
    return ShuffledRows(rows, seed=HELD_OUT_SEED, count=min(run.evaluation_rows, len(rows)))


def bucket_size(model: torch.nn.Module) -> int:
    """MB of gradients in float32 that DDP reduces at a time."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return max(SMALL_BUCKET, 4 * trained // BUCKETS // 2**20)


def training_arguments(run: LanguageRun, folder: Path, blocks: list[torch.nn.Module], bucket: int) -> TrainingArguments:
    """The part of a run that transformers and accelerate carry out.

    Args:
        blocks: modules that FSDP2 shards one by one.
        bucket: MB of gradients that DDP reduces at a time.
    """
    extra: dict[str, Any] = {}
    if run.fsdp:
        extra |= {"fsdp": True, "fsdp_config": fsdp_config(run, blocks)}
    if run.gradient_checkpointing:  # transformers 5.20 has another name for it
        new_name = hasattr(TrainingArguments, "activation_checkpointing")
        extra["activation_checkpointing" if new_name else "gradient_checkpointing"] = True
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=run.max_steps,
        per_device_train_batch_size=run.batch_size,
        gradient_accumulation_steps=run.accumulation,
        max_grad_norm=run.max_gradient_norm,
        bf16=run.precision == "bf16",
        fp16=run.precision == "fp16",
        use_cpu=not torch.cuda.is_available(),
        seed=run.seed,
        logging_steps=run.log_every,
        logging_nan_inf_filter=False,
        eval_strategy="steps" if run.evaluate_every else "no",
        eval_steps=run.evaluate_every or None,
        save_steps=run.checkpoint_every,
        report_to=run.trackers,
        run_name=run.output,
        disable_tqdm=True,
        remove_unused_columns=False,
        dataloader_pin_memory=torch.cuda.is_available(),
        # A copy from pinned memory does not wait for the step before.
        accelerator_config={"non_blocking": torch.cuda.is_available(), "even_batches": False},
        ddp_find_unused_parameters=False,
        ddp_bucket_cap_mb=bucket,
        **extra,
    )
    use_one_gpu(arguments)
    return arguments
