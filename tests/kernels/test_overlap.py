"""Kernels whose launches overlap wait for the kernel before them, and only there where a GPU can overlap them."""

from __future__ import annotations

import re

import pytest
import torch

from fastweights.kernels.runtime import overlap
from tests.ops.kernel_launches import Compilation, recorded

from . import forms
from .scoreboards import register_hazards

FORMS = (
    forms.decoding, forms.gated_norm, forms.linear_rows, forms.residual_norm, forms.l2_normalize, forms.step_decay,
    forms.token_convolution, forms.ring_attention, forms.gated_writes, forms.delta_writes, forms.positive_keys,
    forms.rwkv7, forms.layer_norm, forms.pool_rows,
)  # fmt: skip
ASKING, WRITES = "decode_systems that asks the memory", "forward_kernel of gated writes"
KERNELS = {
    "decode_delta_rule", "decode_key_energy", "decode_elementwise_longhorn", "decode_lattice", "decode_output_normalized_ttt",
    "decode_inverse_gram", "decode_systems", ASKING, "decode_palimpsa", "forward_kernel", "linear_rows_kernel",
    "residual_norm_forward", "l2_normalize_kernel", "step_decay_kernel", "softplus_kernel", "token_convolution",
    "rotate_into_ring", "attend_to_slots", "combine_shares", WRITES, "write_gain_kernel", "read_keys_kernel",
    "positive_keys_kernel", "layer_norm_kernel", "decode_dplr_delta_rule", "token_mix_kernel",
    "erase_keys_kernel", "read_answers_kernel", "move_rows",
}  # fmt: skip
# Weights depend on no kernel. States were written a step ago: by no kernel that may still run, as each waits for the one before.
READ_EARLY = {
    "linear_rows_kernel", "token_convolution", ASKING, "positive_keys_kernel", "layer_norm_kernel", "decode_lattice",
    "decode_inverse_gram", "decode_output_normalized_ttt", "token_mix_kernel", "erase_keys_kernel", "read_answers_kernel",
}  # fmt: skip
FETCH = {"decode_delta_rule", "decode_dplr_delta_rule", "token_convolution"}
WAIT, TOUCHES = "ACQBULK", re.compile(r"(LDG|LD|STG|ST|LDGSTS|ATOM|ATOMG|RED|REDG)(\.|\s)")


def launched(overlaps: bool) -> dict[str, Compilation]:
    """The first form of every kernel that has the parameter."""
    with overlap.overlapping_launches(overlaps):
        calls = [call for make in FORMS for call in make()]
        found = [one for call in calls for one in recorded(call) if "OVERLAP" in one.kernel.arg_names]
    return {name_of(one): one for one in reversed(found)}


def name_of(one: Compilation) -> str:
    if one.signature.get("U", "constexpr") != "constexpr":
        return ASKING
    return WRITES if one.kernel.__module__.endswith("gated_writes") else one.kernel.__name__


@pytest.fixture
def on_cpu_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops let their kernels have these, as they do in the interpreter."""
    monkeypatch.setattr("fastweights.kernels.availability.INTERPRETED", True)


@pytest.mark.slow
@pytest.mark.compiler
def test_nothing_is_read_or_written_before_the_wait(on_cpu_tensors: None) -> None:
    """But for weights, states of a step ago, and what is only brought into the cache."""
    kernels = launched(True)
    assert kernels.keys() == KERNELS
    assert all(one.choices["OVERLAP"] for one in kernels.values())
    for name, one in kernels.items():
        compiled = one.compile(90)
        instructions = compiled.instructions
        waits = [place for place, x in enumerate(instructions) if x.startswith(WAIT)]
        before = [x for x in instructions[: waits[0]] if TOUCHES.match(x)]
        assert bool(before) == (name in READ_EARLY) and all(x.startswith("LDG") for x in before), name
        fetched = [place for place, x in enumerate(instructions) if x.startswith("CCTL")]
        assert bool(fetched) == (name in FETCH) and all(place < waits[-1] for place in fetched), name
        assert not register_hazards(compiled.sass), name


@pytest.mark.compiler
def test_without_overlap_no_kernel_waits(on_cpu_tensors: None) -> None:
    for one in launched(False).values():
        assert not one.choices["OVERLAP"]
    assert not any(x.startswith((WAIT, "CCTL")) for x in one.compile(80).instructions)


class Kernel:
    arg_names = ("x", "OVERLAP")


@pytest.mark.parametrize(("capability", "can"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_gpus_from_hopper_on_overlap(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], can: bool) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert overlap.can_overlap(torch.device("cuda")) == can and not overlap.can_overlap(torch.device("cpu"))


def test_launches_overlap_within() -> None:
    with overlap.overlapping_launches():
        assert overlap.overlap_constants(Kernel) == {"OVERLAP": True, "launch_pdl": True}
        with overlap.overlapping_launches(False):
            assert overlap.overlap_constants(Kernel) == {"OVERLAP": False}
    assert overlap.overlap_constants(Kernel) == {"OVERLAP": False}
