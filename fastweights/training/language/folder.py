"""The output folder of one training: which file is where, and whether the run may use the folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...analysis.language_plots import PLOT_FILES
from ...data.text import PreparedText
from ...files import FOLDER, any_file, what_stands
from ...models.loading import SAVED_MODEL, is_own_type
from ...outputs import has_keys
from ...untrusted import read_json_object
from ..checkpoints import CHECKPOINT
from ..folder import OwnedFolder, as_stored
from .processes import on_main_process, world_size
from .run import LanguageRun

__all__ = ["MEASURED", "LanguageFolder"]

# A continued run may change these fields: the training does not depend on them, but for the rounding of compiled code.
# MEASURED are those of the last measurements.
MEASURED = ("context_lengths", "context_texts", "prompt")
FREE = (
    *("output", "label", "cache", "compile", "graphs", "fsdp", "reshard_after_forward", "forward_prefetch"),
    *("context_parallel", "context_way", "keep_checkpoints", "tensorboard", "report_to", *MEASURED),
    *("teacher", "cache_teacher", "needles", "selection"),  # of a distillation, whose teacher is known by its content
)
# Fields that came after the first run.json files were written. At their defaults they are left out.
LATER = (
    *("batch_ramp", "max_tokens", "warmup_steps", "warmup_tokens", "schedule", "schedule_tokens", "decay_fraction"),
    *("decay_shape", "final_learning_rate", "optimizer", "optimizer_options", "groups", "keep_optimizer"),
    *("presets", "stages", "stage", "train", "reduce_dtype", "seed_by_name"),
)


class LanguageFolder(OwnedFolder):
    """A folder that holds one training, or those of several models and their results.json, and nothing else.

    run.json                 the configuration, and hashes of text and tokenizer, that the numbers depend on
    log.jsonl                a line for every point of the loss curve and of the held-out loss
    checkpoints/checkpoint-N where an interrupted training continues
    tensorboard/             the same points for TensorBoard, where it is asked for
    model/                   the trained model and its tokenizer
    result.json, *.png       the measurements, once training has ended
    distillation.json        of a distillation, teacher and student side by side
    diverged.json            why there is no result, where the caller has noted it
    """

    MARKER, WORK = "run.json", "training"
    KEYS, IGNORED = ("model", "tokenizer", "length", "max_steps"), ("fsdp",)
    OWN = {
        **dict.fromkeys(("log.jsonl", "result.json", "results.json", "diverged.json", *PLOT_FILES), any_file),
        **dict.fromkeys(("distillation.json", "distillation.png"), any_file),
        "checkpoints": {"checkpoint-[0-9]*": CHECKPOINT, "damaged-checkpoint-[0-9]*": CHECKPOINT},
        "tensorboard": {"events.out.tfevents.*": any_file},
        "model": SAVED_MODEL,
    }
    LONGER = (
        "max_steps",
        "the learning rate has its warm-up and its schedule over max_steps. To train the model on, write a run file with its "
        "folder as path in [model], another output and the further steps, whose learning rate has a schedule of its own "
        "(docs/train.md, 'Continue')",
    )

    def __init__(self, path: Path, processes: int | None = None) -> None:
        """processes: how many train, where it is planned for others than there are."""
        super().__init__(path)
        self._processes = world_size() if processes is None else processes
        self.checkpoints = path / "checkpoints"
        self.log = path / "log.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.result = path / "result.json"

    def describe(self, work: LanguageRun) -> dict[str, Any]:
        usual = LanguageRun()
        fields = {name: value for name, value in dataclasses.asdict(work).items() if name not in FREE}
        fields = {
            name: x for name, x in fields.items() if name not in LATER or getattr(work, name) != getattr(usual, name)
        }
        fields |= {"corpus": work.corpus.record(), "tokenizer": work.tokenizer.record()}
        passes = fields.pop("accumulation") * work.context_groups(self._processes)
        for entry in fields.get("batch_ramp", ()):
            entry["batch_size"] *= passes
        for table in fields.get("stages", ()):
            table.pop("context_parallel", None)
        before = Path(str(work.model.get("path", "")))
        if work.stage and before.parent == Path(work.output).parent:  # the stage before, wherever the output is
            fields["model"]["path"] = before.name
        rows = fields.pop("batch_size") * passes
        return as_stored({**fields, "rows_a_step": rows})

    @staticmethod
    def is_known(path: Path) -> bool:
        """The folder of checkpoints, if it holds those of our models. Each is checked before a training continues from it."""
        return (
            path.name == "checkpoints"
            and what_stands(path) == FOLDER
            and all(_has_own_model(one) for one in path.iterdir())
        )

    @contextmanager
    def opened(self, run: LanguageRun, text: PreparedText, *, overwrite: bool) -> Iterator[None]:
        """Lock the folder for `run` on `text`, new or continued. Only the main process writes; all see its files.

        Raises:
            ValueError: the folder cannot be written to, is in use, or holds other files; or, without `overwrite`, another
                training. Its files are then unchanged. Every process raises the main process's error.
        """
        with ExitStack() as held:

            def hold() -> None:
                wanted = {**self.describe(run), **text.fingerprints}
                held.enter_context(self.held_for(wanted, overwrite=overwrite))

            on_main_process(hold)
            yield


def _has_own_model(folder: Path) -> bool:
    """Whether config.json in the folder is that of a model of this library."""
    settings = folder / "config.json"
    return has_keys(settings, "model_type") and is_own_type(read_json_object(settings)["model_type"])
