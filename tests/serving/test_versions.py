"""What differs between the versions of vLLM, as far as it needs none of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights.serving.vllm.versions import with_lengths


@dataclass
class Told:
    """What vLLM 0.24 tells a builder: the lengths of all sequences on the device, and what a step reads."""

    seq_lens: Tensor
    query_start_loc_cpu: Tensor
    is_prefilling: Tensor
    seq_lens_cpu_upper_bound: Tensor | None = None

    def replace(self, **named: Any) -> Told:
        return replace(self, **named)


@pytest.mark.parametrize(
    ("read", "prefilling", "wanted"),
    [
        ([1, 1], [False, False], [1, 1]),
        ([1, 5], [False, True], [1, 5]),
        ([1, 1], [False, True], [9, 7]),  # one token is the end of a prompt, or a whole one
    ],
)
def test_lengths_wait_for_the_device_only_where_they_matter(read, prefilling, wanted):
    edges = torch.tensor([0, *read]).cumsum(0)
    told = Told(torch.tensor([9, 7]), edges, torch.tensor(prefilling))
    assert with_lengths(told).seq_lens_cpu_upper_bound.tolist() == wanted


def test_lengths_that_are_told_stay():
    told = Told(torch.tensor([9]), torch.tensor([0, 1]), torch.tensor([True]), torch.tensor([12]))
    assert with_lengths(told) is told
