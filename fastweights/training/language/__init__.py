"""Training language models on text: a run file in, a model with its measurements out."""

from ...results import LanguageResult
from .run import LanguageRun
from .run_file import load_run
from .schedule import BatchStage
from .train import NonFiniteLoss, train_language

__all__ = ["BatchStage", "LanguageResult", "LanguageRun", "NonFiniteLoss", "load_run", "train_language"]
