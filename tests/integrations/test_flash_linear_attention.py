"""Calls of flash-linear-attention's chunk_gated_delta_rule and chunk_kda compute with our ops what the recurrence says.

Each number is compared twice: from the backend alone, and through flash-linear-attention where it is installed. Its own kernels
need a GPU: tests/gpu/test_flash_linear_attention.py compares with these.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from fastweights import environment
from fastweights.integrations import foreign_calls
from fastweights.integrations.flash_linear_attention import NO_DISPATCH, register, unregister
from fastweights.integrations.flash_linear_attention.call import Call
from tests.integrations.fla_calls import (
    ALL,
    CASES,
    ENDS,
    GDR,
    KDA,
    PACKAGES,
    VALUE_HEADS,
    Options,
    T,
    plain,
    results,
    tensors,
    wanted,
)  # fmt: skip

needs_fla = pytest.mark.skipif(find_spec("fla") is None, reason="flash-linear-attention is not installed")


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """One entry for each call of our op. Afterwards flash-linear-attention is as it was."""
    found: list[int] = []
    op = foreign_calls.delta_rule
    monkeypatch.setattr(foreign_calls, "delta_rule", lambda *x, **y: found.append(1) or op(*x, **y))
    yield found
    unregister()


def function(name: str, through: str) -> Callable[..., tuple[Tensor, Tensor | None]]:
    if through == "the backend alone":
        return lambda *x, **y: Call(*x, **y).run()
    register()
    return getattr(importlib.import_module(PACKAGES[name]), name)


BOTH = pytest.mark.parametrize(
    "through", ["the backend alone", pytest.param("flash-linear-attention", marks=needs_fla)]
)


@BOTH
@pytest.mark.parametrize("name, case", ALL)
def test_outputs_states_and_gradients(name: str, case: str, through: str, calls: list[int]) -> None:
    options = CASES[case]
    x, call = tensors(name, options), function(name, through)
    assert Call(**x, **plain(options)).refusal() is None
    exact = results(lambda y: wanted(y, options), {key: y.double() for key, y in x.items()})
    got = results(lambda y: call(**y, **plain(options), output_final_state=True), x)
    assert got.keys() == exact.keys() and len(calls) == 1
    assert got["o"].is_contiguous() and got["final state"].is_contiguous()
    for key, y in exact.items():
        assert got[key].shape == y.shape
        torch.testing.assert_close(got[key].double(), y, atol=2e-5 * float(y.abs().max()), rtol=0, msg=key)


@BOTH
@pytest.mark.parametrize("name", [GDR, KDA])
def test_bfloat16(name: str, through: str) -> None:
    """Outputs in bfloat16 and states in float32, also for a first state in bfloat16."""
    x = {key: y.bfloat16() for key, y in tensors(name, {"initial_state": ...}).items()}
    exact, state = wanted({key: y.double() for key, y in x.items()}, {})
    o, final = function(name, through)(**x, output_final_state=True)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    torch.testing.assert_close(o.double(), exact, atol=0.01 * float(exact.abs().max()), rtol=0.01)
    torch.testing.assert_close(final.double(), state, atol=0.01 * float(state.abs().max()), rtol=0.01)


@BOTH
@pytest.mark.parametrize("name", [GDR, KDA])
def test_arguments_by_place_and_no_final_state(name: str, through: str, calls: list[int]) -> None:
    x, call = tensors(name, {"initial_state": ...}), function(name, through)
    inputs = [x[key] for key in ("q", "k", "v", "g", "beta")]
    o, final = call(*inputs, 0.3, x["initial_state"], True, True)
    exact, state = wanted(x, {"scale": 0.3, "use_qk_l2norm_in_kernel": True})
    torch.testing.assert_close(o, exact, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(final, state, atol=1e-4, rtol=1e-4)
    assert call(*inputs, output_final_state=None)[1] is None  # a layer's use_cache
    assert len(calls) == 2


def changed(name: str, **changes: Any) -> Options:
    """A call in which tensors are replaced by functions of them."""
    x: Options = tensors(name, {"initial_state": ..., "A_log": ..., "dt_bias": ...})
    for key, change in changes.items():
        x[key] = change(x[key]) if callable(change) else change
    return x


GATED = {"use_gate_in_kernel": True}
REFUSED: list[tuple[str, Options, str]] = [
    (GDR, {"cp_context": object()}, "cp_context is not supported"),
    (KDA, {"return_intermediate_states": True}, "return_intermediate_states is not supported"),
    (KDA, {"use_graph": True}, "use_graph is not supported"),
    (GDR, {"allow_neg_eigval": True}, "allow_neg_eigval needs use_beta_sigmoid_in_kernel"),
    (GDR, {**GATED, "A_log": None}, "use_gate_in_kernel needs A_log"),
    (KDA, {**GATED, "safe_gate": True}, "safe_gate needs lower_bound"),
    (GDR, {**GATED, "lower_bound": -5.0}, "lower_bound is for one decay per channel"),
    (KDA, {**GATED, "safe_gate": True, "lower_bound": -6.0}, r"lower_bound of a safe_gate must be in \[-5, 0\)"),
    (KDA, {**GATED, "safe_gate": True, "lower_bound": 0.0}, r"lower_bound of a safe_gate must be in \[-5, 0\)"),
    (GDR, {"g": lambda x: x.double()}, "not in float64"),
    (KDA, {**GATED, "A_log": lambda x: x.double()}, "not in float64"),
    (GDR, {"initial_state": lambda x: x.to("meta")}, "on one CPU or one GPU"),
    (GDR, {"k": lambda x: x.bfloat16()}, "q, k and v must have one dtype"),
    (KDA, {"v": lambda x: x.new_zeros(2, T, VALUE_HEADS, 264)}, "at most 256 channels"),
    (GDR, {"v": lambda x: x[:, :, :3]}, "multiple of that of q heads"),
    (GDR, {"cu_seqlens": torch.tensor(ENDS)}, "must be in one row"),
]


@pytest.mark.parametrize("name, changes, reason", REFUSED, ids=[reason for *_, reason in REFUSED])
def test_refused(name: str, changes: Options, reason: str) -> None:
    assert re.search(reason, Call(**changed(name, **changes)).refusal() or "")


@needs_fla
@pytest.mark.parametrize("name", [GDR, KDA])
@pytest.mark.parametrize("changes", [{"chunk_size": 48}, {"allow_neg_eigval": True}], ids=str)
def test_a_refused_call_reaches_flash_linear_attention(name: str, changes: Options, calls: list[int]) -> None:
    """Whose own errors follow, also where an argument is unknown to us."""
    x = tensors(name, {})
    with pytest.raises(ValueError, match="chunk_size|allow_neg_eigval"):
        function(name, "flash-linear-attention")(**x, **changes)
    assert not calls


@needs_fla
@pytest.mark.parametrize("name", [GDR, KDA])
def test_reasons_as_flash_linear_attention_logs_them(name: str) -> None:
    register()
    from fastweights.integrations.flash_linear_attention.backend import FastWeightsBackend

    backend, x = FastWeightsBackend(), tensors(name, {})
    assert backend.verify(name, **x) == (True, None)
    assert backend.verify(name, **x, cp_context=object()) == (False, "cp_context is not supported")
    served, reason = backend.verify(name, **x, head_first=True)
    assert not served and "head_first" in reason


@needs_fla
@pytest.mark.parametrize("name", [GDR, KDA])
def test_ours_is_asked_first_until_it_leaves(name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    from fla.ops.gated_delta_rule.backends import FlashQLABackend
    from fla.ops.kda.backends.flash_kda import FlashKDABackend

    x, call = tensors(name, {}), function(name, "flash-linear-attention")
    from fastweights.integrations.flash_linear_attention.backend import FastWeightsBackend

    assert FastWeightsBackend.priority < min(FlashQLABackend.priority, FlashKDABackend.priority)
    register()
    call(**x)
    assert len(calls) == 1
    for leave in (lambda: monkeypatch.setenv("FLA_FASTWEIGHTS", "0"), unregister):
        leave()
        with pytest.raises(Exception):  # noqa: B017  # its kernels need a GPU, each version says so in its own way
            call(**x)
        monkeypatch.delenv("FLA_FASTWEIGHTS", raising=False)
    assert len(calls) == 1
    register()
    call(**x)
    assert len(calls) == 2


def test_nothing_is_imported_before_register(monkeypatch: pytest.MonkeyPatch) -> None:
    package = register.__module__
    monkeypatch.setitem(sys.modules, "fla", None)  # an import of it fails
    for name in [name for name in sys.modules if name.startswith(package)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys.modules[package.rpartition(".")[0]], "flash_linear_attention", None, raising=False)
    importlib.import_module(package).unregister()


@pytest.mark.parametrize(
    "found, message",
    [
        (None, r"is not installed; install flash-linear-attention 0.6: pip install 'flash-linear-attention==0.6.\*'"),
        ("0.7.0", "must be of version 0.6, got 0.7.0; install flash-linear-attention 0.6"),
    ],
)  # fmt: skip
def test_versions_that_do_not_fit(found: str | None, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if found is None:
            raise environment.PackageNotFoundError(package)
        return found

    monkeypatch.setattr(environment, "version", version)
    with pytest.raises(ValueError, match=message):
        register()


def test_backends_that_are_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda package: "0.6.0")
    monkeypatch.setenv(NO_DISPATCH, "1")
    with pytest.raises(ValueError, match=f"{NO_DISPATCH} must not be 1 .* unset it"):
        register()
