"""Where a memory's answer z to a key counts as having a direction."""

from __future__ import annotations

SHORTEST = 1e-6
