"""Tasks: recall, state tracking, in-context regression. Seeded, identical on every machine, train and test disjoint."""

from .mqar import MQAR, OutOfDistributionMQAR
from .registry import TASKS, make_task
from .regression import LinearRegression, VectorBatch
from .selective_copy import SelectiveCopy
from .separated import Copy, OutOfDistributionShuffledMQAR, Palindrome, ShuffledMQAR
from .state_tracking import S3, S5, Parity, StateTracking
from .streaming import stream
from .task import IGNORE_INDEX, Batch, RecallTask, Task

__all__ = [
    "IGNORE_INDEX",
    "MQAR",
    "S3",
    "S5",
    "TASKS",
    "Batch",
    "Copy",
    "LinearRegression",
    "OutOfDistributionMQAR",
    "OutOfDistributionShuffledMQAR",
    "Palindrome",
    "Parity",
    "RecallTask",
    "SelectiveCopy",
    "ShuffledMQAR",
    "StateTracking",
    "Task",
    "VectorBatch",
    "make_task",
    "stream",
]
