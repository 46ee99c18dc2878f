"""Inputs on which every op is tested and timed; a new rule joins by one line in `cases`."""

from .cases import CASES, OpCase, OpInputs

__all__ = ["CASES", "OpCase", "OpInputs"]
