"""`fastweights tasks`: the tasks that `fastweights recall` trains on."""

from typing import Annotated

import typer

from ..terminal import Console
from ._options import Imports, import_mixers, one_line_errors


def tasks(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="One task; all if not given.", show_default=False)
    ] = None,
    imports: Imports = None,
) -> None:
    """List the tasks to train on, or show the sequences and options of one."""
    with one_line_errors():
        import_mixers(imports)
        from ..analysis.task_tables import task_page, tasks_table

        Console().print(tasks_table() if name is None else task_page(name))
