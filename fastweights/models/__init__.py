"""Language models of fast-weight layers. Importing this makes transformers' Auto classes know them."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .cache import FastWeightsCache
from .configuration import FastWeightsConfig
from .modeling import FastWeightsForCausalLM, FastWeightsModel

__all__ = ["FastWeightsCache", "FastWeightsConfig", "FastWeightsForCausalLM", "FastWeightsModel"]

AutoConfig.register(FastWeightsConfig.model_type, FastWeightsConfig)
AutoModel.register(FastWeightsConfig, FastWeightsModel)
AutoModelForCausalLM.register(FastWeightsConfig, FastWeightsForCausalLM)
