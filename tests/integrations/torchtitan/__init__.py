"""Trainings by torchtitan on CPUs, in this Python and in those of its processes."""

from importlib.util import find_spec

if find_spec("torchtitan") is not None:
    from . import on_cpu  # noqa: F401  # before torchtitan is imported
