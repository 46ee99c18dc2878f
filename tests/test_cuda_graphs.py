"""What a trial before a capture leaves behind, as far as no GPU is needed."""

import threading

import pytest
import torch

from fastweights.cuda_graphs import Waits, refusing_waits


@pytest.fixture
def mode(monkeypatch):
    """torch's setting, of which there is one for all threads."""
    held = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: held[0])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda new: held.__setitem__(0, new))
    return held


def test_waits_are_errors_inside_alone(mode):
    with pytest.raises(Waits), refusing_waits():
        assert mode == ["error"]
        raise RuntimeError("called a synchronizing CUDA operation")
    assert mode == ["default"]


def test_two_threads_at_the_same_time_leave_the_setting_as_it_was(mode):
    """The second must not take the first one's setting for the one before."""
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def second():
        with refusing_waits():
            second_is_in.set()
            first_is_out.wait(60)

    thread = threading.Thread(target=second)
    with refusing_waits():
        thread.start()
        second_is_in.wait(0.2)
    first_is_out.set()
    thread.join()
    assert second_is_in.is_set() and mode == ["default"]
