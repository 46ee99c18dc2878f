"""Calls in processes of their own."""

from __future__ import annotations

import os
import time

from fastweights_studies.measure.own_process import ends_within, in_own_process


def test_a_call_has_its_own_process_and_environment() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(os.getenv, "FASTWEIGHTS_OF_A_TEST", environment={"FASTWEIGHTS_OF_A_TEST": "there"}) == "there"
    assert "FASTWEIGHTS_OF_A_TEST" not in os.environ


def test_a_process_that_hangs_is_killed() -> None:
    assert ends_within(60, time.sleep, 0)
    assert not ends_within(60, int, "no number")
    began = time.monotonic()
    assert not ends_within(0.5, time.sleep, 60)
    assert time.monotonic() - began < 30
