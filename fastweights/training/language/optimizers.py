"""The optimizer of a training: one of torch's, or Muon for the matrices of the blocks and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..optimization import weight_decay_groups
from .schedule import OPTIMIZERS, Schedule

__all__ = ["MuonWithAdamW", "build_optimizer", "muon_matrices"]


class MuonWithAdamW(torch.optim.Optimizer):
    """Muon for some groups of parameters and AdamW for the rest, as one optimizer with one state.

    Muon orthogonalises the momentum of a matrix (Jordan et al. 2024). Its steps are scaled to have the size of AdamW's
    (Liu et al. 2025, "match_rms_adamw"), so that both take the same learning rate and weight decay.

    Args:
        matrices: groups of parameters for Muon.
        rest: groups for AdamW.
        betas: AdamW's.
        options: of Muon.
    """

    def __init__(
        self,
        matrices: list[dict[str, Any]],
        rest: list[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        options: Mapping[str, Any],
    ) -> None:
        muon = torch.optim.Muon(matrices, lr=lr, **{"adjust_lr_fn": "match_rms_adamw", **options})
        adamw = torch.optim.AdamW(rest, lr=lr, betas=betas, fused=True)
        self._parts = (muon, adamw)
        super().__init__([*muon.param_groups, *adamw.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Both parts work on the groups and the state of the whole."""
        muon, adamw = self._parts
        number = len(muon.param_groups)
        muon.param_groups, adamw.param_groups = self.param_groups[:number], self.param_groups[number:]
        muon.state = adamw.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._share()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both."""
        loss = None if closure is None else closure()
        for part in self._parts:
            part.step()
        return loss


def build_optimizer(run: Schedule, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that the run names, with its groups of the parameters of `model`, a causal language model.

    Raises:
        ValueError: a group of the run that names no parameter of the model.
    """
    groups = weight_decay_groups(model, run.weight_decay, run.groups)
    rate, betas, options = run.learning_rate, (run.beta1, run.beta2), run.optimizer_options
    if run.optimizer == "muon":
        matrices = muon_matrices(model)
        muon, adamw = (
            [{**group, "params": chosen} for group in groups if (chosen := _select(group, matrices, inside))]
            for inside in (True, False)
        )
        return MuonWithAdamW(muon, adamw, lr=rate, betas=betas, options=options)
    if run.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=rate, **{"betas": betas, "fused": True, **options})
    return OPTIMIZERS[run.optimizer](groups, lr=rate, **options)


def muon_matrices(model: nn.Module) -> set[int]:
    """The ids of the parameters that Muon takes: weights of linear layers in the blocks of a causal language model."""
    blocks = model.get_submodule("model.layers").modules()
    return {id(part.weight) for part in blocks if isinstance(part, nn.Linear)}


def _select(group: Mapping[str, Any], matrices: set[int], inside: bool) -> list[nn.Parameter]:
    """The parameters of a group that are among the matrices, or those that are not."""
    return [parameter for parameter in group["params"] if (id(parameter) in matrices) == inside]
