"""Launches of a decoding step, counted without a GPU, and how many each mixer may have."""

from __future__ import annotations

import pytest
from fastweights_studies.measure.decode_launches import count


def test_what_a_step_launches():
    assert count("gdn", pool=False) == [
        "linear_rows_kernel", "token_convolution", "linear_rows_kernel", "linear_rows_kernel", "decode_delta_rule",
        "forward_kernel", "linear_rows_kernel",
    ]  # fmt: skip


def test_energies_are_updated_by_a_kernel():
    assert count("pla", pool=False) == [
        "linear_rows_kernel", "token_convolution", "linear_rows_kernel", "linear_rows_kernel", "decode_key_energy",
        "decode_delta_rule", "forward_kernel", "linear_rows_kernel",
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gdn", "pla", "gka", "palimpsa-m", "lattice"])
def test_a_step_in_a_pool_launches_one_kernel_more(name):
    """The one that turns the row of padding into none. Neither states nor last inputs of convolutions are copied."""
    assert len(count(name, pool=True)) <= len(count(name, pool=False)) + 1
