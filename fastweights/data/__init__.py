"""Recall tasks: seeded, identical on every machine, train and test disjoint by construction."""

from .mqar import MQAR, OutOfDistributionMQAR
from .registry import TASKS, make_task
from .separated import Copy, ShuffledMQAR
from .streaming import stream
from .task import IGNORE_INDEX, Batch, RecallTask

__all__ = [
    "IGNORE_INDEX",
    "MQAR",
    "TASKS",
    "Batch",
    "Copy",
    "OutOfDistributionMQAR",
    "RecallTask",
    "ShuffledMQAR",
    "make_task",
    "stream",
]
