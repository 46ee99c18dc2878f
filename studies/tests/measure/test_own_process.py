"""Calls in processes of their own."""

from __future__ import annotations

import os

from fastweights_studies.measure.own_process import in_own_process


def test_a_call_has_its_own_process_and_environment() -> None:
    assert in_own_process(os.getpid) != os.getpid()
    assert in_own_process(os.getenv, "FASTWEIGHTS_OF_A_TEST", environment={"FASTWEIGHTS_OF_A_TEST": "there"}) == "there"
    assert "FASTWEIGHTS_OF_A_TEST" not in os.environ
