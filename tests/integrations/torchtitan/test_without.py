"""What the package does without torchtitan, or with a version that it does not know."""

from __future__ import annotations

from typing import Any

import pytest

from fastweights import environment
from fastweights.integrations.torchtitan import config_registry, model_registry, save_model_folder
from fastweights.models import FastWeightsConfig


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            None,
            r"^torchtitan is not installed; install it with Python 3.11 or later: pip install 'fastweights\[torchtitan\]'",
        ),
        ("0.2.2", r"^torchtitan must be of version 0.3.0, got 0.2.2; install it with"),
        ("0.4.0", r"^torchtitan must be of version 0.3.0, got 0.4.0; install it with"),
    ],
)
def test_other_versions_are_refused(
    found: str | None, message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(environment, "installed_version", lambda *names: found)
    config = FastWeightsConfig(num_hidden_layers=1)
    for call in (
        lambda: model_registry("gdn-340m"),
        lambda: save_model_folder(tmp_path, tmp_path / "model", config),
        config_registry.debug,
        config_registry.gdn_340m,
    ):
        with pytest.raises(ValueError, match=message):
            call()


def test_there_is_a_function_for_every_preset() -> None:
    named = dir(config_registry)
    assert {"debug", "gdn_340m", "gka_hybrid_2.8b"} <= set(named)
    assert all(callable(getattr(config_registry, name)) for name in named)
    with pytest.raises(AttributeError, match="has no attribute gdn_341m"):
        getattr(config_registry, "gdn_341m")  # noqa: B009
