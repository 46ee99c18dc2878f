"""Cross-entropy of rows and its gradient: PyTorch's own, and the kernels (on a GPU or in Triton's interpreter) against it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from fastweights.ops.cross_entropy import cross_entropy_errors, cross_entropy_gradients, cross_entropy_rows
from tests.kernels.cases import DEVICE

BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.kernels)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 50), (5, 4096), (4, 9001)], ids=str)
def test_values_and_gradients(rows, width, backend):
    """Large logits too, and rows that do not count."""
    torch.manual_seed(0)
    z = (30 * torch.randn(rows, width, device=DEVICE)).requires_grad_()
    target = torch.randint(width, (rows,), device=DEVICE)
    target[1::3] = -100
    wanted = F.cross_entropy(z, target, ignore_index=-100, reduction="none")
    log_sums, losses = cross_entropy_rows(z.detach(), target, -100, backend)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(log_sums, z.detach().logsumexp(1), rtol=1e-5, atol=1e-5)
    gradient = torch.tensor(0.3, device=DEVICE)
    (dz,) = torch.autograd.grad(gradient * wanted.sum(), z)
    error = cross_entropy_errors(z.detach(), target, log_sums, gradient, -100, backend)
    torch.testing.assert_close(error, dz, rtol=1e-5, atol=1e-6)
    losses, error = cross_entropy_gradients(z.detach().clone(), target, -100, backend)
    torch.testing.assert_close(losses, wanted.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(error, dz / gradient, rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("classes, width", [(3, 8), (4090, 4104), (5000, 9001)], ids=str)
def test_columns_that_are_no_classes(classes, width, backend):
    """They count in no sum, whatever stands there, and their gradient is 0."""
    z, target = torch.randn(3, width, device=DEVICE), torch.tensor([2, -100, 0], device=DEVICE)
    z[:, classes:] = float("nan")
    wanted, gradient = cross_entropy_gradients(z[:, :classes].clone(), target, -100, backend)
    log_sums, losses = cross_entropy_rows(z[:, :classes], target, -100, backend)
    assert torch.equal(losses, wanted) and log_sums.isfinite().all()
    losses, error = cross_entropy_gradients(z, target, -100, backend, classes=classes)
    assert torch.equal(losses, wanted) and torch.equal(error[:, :classes], gradient)
    assert error.shape == (3, width) and not error[:, classes:].any()


@pytest.mark.kernels
def test_a_target_that_is_no_class():
    """The kernel reads nothing beyond its row."""
    z = torch.randn(3, 7, device=DEVICE)
    target = torch.tensor([7, 2, -1], device=DEVICE)
    _, losses = cross_entropy_rows(z, target, -100, "triton")
    for found in (losses, cross_entropy_gradients(z, target, -100, "triton")[0]):
        assert found[[0, 2]].isnan().all() and found[1].isfinite()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bad_number_spoils_its_row_alone(backend):
    z, target = torch.randn(3, 70, device=DEVICE), torch.tensor([1, 2, 3], device=DEVICE)
    z[1, 60] = float("nan")
    log_sums, losses = cross_entropy_rows(z, target, -100, backend)
    assert losses[1].isnan() and losses[[0, 2]].isfinite().all()
    error = cross_entropy_errors(z, target, log_sums, torch.ones((), device=DEVICE), -100, backend)
    assert error[1].isnan().all() and error[[0, 2]].isfinite().all()
    losses, error = cross_entropy_gradients(z, target, -100, backend)
    assert losses[1].isnan() and error[1].isnan().all() and error[[0, 2]].isfinite().all()
