"""The output folder of one training: which file is where, and whether the run may use the folder."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list

from ..._version import __version__
from ...analysis.language_plots import PLOT_FILES
from ...data.text import PreparedText
from ...files import FOLDER, Own, any_file, what_stands
from ...models.loading import SAVED_MODEL
from ...outputs import has_keys
from ..output_folder import OwnedFolder, as_stored
from .checkpoints import CHECKPOINT
from .run import LanguageRun

__all__ = [
    "MEASURED",
    "LanguageFolder",
    "from_main_process",
    "is_main_process",
    "on_main_process",
    "training_facts",
    "world_size",
]

# A continued run may change these fields: the training does not depend on them, but for the rounding of compiled code.
# MEASURED are those of the last measurements.
MEASURED = ("context_lengths", "context_texts", "prompt")
FREE = (
    *("output", "cache", "compile", "graphs", "reshard_after_forward", "forward_prefetch"),
    *("keep_checkpoints", "tensorboard", "report_to", *MEASURED),
)
LONGER = (
    "max_steps",
    "the learning rate has its warm-up and its cosine over max_steps. To train the model on, write a run file with its folder as "
    "path in [model], another output and the further steps, whose learning rate has a warm-up and a cosine of its own "
    "(docs/train.md, 'Continue')",
)

OWN: Own = {
    **dict.fromkeys(("log.jsonl", "result.json", "results.json", "diverged.json", *PLOT_FILES), any_file),
    "checkpoints": {"checkpoint-[0-9]*": CHECKPOINT, "damaged-checkpoint-[0-9]*": CHECKPOINT},
    "tensorboard": {"events.out.tfevents.*": any_file},
    "model": SAVED_MODEL,
}
KEYS = ("model", "tokenizer", "length", "max_steps")  # of run.json


def world_size() -> int:
    """Processes of this training, as torchrun and accelerate launch tell them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main_process() -> bool:
    """Whether this process is the one that writes files."""
    return int(os.environ.get("RANK", "0")) == 0


def from_main_process(value: Any) -> Any:
    """The main process's `value`, in every process."""
    return broadcast_object_list([value])[0]


def on_main_process(work: Callable[[], Any]) -> Any:
    """What `work` returns in the main process, which alone does it, in every process. So is a ValueError that it raises."""
    value = refusal = None
    if is_main_process():
        try:
            value = work()
        except ValueError as error:
            refusal = str(error)
    value, refusal = from_main_process((value, refusal))
    if refusal is not None:
        raise ValueError(refusal)
    return value


class LanguageFolder:
    """A folder that holds one training, or those of several mixers and their results.json, and nothing else.

    run.json                 the configuration, and hashes of text and tokenizer, that the numbers depend on
    log.jsonl                a line for every point of the loss curve and of the held-out loss
    checkpoints/checkpoint-N where an interrupted training continues
    tensorboard/             the same points for TensorBoard, where it is asked for
    model/                   the trained model and its tokenizer
    result.json, *.png       the measurements, once training has ended
    diverged.json            of the leaderboard: why there is no result
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.log = path / "log.jsonl"
        self.tensorboard = path / "tensorboard"
        self.model = path / "model"
        self.result = path / "result.json"
        self.results = path / "results.json"
        # Each checkpoint is checked before a training continues from it.
        self._owned = OwnedFolder(path, "run.json", KEYS, "training", OWN, known=_is_checkpoints, longer=LONGER)

    def check(self, run: LanguageRun, *, overwrite: bool) -> None:
        """ValueError where `opened` would refuse the folder with any text. Nothing is written."""
        self._owned.check(_identity(run), overwrite=overwrite)

    @contextmanager
    def opened(self, run: LanguageRun, text: PreparedText, *, overwrite: bool) -> Iterator[None]:
        """Lock the folder for `run` on `text`, new or continued. Only the main process writes; all see its files.

        Raises:
            ValueError: the folder cannot be written to, is in use, or holds other files; or, without `overwrite`, another
                training. Its files are then unchanged. Every process raises the main process's error.
        """
        with ExitStack() as held:

            def hold() -> None:
                wanted = {**_identity(run), **text.fingerprints}
                held.enter_context(self._owned.held_for(wanted, overwrite=overwrite))

            on_main_process(hold)
            yield

    def locked(self) -> AbstractContextManager[None]:
        """The folder for this process alone, as while its plots are drawn."""
        return self._owned.locked()

    def remove(self) -> None:
        """Delete the training."""
        self._owned.remove()


def _is_checkpoints(path: Path) -> bool:
    """Whether this is the folder of checkpoints, and holds those of our models."""
    return (
        path.name == "checkpoints"
        and what_stands(path) == FOLDER
        and all(has_keys(one / "config.json", model_type="fastweights") for one in path.iterdir())
    )


def _identity(run: LanguageRun) -> dict[str, Any]:
    """The settings that the numbers of a training depend on."""
    fields = {name: value for name, value in dataclasses.asdict(run).items() if name not in FREE}
    fields["tokenizer"].pop("trust_remote_code")  # the hash of the tokenizer says what it does
    rows = fields.pop("batch_size") * fields.pop("accumulation") * world_size()
    return as_stored({**fields, "rows_a_step": rows})


def training_facts(run: LanguageRun, curves: Mapping[str, Any], *, tokens: int) -> dict[str, str]:
    """What the card of a trained model says about its training, by what a reader looks for. Paths of this machine are left out: a
    card is published. curves: the points of the log, see `loss_curves`."""
    facts = {
        "Text": _text(run),
        "Steps": f"{run.max_steps:,}",
        "Tokens read": f"{tokens:,}, in rows of {run.length:,}",
        "Optimizer": f"AdamW, weight decay {run.weight_decay:g}, beta {run.beta1:g} and {run.beta2:g}",
        "Learning rate": f"{run.learning_rate:g} at its highest, warm-up over {run.warmup_fraction:g} of the steps, then cosine "
        f"decay to {run.final_fraction:g} of it",
        "Precision": {"no": "float32"}.get(run.precision, run.precision),
        "Seed": f"{run.seed}",
    }
    if "path" in run.model:
        facts["Continued from"] = Path(str(run.model["path"])).name
    if curves["held_out_losses"]:
        facts["Held-out loss"] = f"{curves['held_out_losses'][-1]:.4f} nats per token"
    return facts | {"Trained with": f"fastweights {__version__}"}


def _text(run: LanguageRun) -> str:
    corpus = run.corpus
    if corpus.dataset is not None:
        return f"the dataset {corpus.dataset}"
    names = [Path(path).name for path in corpus.paths]
    return (
        f"files of the trainer's own: {', '.join(names)}"
        if names
        else "source and documentation of a Python installation"
    )
