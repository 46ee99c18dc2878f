"""Language models of fast-weight layers. Importing this makes transformers' Auto classes know them."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .cache import FastWeightsCache
from .causal_lm import FastWeightsForCausalLM
from .configuration import FastWeightsConfig
from .heads import (
    FastWeightsForQuestionAnswering,
    FastWeightsForSequenceClassification,
    FastWeightsForTokenClassification,
)
from .hybrid import HybridCache, HybridModel, keep_layers, linearize
from .hybrid.families import register as register_hybrids
from .modeling import FastWeightsModel
from .presets import PRESETS, preset
from .vector_model import VectorModel

__all__ = [
    "PRESETS",
    "FastWeightsCache",
    "FastWeightsConfig",
    "FastWeightsForCausalLM",
    "FastWeightsForQuestionAnswering",
    "FastWeightsForSequenceClassification",
    "FastWeightsForTokenClassification",
    "FastWeightsModel",
    "HybridCache",
    "HybridModel",
    "VectorModel",
    "keep_layers",
    "linearize",
    "preset",
]

AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig)
AutoModel.register(FastWeightsConfig, FastWeightsModel)
AutoModelForCausalLM.register(FastWeightsConfig, FastWeightsForCausalLM)
AutoModelForSequenceClassification.register(FastWeightsConfig, FastWeightsForSequenceClassification)
AutoModelForTokenClassification.register(FastWeightsConfig, FastWeightsForTokenClassification)
AutoModelForQuestionAnswering.register(FastWeightsConfig, FastWeightsForQuestionAnswering)
register_hybrids()
