"""What every test of the integrations leaves behind: models of transformers as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastweights.integrations.transformers import restore


@pytest.fixture(autouse=True)
def originals_return() -> Iterator[None]:
    yield
    restore()
