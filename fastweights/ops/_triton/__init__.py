"""Triton kernels of the ops. Nothing here is imported before a CUDA tensor needs it, so that triton stays optional."""
