"""The tasks by name."""

from dataclasses import fields

from ..checks import check_choice
from .mqar import MQAR, OutOfDistributionMQAR
from .regression import LinearRegression
from .selective_copy import SelectiveCopy
from .separated import Copy, OutOfDistributionShuffledMQAR, Palindrome, ShuffledMQAR
from .state_tracking import S3, S5, Parity
from .task import VOCAB_SIZE, Task

__all__ = ["TASKS", "make_task"]

_CLASSES: tuple[type[Task], ...] = (
    *(MQAR, ShuffledMQAR, Copy, OutOfDistributionMQAR, OutOfDistributionShuffledMQAR, Palindrome, SelectiveCopy),
    *(Parity, S3, S5, LinearRegression),
)
TASKS: dict[str, type[Task]] = {task.name: task for task in _CLASSES}


def make_task(
    name: str, *, pairs: int, length: int | None = None, vocab_size: int = VOCAB_SIZE, **options: object
) -> Task:
    """The task `name` of TASKS with these options; `options` are the further fields of its class.

    length=None is the shortest sequence that holds the task; tasks of vectors have no vocab_size. ValueError for an unknown
    name or option (it names the nearest valid ones) and for options that the task refuses.
    """
    check_choice("the name of a recall task", name, TASKS)
    task = TASKS[name]
    valid = [field.name for field in fields(task)]
    for option in options:
        check_choice(f"an option of task {name!r}", option, valid)
    vocabulary = {"vocab_size": vocab_size} if "vocab_size" in valid else {}
    return task(pairs=pairs, length=length, **vocabulary, **options)  # type: ignore[arg-type]  # checked above
