"""The language models of this library in torchtitan's trainer, started by torchrun:
`torchrun -m torchtitan.train --module fastweights.integrations.torchtitan --config gdn_340m`.

What the package builds on moves between torchtitan's versions: `TESTED` says which one is known here. Without it nothing of this
package can be imported.
"""

from __future__ import annotations

from ... import environment

__all__ = ["INSTALL", "TESTED", "model_registry", "save_model_folder"]

TESTED = "0.3.0"  # the version that the extra `torchtitan` in pyproject.toml asks for
INSTALL = "install it with Python 3.11 or later: pip install 'fastweights[torchtitan]'"

# Here, and by a ValueError, because torchtitan hides an ImportError of a module that --module names.
environment.check_version("torchtitan", environment.installed_version("torchtitan"), TESTED, INSTALL)

from .checkpoints import save_model_folder  # noqa: E402
from .spec import model_registry  # noqa: E402
