"""Launches of a decoding step, counted without a GPU, and how many each mixer may have."""

from __future__ import annotations

import pytest
from fastweights_studies.measure.decode_launches import count

MLP = ["linear_rows_kernel", "linear_rows_kernel"]


def test_what_a_step_launches():
    """The norm with all projections and gates; the norm of the heads with the projection of the answer; the MLP."""
    assert count("gdn", "block") == [
        "linear_rows_kernel", "token_convolution", "decode_delta_rule", "linear_rows_kernel", *MLP,
    ]  # fmt: skip


def test_energies_are_updated_by_a_kernel():
    assert count("pla", "block") == [
        "linear_rows_kernel", "token_convolution", "decode_key_energy", "decode_delta_rule", "linear_rows_kernel", *MLP,
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["gdn", "pla", "gka", "palimpsa-m", "lattice"])
def test_a_step_in_a_pool_launches_one_kernel_more(name):
    """The one that turns the row of padding into none. Neither states nor last inputs of convolutions are copied."""
    assert len(count(name, "pool")) <= len(count(name, "layer")) + 1
