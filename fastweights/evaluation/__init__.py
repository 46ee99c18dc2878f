"""Measuring trained models: recall of small ones, and perplexity, recall and retrieval of text models by context length."""

from ..models.loading import load_language_model
from .continuation import continue_text
from .evaluate import MEASURES, EvaluationSettings, evaluate
from .perplexity import LengthPerplexity, perplexity_by_length
from .recall import recall_accuracy
from .regression import RegressionErrors, regression_errors
from .ruler import NEEDLE_TASKS, RULER_TASKS, NeedleRecall, RulerRecall, needle_recall, ruler_recall
from .word_recall import TaskInWords, WordRecall, word_recall, word_tokens

__all__ = [
    "MEASURES",
    "NEEDLE_TASKS",
    "RULER_TASKS",
    "EvaluationSettings",
    "LengthPerplexity",
    "RegressionErrors",
    "RulerRecall",
    "NeedleRecall",
    "TaskInWords",
    "WordRecall",
    "continue_text",
    "evaluate",
    "load_language_model",
    "needle_recall",
    "perplexity_by_length",
    "recall_accuracy",
    "regression_errors",
    "ruler_recall",
    "word_recall",
    "word_tokens",
]
