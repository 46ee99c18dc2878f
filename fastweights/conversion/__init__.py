"""Continue a trained model with a metaplastic or preconditioned memory."""

from .convert import LogitsCheck, check_logits, convert, convert_layer
from .folder import ConversionReport, convert_folder
from .plan import CONVERSIONS, Conversion, condition

__all__ = [
    "CONVERSIONS",
    "Conversion",
    "ConversionReport",
    "LogitsCheck",
    "check_logits",
    "condition",
    "convert",
    "convert_folder",
    "convert_layer",
]
