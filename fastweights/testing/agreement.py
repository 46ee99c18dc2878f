"""Whether a model and the server that serves it give the same log probabilities, which training with answers of the server
(reinforcement learning) relies on."""

from __future__ import annotations

import inspect
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_positive, check_whole_number, describe_value
from ..kinds import checked

__all__ = ["Agreement", "check_agreement"]

LENGTHS = (2, 17, 64, 100)  # of the random prompts: within a chunk of most memories, a chunk, and beyond
Server = Callable[..., Sequence[Any]]  # of prompts, or of prompts and the length of the answers


@checked
@dataclass(frozen=True)
class Agreement:
    """How far the log probabilities of a model and of a server differ.

    Attributes:
        differences: the largest absolute difference in each prompt, or in the answer to it, in nats.
        tokens: the place in its prompt, with the answer behind it, of the token that each of them belongs to.
        compared: how many tokens were compared.
    """

    differences: tuple[float, ...]
    tokens: tuple[int, ...]
    compared: int

    @property
    def largest(self) -> float:
        return max(self.differences)

    def __str__(self) -> str:
        prompt = self.differences.index(self.largest)
        return (
            f"log probabilities of {self.compared} tokens differ by at most {self.largest:.3g}, at token {self.tokens[prompt]} "
            f"of prompt {prompt}"
        )


@checked
def check_agreement(
    model: Any,
    server: str | Server,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    answers: int = 0,
    tolerance: float | None = None,
    name: str | None = None,
    timeout: float = 60.0,
    seed: int = 0,
) -> Agreement:
    """Compare log p(token | tokens before it) for every token of some prompts after the first. The model reads each prompt by
    itself and computes them in float32 from its logits.

    With `answers` the tokens that the server writes behind the prompts are compared instead. A model that takes `cu_seqlens`
    reads them as `generate()` does, and as a server that has all prompts in one batch: the prompts packed into one row, then one
    token of each answer per call. Both then compute the same sums, and in float32 may agree bit for bit. Any other model reads
    each prompt with its answer at once.

    Args:
        model: a causal language model of transformers, as the trainer has it.
        server: the address of a server with OpenAI's interface, such as "http://localhost:8000", which is asked for completions
            with `echo` and `prompt_logprobs` (vLLM has both); or a function of a list of prompts, lists of token ids, that
            returns as many lists of log probabilities, each one shorter than its prompt. With `answers` it gets the prompts and
            this number, and returns for each prompt the ids of the tokens that it wrote, and as many log probabilities.
        prompts: lists of at least two token ids; four random ones of 2 to 100 tokens when None.
        answers: how many tokens the server writes behind each prompt, the most likely one each time; 0 compares the prompts.
        tolerance: largest difference that is no error; None for any.
        name: of the model in the server; the first that it lists when None.
        timeout: seconds to wait for an answer of the server.
        seed: of random prompts.

    Raises:
        AssertionError: a difference beyond the tolerance: how large it is and where.
        ValueError: a prompt that does not fit the model, or an answer without a finite log probability for every token.
        ConnectionError: the server cannot be reached, or refuses the request.
    """
    if not hasattr(model, "config") or not hasattr(model, "lm_head"):
        raise TypeError(f"model must be a causal language model of transformers, got {describe_value(model)}")
    check_positive("timeout", timeout)
    if tolerance is not None:
        check_positive("tolerance", tolerance)
    vocabulary = model.config.get_text_config().vocab_size
    if prompts is None:
        check_whole_number("seed", seed)
        draw = torch.Generator().manual_seed(seed)
        prompts = [torch.randint(vocabulary, (length,), generator=draw).tolist() for length in LENGTHS]
    asked = [_check_prompt(index, prompt, vocabulary) for index, prompt in enumerate(prompts)]
    if not asked:
        raise ValueError("prompts must hold at least one prompt, got none")
    if isinstance(server, str) and not server.startswith(("http://", "https://")):
        raise ValueError(
            f"server must be an address that begins with http:// or https://, got {describe_value(server)}"
        )
    if check_whole_number("answers", answers):
        texts, given = _take_answers(server, name, asked, answers, timeout, vocabulary)
        ours, first = _answer_probabilities(model, asked, texts), [len(prompt) for prompt in asked]
    else:
        given = _take_lists(_ask(server, name, asked, timeout) if isinstance(server, str) else server(asked), asked)
        ours, first = [_log_probabilities(model, prompt) for prompt in asked], [1] * len(asked)
    found = []
    for index, (mine, answer) in enumerate(zip(ours, given, strict=True)):
        theirs = torch.as_tensor(answer, dtype=torch.float64)
        if theirs.shape != mine.shape or not theirs.isfinite().all():
            tokens = f"{len(mine)} tokens after the first of prompt" if not answers else f"{len(mine)} tokens of answer"
            raise ValueError(
                f"server must give a finite log probability for each of the {tokens} {index}, got {describe_value(answer)}"
            )
        found.append((mine.double().cpu() - theirs).abs().max(0))
    agreement = Agreement(
        tuple(float(x.values) for x in found),
        tuple(at + int(x.indices) for at, x in zip(first, found, strict=True)),
        answers * len(asked) or sum(len(prompt) - 1 for prompt in asked),
    )
    if tolerance is not None and agreement.largest > tolerance:
        raise AssertionError(
            f"{agreement}, more than tolerance, {tolerance}; serve the same weights in the dtype of the model"
        )
    return agreement


def _check_prompt(index: int, prompt: Sequence[int], vocabulary: int) -> list[int]:
    tokens = [check_whole_number(f"prompts[{index}]", token, high=vocabulary - 1) for token in prompt]
    if len(tokens) < 2:
        raise ValueError(
            f"prompts[{index}] must hold at least two tokens, got {len(tokens)}: the first one has no past"
        )
    return tokens


def _take_lists(given: object, asked: list[list[int]]) -> list[Any]:
    """What a server returned, one entry per prompt."""
    if not isinstance(given, Iterable):
        raise TypeError(f"server must return lists of log probabilities, got {describe_value(given)}")
    entries = list(given)
    if len(entries) != len(asked):
        raise ValueError(f"server must answer each of {len(asked)} prompts, got {len(entries)} answers")
    return entries


def _take_answers(
    server: Any, name: str | None, asked: list[list[int]], tokens: int, timeout: float, vocabulary: int
) -> tuple[list[list[int]], list[Any]]:
    """The tokens that a server writes behind prompts, and their log probabilities."""
    given = _ask_answers(server, name, asked, tokens, timeout) if isinstance(server, str) else server(asked, tokens)
    texts, numbers = [], []
    for index, entry in enumerate(_take_lists(given, asked)):
        pair = entry if isinstance(entry, Sequence) and len(entry) == 2 else (None, None)
        if not isinstance(pair[0], Sequence) or len(pair[0]) != tokens:
            raise ValueError(
                f"server must write {tokens} tokens behind prompt {index} and give their ids and log probabilities, got "
                f"{describe_value(entry)}; let it ignore the token that ends a text"
            )
        texts.append([check_whole_number(f"token of answer {index}", x, high=vocabulary - 1) for x in pair[0]])
        numbers.append(pair[1])
    return texts, numbers


@contextmanager
def _in_evaluation_mode(model: Any) -> Iterator[None]:
    was_training = model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was_training)


@torch.no_grad()
def _log_probabilities(model: Any, text: list[int]) -> Tensor:
    """[T - 1], of a text that is read at once."""
    ids = torch.tensor([text], device=model.device)
    with _in_evaluation_mode(model):
        logits = model(ids, use_cache=False).logits[0, :-1]
    return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


@torch.no_grad()
def _answer_probabilities(model: Any, prompts: list[list[int]], answers: list[list[int]]) -> list[Tensor]:
    """[answers] of each prompt."""
    if "cu_seqlens" not in inspect.signature(model.forward).parameters:
        pairs = zip(prompts, answers, strict=True)
        return [_log_probabilities(model, [*prompt, *answer])[len(prompt) - 1 :] for prompt, answer in pairs]
    row_T = torch.tensor([token for prompt in prompts for token in prompt], device=model.device)
    edges = torch.tensor([0, *map(len, prompts)], device=model.device).cumsum(0)
    ids_NT, found = torch.tensor(answers, device=model.device), []
    with _in_evaluation_mode(model):
        output = model(row_T[None], cu_seqlens=edges, use_cache=True, logits_to_keep=edges[1:] - 1)
        logits_NV, cache = output.logits[0], output.past_key_values
        for ids_N1 in ids_NT.split(1, 1):
            found.append(logits_NV.float().log_softmax(-1).gather(1, ids_N1))
            if len(found) < ids_NT.shape[1]:
                logits_NV = model(ids_N1, past_key_values=cache).logits[:, 0]
    return list(torch.cat(found, 1))


def _find_model(address: str, name: str | None, timeout: float) -> tuple[str, str]:
    """The address of a server's interface, and the name of the model: the first that it lists when None."""
    root = address.rstrip("/").removesuffix("/v1") + "/v1"
    return root, name or _read(f"{root}/models", None, timeout)["data"][0]["id"]  # a list that is never empty


def _ask_answers(
    address: str, name: str | None, prompts: list[list[int]], tokens: int, timeout: float
) -> list[tuple[list[int], list[float]]]:
    """What a server with OpenAI's interface writes behind prompts, all in one request. vLLM names tokens by their ids."""
    root, name = _find_model(address, name, timeout)
    options = {"model": name, "max_tokens": tokens, "temperature": 0, "logprobs": 1, "ignore_eos": True}
    options |= {"return_tokens_as_token_ids": True, "prompt": prompts}
    answer = _read(f"{root}/completions", options, timeout)
    try:
        told = [choice["logprobs"] for choice in sorted(answer["choices"], key=lambda choice: choice["index"])]
        return [([int(x.removeprefix("token_id:")) for x in one["tokens"]], one["token_logprobs"]) for one in told]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"server must answer with ids and log probabilities of its tokens, got {describe_value(answer)}; serve with a "
            "program that knows return_tokens_as_token_ids, such as vLLM"
        ) from error


def _ask(address: str, name: str | None, prompts: list[list[int]], timeout: float) -> Iterator[list[float]]:
    """The log probabilities of the prompts' tokens after the first, from a server with OpenAI's interface."""
    root, name = _find_model(address, name, timeout)
    options = {"model": name, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 1, "prompt_logprobs": 0}
    for prompt in prompts:
        answer = _read(f"{root}/completions", {**options, "prompt": prompt}, timeout)
        try:
            choice = answer["choices"][0]
            if by_token := choice.get("prompt_logprobs"):
                yield [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], by_token[1:], strict=True)]
            else:
                yield choice["logprobs"]["token_logprobs"][1 : len(prompt)]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"server must answer with log probabilities of the prompt's tokens, got {describe_value(answer)}; serve with a "
                "program that knows echo or prompt_logprobs, such as vLLM"
            ) from error


def _read(address: str, content: dict[str, Any] | None, timeout: float) -> Any:
    data = None if content is None else json.dumps(content).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        said = error.read().decode(errors="replace")[:500]
        raise ConnectionError(f"server at {address} refused the request ({error.code}): {said}") from error
    except OSError as error:
        raise ConnectionError(
            f"server must be the address of a running server, got {address}, which cannot be reached: {error}"
        ) from error
