"""Trainings of small models wait for nothing."""

from ..training.no_waiting import no_waiting

__all__ = ["no_waiting"]
