"""Results of recall experiments, trained language models and evaluations: record types and their files."""

from .distillation import Distillation, LayerGain, LayerRanking, ModelMeasures
from .evaluation import HarnessScore, LengthPerplexity, NeedleRecall, RulerRecall, SuiteScores, WordRecall
from .experiment import RecallSummary, load_results, save_results, summarize
from .language import LanguageResult
from .marks import still_falling, undertrained
from .recall import RecallResult
from .records import ResultsError

__all__ = [
    "Distillation",
    "HarnessScore",
    "LanguageResult",
    "LayerGain",
    "LayerRanking",
    "LengthPerplexity",
    "ModelMeasures",
    "NeedleRecall",
    "RecallResult",
    "RecallSummary",
    "ResultsError",
    "RulerRecall",
    "SuiteScores",
    "WordRecall",
    "load_results",
    "save_results",
    "still_falling",
    "summarize",
    "undertrained",
]
