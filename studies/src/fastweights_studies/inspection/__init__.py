"""What the memories of a trained model do while it reads: windows, norms, transitions, keys, solvers, slots, posteriors."""

from .inspect import MEASURES, Inspection, Measure, inspect_model
from .page import save_inspection
from .panels import Panel

__all__ = ["MEASURES", "Inspection", "Measure", "Panel", "inspect_model", "save_inspection"]
