"""lm-evaluation-harness (the `eval` extra) on our models. Importing this registers the model "fastweights" with it:

lm_eval.simple_evaluate(model="fastweights", model_args={"pretrained": FOLDER}, tasks=[...])
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from transformers import PreTrainedTokenizerBase

from ..checks import check_path, check_size, check_texts, check_whole_number
from ..results import HarnessScore
from .harness_model import Cut, FastWeightsLM
from .reading import check_lengths, check_model

__all__ = ["FastWeightsLM", "HarnessScore", "evaluate_with_harness"]

_TASKS = Path(__file__).parent / "tasks"  # those that the harness lacks


def evaluate_with_harness(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[str],
    *,
    include_path: str | Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    ruler_lengths: Sequence[int] | None = None,
    batch_size: int = 1,
    seed: int = 0,
    max_length: int | None = None,
    block: int = 512,
) -> list[HarnessScore]:
    """Scores of a loaded model on tasks of lm-evaluation-harness.

    Args:
        tasks: names of tasks, groups or tags.
        include_path: folder of task files (YAML) of your own, which replace those of the same name. If all tasks are found
            there, the harness's own are not looked through, and with local data nothing needs the network.
        limit: examples of each task at most, of RULER at each length.
        num_fewshot: examples before each question; the task's own number when None.
        ruler_lengths: context lengths of the harness's RULER tasks (niah_single_1 ... ruler_fwe), in tokens of the model's
            tokenizer; 4096 when None. A score's metric is its length.
        batch_size: prompts read at a time.
        max_length: tokens of a prompt and its answer, at most: the beginning of a longer prompt is left out, and each score
            says how many of its task's prompts were cut. None cuts no prompt, whatever its length.
        block: tokens read at a time; memory grows with it, not with the length of a prompt (but softmax attention keeps all).

    Raises:
        ValueError: an unknown task, a folder that does not exist, a number out of its range, a score that is not finite.
    """
    if limit is not None:
        check_size("limit", limit)
    check_size("batch_size", batch_size)
    check_size("block", block)
    if max_length is not None:
        check_size("max_length", max_length)
    if num_fewshot is not None:
        check_whole_number("num_fewshot", num_fewshot)
    check_whole_number("seed", seed)
    if not check_texts("tasks", tasks, what="names of tasks", empty=False):
        raise ValueError("tasks must hold at least one name of a task, got none")
    check_model(model)
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise TypeError(f"tokenizer must be one of transformers' tokenizers, got {type(tokenizer).__name__}")
    lengths = None if ruler_lengths is None else check_lengths(ruler_lengths, 1, name="ruler_lengths")
    found: dict[tuple[str, str], HarnessScore] = {}
    # One length after another, so that `limit` is the number at each: the harness would count over all of them.
    for options in [{}] if lengths is None else [{"max_seq_lengths": [length]} for length in lengths]:
        manager = _task_manager(tasks, include_path, {"tokenizer": tokenizer.name_or_path, **options})
        logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of models that are already loaded
        asked = FastWeightsLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length, block=block)
        results = simple_evaluate(
            asked,
            tasks=list(tasks),
            task_manager=manager,
            limit=limit,
            num_fewshot=num_fewshot,
            log_samples=False,
            bootstrap_iters=1000,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
        )
        assert results is not None  # it is None in the other processes of a distributed run only
        for score in _scores(results, asked.cuts):
            found.setdefault((score.task, score.metric), score)
    for score in found.values():
        if not math.isfinite(score.value):
            raise ValueError(f"model must give finite scores, got {score.value} for {score.metric} of {score.task}")
    return list(found.values())


def _scores(results: dict[str, Any], cuts: dict[str, Cut]) -> Iterator[HarnessScore]:
    """Every metric of every task and group, with the cuts of the task, or of all tasks of the group."""

    def cut(name: str) -> Cut:
        parts = [cuts.get(name, Cut(0, 0)), *map(cut, results["group_subtasks"].get(name, ()))]
        return Cut(sum(part.prompts for part in parts), sum(part.tokens for part in parts))

    for task, scores in results["results"].items():
        prompts, tokens = cut(task)
        for metric, value in scores.items():
            name = metric.removesuffix(",none")
            is_other_length = value == -1 and name.isdigit()  # RULER's mark of a length that no example has
            if isinstance(value, float) and not is_other_length:  # what is no float are names and counts
                yield HarnessScore(task=task, metric=name, value=float(value), cut_prompts=prompts, cut_tokens=tokens)


def _task_manager(tasks: Sequence[str], include_path: str | Path | None, metadata: dict[str, Any]) -> TaskManager:
    """A manager that knows all tasks. Those of `include_path` replace others of their names."""
    folders = [str(_TASKS)]
    if include_path is not None:
        if not check_path("include_path", include_path, "a folder with task files").is_dir():
            raise ValueError(f"include_path must be a folder with task files, {include_path} is none")
        folders.append(str(include_path))
    own = TaskManager(include_path=folders, include_defaults=False, metadata=metadata)
    if all(task in own.all_tasks for task in tasks):
        return own
    manager = TaskManager(include_path=folders, metadata=metadata)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise ValueError(
            f"lm-evaluation-harness knows no task {', '.join(map(repr, unknown))}; `lm_eval ls tasks` lists its own, tasks of "
            "your own need include_path"
        )
    return manager
