"""Tables and plots of results; the types and readers of `fastweights.results` under their earlier names."""

from ..results import RecallResult, RecallSummary, ResultsError, load_results, still_falling, summarize
from .mixer_tables import mixers_table
from .plots import save_plots
from .tables import recall_table, stage_table

__all__ = [
    "RecallResult",
    "RecallSummary",
    "ResultsError",
    "load_results",
    "mixers_table",
    "recall_table",
    "save_plots",
    "stage_table",
    "still_falling",
    "summarize",
]
