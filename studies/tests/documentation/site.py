"""The modules that make the documentation: docs/hooks.py and the writers of pages."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]

_spec = importlib.util.spec_from_file_location("documentation_hooks", ROOT / "docs" / "hooks.py")
assert _spec is not None and _spec.loader is not None
hooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(hooks)


@cache
def pages() -> dict[str, str]:
    """Every page of the site by its path in the repository; those that are generated are in docs/ too."""
    made = {f"docs/{path}": text for path, text in hooks.generated_pages().items()}
    return {**hooks.repository_pages(), **made}
