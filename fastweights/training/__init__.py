"""Training models and comparing them."""

from ..stopping import Stopped, StopSignals
from .checkpoints import CheckpointError
from .optimization import (
    ParameterGroup,
    WeightDecayMixin,
    learning_rate_factor,
    undecayed_parameters,
    weight_decay_groups,
)
from .pool import WorkerError
from .recall import (
    RecallExperiment,
    RecallFile,
    RecallRun,
    Stage,
    load_recall_file,
    run_recall,
    run_recall_parts,
    train_run,
)

__all__ = [
    "CheckpointError",
    "ParameterGroup",
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
