"""Triton kernels of the memory rules, and what records and launches them. Nothing here imports fastweights.ops."""
