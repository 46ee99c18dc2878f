"""`fastweights serve`: a saved model behind vLLM's server."""

from pathlib import Path
from typing import Annotated

import typer

from ._options import one_line_errors


def serve(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model, or of a training run.")],
    host: Annotated[str, typer.Option(help="Address that the server listens at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Its port.")] = 8000,
    max_model_len: Annotated[int, typer.Option(help="Tokens of a prompt and its continuation at most.")] = 8192,
    memory: Annotated[
        float | None, typer.Option(help="GiB for the states of all sequences; vLLM's choice on a GPU, 2 on a CPU.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the file's if not given.")] = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model; MODEL if not given.")] = None,
) -> None:
    """Answer requests in the protocol of OpenAI, by vLLM (pip install 'fastweights[vllm]').

    Other options are handed to vLLM's server as they are, such as --max-num-seqs 64.
    """
    with one_line_errors():
        from ..serving.server import serve as run
        from ..serving.server import server_command

        command = server_command(
            model,
            host=host,
            port=port,
            max_model_len=max_model_len,
            memory=memory,
            dtype=dtype,
            name=name,
            others=context.args,
        )
        run(command)
