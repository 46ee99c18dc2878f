"""Tasks: recall, state tracking, in-context regression. Seeded, identical on every machine, train and test disjoint."""

from importlib import import_module
from pkgutil import iter_modules

from ._draws import Draws
from .mqar import MQAR, OutOfDistributionMQAR
from .registry import TASKS, make_task, register_task
from .regression import LinearRegression
from .selective_copy import SelectiveCopy
from .separated import Copy, OutOfDistributionShuffledMQAR, Palindrome, ShuffledMQAR
from .state_tracking import S3, S5, Parity, StateTracking
from .streaming import stream
from .task import IGNORE_INDEX, Batch, RecallTask, Task, VectorBatch, VectorTask

__all__ = [
    "IGNORE_INDEX",
    "MQAR",
    "S3",
    "S5",
    "TASKS",
    "Batch",
    "Copy",
    "Draws",
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
    "VectorTask",
    "make_task",
    "register_task",
    "stream",
]

for _module in iter_modules(__path__):  # a task is registered by its file being here
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")
