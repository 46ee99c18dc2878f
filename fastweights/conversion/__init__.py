"""Continue a trained model with another memory: in place of the one that it has, or of the attention of a pretrained
Transformer."""

from .convert import LogitsCheck, check_logits, convert, convert_layer
from .folder import ConversionReport, convert_folder
from .linearized_folder import LinearizationReport, linearize_folder
from .plan import CONVERSIONS, Conversion, condition

__all__ = [
    "CONVERSIONS",
    "Conversion",
    "ConversionReport",
    "LinearizationReport",
    "LogitsCheck",
    "check_logits",
    "condition",
    "convert",
    "convert_folder",
    "convert_layer",
    "linearize_folder",
]
