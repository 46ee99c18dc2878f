"""Recall and state-tracking tasks: seeded, identical on every machine, train and test disjoint by construction."""

from .mqar import MQAR, OutOfDistributionMQAR
from .registry import TASKS, make_task
from .selective_copy import SelectiveCopy
from .separated import Copy, OutOfDistributionShuffledMQAR, Palindrome, ShuffledMQAR
from .state_tracking import S3, S5, Parity, StateTracking
from .streaming import stream
from .task import IGNORE_INDEX, Batch, RecallTask

__all__ = [
    "IGNORE_INDEX",
    "MQAR",
    "S3",
    "S5",
    "TASKS",
    "Batch",
    "Copy",
    "OutOfDistributionMQAR",
    "OutOfDistributionShuffledMQAR",
    "Palindrome",
    "Parity",
    "RecallTask",
    "SelectiveCopy",
    "ShuffledMQAR",
    "StateTracking",
    "make_task",
    "stream",
]
