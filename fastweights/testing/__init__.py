"""Inputs on which every op is tested and timed, from the cases of its declaration; the contract of mixers; and whether a server
agrees with a model."""

from .agreement import Agreement, check_agreement
from .cases import CASES, OpCase, OpInputs
from .mixer_contract import check_mixer

__all__ = ["CASES", "Agreement", "OpCase", "OpInputs", "check_agreement", "check_mixer"]
