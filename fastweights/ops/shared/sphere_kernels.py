"""The kernels of Lattice and of output-normalised test-time training, which are one family."""

from __future__ import annotations

from ..framework.kernel_backend import KernelFamily

__all__ = ["sphere_kernels"]


def sphere_kernels() -> KernelFamily:
    from ...kernels.sphere.rule import SPHERE, SphereInputs

    return KernelFamily(SPHERE, SphereInputs, {"objective": "ttt", "normalize": False})
