"""Training small models on recall tasks: a grid of runs in, results and a summary out."""

from .experiment import RecallExperiment, RecallRun
from .run import run_recall, run_recall_parts
from .run_file import RecallFile, load_recall_file
from .settings import Stage
from .train import train_run

__all__ = [
    "RecallExperiment",
    "RecallFile",
    "RecallRun",
    "Stage",
    "load_recall_file",
    "run_recall",
    "run_recall_parts",
    "train_run",
]
