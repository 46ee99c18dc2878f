"""The tasks by name. Users add theirs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TypeVar

from ..checks import check_choice, check_text, describe_value
from ..plugins import Registry
from .task import VOCAB_SIZE, Task

__all__ = ["TASKS", "make_task", "register_task", "task_class"]

# The order in which lists show tasks; the library's others and then those of users follow.
ORDER = (
    *("mqar", "mqar-shuffled", "copy", "mqar-ood", "mqar-shuffled-ood", "palindrome", "selective-copy"),
    *("parity", "s3", "s5", "regression"),
)
GIVEN = ("pairs", "length", "vocab_size")  # settings of their own beside the options of a task
Kind = TypeVar("Kind", bound=type[Task])

_REGISTRY: Registry[type[Task]] = Registry("task", ORDER)
TASKS: Mapping[str, type[Task]] = _REGISTRY


def register_task(task: Kind) -> Kind:
    """Make a task known by its `name`, so that `make_task`, `run_recall`, run files and every command take it.

    A decorator of the class, above `@dataclass(frozen=True, kw_only=True)`. In a notebook a class that is defined again takes
    its own place.

    Args:
        task: a subclass of `RecallTask` or `VectorTask` that defines `name`, `summary` and the abstract methods, and whose own
            fields, the options of the task, have defaults.

    Raises:
        TypeError: not such a class.
        ValueError: a name that is taken or has other characters than letters, digits, ".", "_" and "-".
    """
    if not isinstance(task, type) or not issubclass(task, Task):
        raise TypeError(
            f"task must be a subclass of fastweights.data.RecallTask or VectorTask, got {describe_value(task)}"
        )
    if "__dataclass_params__" not in vars(task):
        raise TypeError(
            f"task must be a dataclass, {task.__name__} is none; put @dataclass(frozen=True, kw_only=True) on it"
        )
    if inspect.isabstract(task):
        raise TypeError(f"task {task.__name__} must define {', '.join(sorted(task.__abstractmethods__))}")
    for text in ("name", "summary"):
        check_text(
            text, getattr(task, text, None), what=f"one line of text, a class attribute of {task.__name__}", empty=False
        )
    needed = [
        x.name for x in fields(task) if x.default is MISSING and x.default_factory is MISSING and x.name not in GIVEN
    ]
    if needed:
        raise TypeError(f"options of task {task.name!r} must have defaults, {', '.join(needed)} has none")
    _REGISTRY.check_name(task.name, task)
    _REGISTRY.add(task.name, task, task)
    return task


def task_class(name: str, what: str = "the name of a recall task") -> type[Task]:
    """The class of the task called `name`. what: what messages call the name.

    Raises:
        ValueError: an unknown name; the message says the nearest and all there are.
        TypeError: a name that is no string.
    """
    try:
        return TASKS[check_choice(what, name, TASKS)]
    except ValueError as error:
        raise ValueError(
            f"{error}; register a task of your own first (a command imports its module with --import MODULE)"
        ) from None


def make_task(
    name: str, *, pairs: int, length: int | None = None, vocab_size: int = VOCAB_SIZE, **options: object
) -> Task:
    """The task `name` of TASKS with these options; `options` are the further fields of its class.

    length=None is the shortest sequence that holds the task; tasks of vectors have no vocab_size. ValueError for an unknown
    name or option (it names the nearest valid ones) and for options that the task refuses.
    """
    task = task_class(name)
    valid = [field.name for field in fields(task)]
    for option in options:
        check_choice(f"an option of task {name!r}", option, valid)
    vocabulary = {"vocab_size": vocab_size} if "vocab_size" in valid else {}
    return task(pairs=pairs, length=length, **vocabulary, **options)  # type: ignore[arg-type]  # checked above
