"""`fastweights mixers`: the memory layers that every other command knows."""

from typing import Annotated

import typer

from ..terminal import Console
from ._options import Imports, import_mixers, one_line_errors


def mixers(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One memory layer; all if not given.", show_default=False)
    ] = None,
    imports: Imports = None,
) -> None:
    """List the memory layers, or show the equation, source, state, cost and options of one."""
    with one_line_errors():
        import_mixers(imports)
        from ..analysis.mixer_tables import mixer_page, mixers_table

        Console().print(mixers_table() if name is None else mixer_page(name))
