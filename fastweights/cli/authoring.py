"""What a command of another package may use, so that it behaves as the library's own. docs/commands.md has an example.

A command is a function that typer runs, named in the entry point group `fastweights.commands`. It imports torch, and what needs
it, when it runs: `fastweights --help` does not wait for it.
"""

from ..outputs import check_place, claim_files, claim_folder, default_output
from ..stopping import StopSignals
from ..terminal import Console, show
from ._options import (
    AsJson,
    Device,
    DryRun,
    Imports,
    Overrides,
    Overwrite,
    Quiet,
    fail,
    import_mixers,
    one_line_errors,
    output_path,
    training_errors,
    values,
)
from ._output import one_document, show_plan, show_plots

__all__ = [
    "AsJson",
    "Console",
    "Device",
    "DryRun",
    "Imports",
    "Overrides",
    "Overwrite",
    "Quiet",
    "StopSignals",
    "check_place",
    "claim_files",
    "claim_folder",
    "default_output",
    "fail",
    "import_mixers",
    "one_document",
    "one_line_errors",
    "output_path",
    "show",
    "show_plan",
    "show_plots",
    "training_errors",
    "values",
]
