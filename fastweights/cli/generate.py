"""`fastweights generate`: a model's continuation of a text, as it comes."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from ..terminal import show
from ._options import Imports, Quiet, import_mixers, one_line_errors


def generate(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="Folder of a saved model, or of a training run.")],
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from standard input.")],
    max_new_tokens: Annotated[int, typer.Option(help="Tokens to write at most.")] = 200,
    temperature: Annotated[float, typer.Option(help="Below 1 sampling keeps closer to the likely tokens.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(help="Sample among the most likely tokens that together have this probability.")
    ] = 0.95,
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token each time.")] = False,
    seed: Annotated[int | None, typer.Option(help="Seed of sampling; a new one each time if not given.")] = None,
    block: Annotated[
        int | None,
        typer.Option(help="Tokens of the prompt read at a time; as many as fit into a GPU's memory if not given."),
    ] = None,
    prompt_lookup: Annotated[
        int | None,
        typer.Option(help="Tokens drafted at a time from an earlier place in the text that goes on alike."),
    ] = None,
    draft: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a smaller model with the same tokenizer, which drafts tokens.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="Torch device, such as cpu or cuda; the GPU, where there is one, if not given.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; the file's if not given.")] = None,
    quiet: Quiet = False,
    imports: Imports = None,
) -> None:
    """Print a model's continuation of a text, token by token, and then how fast it came.

    Only the continuation goes to standard output. The prompt may be of any length: it is read in blocks
    where memory asks for it. Drafts (--prompt-lookup, --draft) change the speed, and the
    text only where tokens are drawn: other draws of the same distribution.
    """
    with one_line_errors(memory="a smaller --block, or --dtype bfloat16,"):
        import_mixers(imports)
        import torch

        from ..evaluation import continue_text
        from ..evaluation.continuation import TimedStreamer
        from ..models.loading import load_language_model

        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        text = _standard_input() if prompt == "-" else prompt
        language_model, tokenizer = load_language_model(model, device=device, dtype=dtype)
        drafting = None
        if draft is not None:
            drafting, other = load_language_model(draft, device=device, dtype=dtype)
            if other.get_vocab() != tokenizer.get_vocab():
                raise ValueError("--draft must have the tokenizer of MODEL, got one with another vocabulary")
        streamer = TimedStreamer(tokenizer)
        continue_text(
            language_model,
            tokenizer,
            text,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            greedy=greedy,
            seed=seed,
            block=block,
            streamer=streamer,
            prompt_lookup=prompt_lookup,
            draft=drafting,
        )
        if not quiet:
            show(streamer.speed(), error=True)


def _standard_input() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be text in UTF-8, but {error.reason} at byte {error.start}") from None
