"""The layout that the tasks with a separator share: context, padding, separator, queries."""

import numpy as np

from .task import IGNORE_INDEX

__all__ = ["FIRST_CONTENT", "separated"]

PADDING = 0
SEPARATOR = 1
FIRST_CONTENT = 2  # the lowest token that carries content


def separated(
    length: int, context: np.ndarray, queries: np.ndarray, answers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """input_ids and labels, int64 [rows, length]: context, padding, separator, queries up to the last position.

    The answers label the last positions; one answer more than queries makes the separator itself the first query.
    """
    rows, first_query = len(context), length - queries.shape[1]
    input_ids = np.full((rows, length), PADDING, dtype=np.int64)
    input_ids[:, : context.shape[1]] = context
    input_ids[:, first_query - 1] = SEPARATOR
    input_ids[:, first_query:] = queries
    labels = np.full((rows, length), IGNORE_INDEX, dtype=np.int64)
    labels[:, length - answers.shape[1] :] = answers
    return input_ids, labels
