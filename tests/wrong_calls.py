"""A public function or class, called with kinds of wrong values for each of its arguments in turn."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from .bad_calls import check_refused, check_taken_or_refused
from .wrong_values import UNTOLD, VALUES, may_fit

__all__ = ["SOME", "check_call"]

# Arguments of any type by their annotation, which are models and tokenizers of transformers.
OF_TRANSFORMERS = ("model", "tokenizer")
SOME = ("None", "2.5", "bytes", "a list of objects", "an object", "a nested tensor")  # the others are in the slow tests


def arguments(made: Any) -> Iterator[tuple[str, Any]]:
    """Arguments that are passed by name, with their annotations."""
    hints = get_type_hints(
        made.__init__ if isinstance(made, type) and not hasattr(made, "__dataclass_fields__") else made
    )
    for name, parameter in inspect.signature(made).parameters.items():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            hint = hints.get(name, Any)
            yield name, hint | None if parameter.default is None and hint is not Any else hint


def check_call(
    name: str, made: Any, valid: Mapping[str, Any], kinds: Iterable[str], folder: Path, *, costly: bool = False,
    named: Mapping[tuple[str, str], str] = {}, untried: Collection[tuple[str, str, str]] = (),
    taken: Mapping[tuple[str, str], set[str]] = {},
) -> None:  # fmt: skip
    """`made` takes the valid arguments. With each in turn of another kind it refuses the call in words of the argument, or takes
    it where its annotation does.

    Args:
        costly: whether valid calls cost so much that only wrong ones are made.
        named: what messages call an argument, by name and argument. untried: values that say nothing about the function.
        taken: kinds of values that are taken beside those of the annotation.
    """
    if not costly:
        made(**valid)
    wrong = []
    for argument, hint in arguments(made):
        fitting = set() if argument in OF_TRANSFORMERS and hint is Any else may_fit(hint)
        fitting = fitting | taken.get((name, argument), set())
        for kind in kinds:
            fits = kind in fitting
            says_nothing = (name, argument, kind) in untried or (kind in UNTOLD and "a function" in fitting)
            if says_nothing or (fits and costly):
                continue
            check = check_taken_or_refused if fits else check_refused
            given = {**valid, argument: VALUES[kind]()}
            try:
                check(f"{argument}|{named.get((name, argument), argument)}", partial(made, **given), folder)
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(f"{argument} = {kind}: {str(error).splitlines()[0][:300]}")
            except Exception as error:
                wrong.append(f"{argument} = {kind}: raised {type(error).__name__} {str(error)[:300]}")
    assert not wrong, "\n" + "\n".join(wrong)
