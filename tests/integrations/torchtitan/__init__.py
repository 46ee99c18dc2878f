"""Trainings by torchtitan, on CPUs and with a torch older than it needs, in this Python and in those of its processes."""

from importlib.util import find_spec

import torch

if find_spec("torchtitan") is not None:  # before that is imported
    from . import older_torch  # noqa: F401

    if not torch.cuda.is_available():
        from . import on_cpu  # noqa: F401
