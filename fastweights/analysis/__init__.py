"""From results to what a person looks at: summaries, tables and plots."""

from .convergence import still_falling
from .plots import save_plots
from .results import RecallResult, ResultsError
from .results_file import load_results
from .summary import RecallSummary, summarize
from .tables import mixers_table, recall_table

__all__ = [
    "RecallResult",
    "RecallSummary",
    "ResultsError",
    "load_results",
    "mixers_table",
    "recall_table",
    "save_plots",
    "still_falling",
    "summarize",
]
