"""Training models and comparing them."""

from ..stopping import Stopped, StopSignals
from .checkpoint import CheckpointError
from .experiment import RecallExperiment, RecallRun
from .optimization import WeightDecayMixin, learning_rate_factor, undecayed_parameters, weight_decay_groups
from .recall import run_recall, run_recall_parts
from .recall_file import RecallFile, load_recall_file
from .settings import Stage
from .train import train_run
from .workers import WorkerError

__all__ = [
    "CheckpointError",
    "RecallExperiment",
    "RecallFile",
    "RecallRun",
    "Stage",
    "StopSignals",
    "Stopped",
    "WeightDecayMixin",
    "WorkerError",
    "learning_rate_factor",
    "load_recall_file",
    "run_recall",
    "run_recall_parts",
    "train_run",
    "undecayed_parameters",
    "weight_decay_groups",
]
