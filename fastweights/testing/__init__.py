"""Inputs on which every op is tested and timed, from the cases of its declaration; and the contract of mixers."""

from .cases import CASES, OpCase, OpInputs
from .mixer_contract import check_mixer

__all__ = ["CASES", "OpCase", "OpInputs", "check_mixer"]
