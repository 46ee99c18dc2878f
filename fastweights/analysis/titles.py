"""One line that says what an experiment was: under the title of every plot and table."""

from collections.abc import Sequence
from typing import Any

from .results import RecallResult

__all__ = ["describe_experiment"]


def describe_experiment(results: Sequence[RecallResult]) -> str:
    """Task, model, training and grid in one line, from runs that differ in mixer, pairs, learning rate and seed only."""
    run = results[0].run
    length = "" if run["length"] is None else f", length {run['length']}"
    rates, seeds = _values(results, "learning_rate"), _values(results, "seed")
    return (
        f"{run['task']}{length}, {run['vocab_size']:,} tokens; {_count(run['layers'], 'layer')} of width {run['width']}, "
        f"{_count(run['heads'], 'head')}; {run['steps']:,} steps of {run['batch_size']}, "
        f"lr {', '.join(f'{rate:g}' for rate in rates)}; {_count(len(seeds), 'seed')}"
    )


def _values(results: Sequence[RecallResult], field: str) -> list[Any]:
    return sorted({result.run[field] for result in results})


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
