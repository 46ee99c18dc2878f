"""Whether a model and the server that serves it give the same log probabilities, which training with answers of the server
(reinforcement learning) relies on."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checks import check_positive, check_whole_number, describe_value
from ..kinds import checked

__all__ = ["Agreement", "check_agreement"]

LENGTHS = (2, 17, 64, 100)  # of the random prompts: within a chunk of most memories, a chunk, and beyond
LogProbabilities = Callable[[list[list[int]]], Sequence[Sequence[float]]]


@checked
@dataclass(frozen=True)
class Agreement:
    """How far the log probabilities of a model and of a server differ.

    Attributes:
        differences: the largest absolute difference in each prompt, in nats.
        tokens: the place in its prompt of the token that each of them belongs to.
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
    server: str | LogProbabilities,
    prompts: Sequence[Sequence[int]] | None = None,
    *,
    tolerance: float | None = None,
    name: str | None = None,
    timeout: float = 60.0,
    seed: int = 0,
) -> Agreement:
    """Compare log p(token | tokens before it) for every token of some prompts after the first. The model reads each prompt by
    itself and computes them in float32 from its logits.

    Args:
        model: a causal language model of transformers, as the trainer has it.
        server: the address of a server with OpenAI's interface, such as "http://localhost:8000", which is asked for completions
            with `echo` and `prompt_logprobs` (vLLM has both); or a function of a list of prompts, lists of token ids, that
            returns as many lists of log probabilities, each one shorter than its prompt.
        prompts: lists of at least two token ids; four random ones of 2 to 100 tokens when None.
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
    given = _ask(server, name, asked, timeout) if isinstance(server, str) else server(asked)
    if not isinstance(given, Iterable):
        raise TypeError(f"server must return lists of log probabilities, got {describe_value(given)}")
    answers = list(given)
    if len(answers) != len(asked):
        raise ValueError(f"server must answer each of {len(asked)} prompts, got {len(answers)} answers")
    found = []
    for index, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
        theirs = torch.as_tensor(answer, dtype=torch.float64)
        if theirs.shape != (len(prompt) - 1,) or not theirs.isfinite().all():
            raise ValueError(
                f"server must give a finite log probability for each of the {len(prompt) - 1} tokens after the first of prompt "
                f"{index}, got {describe_value(answer)}"
            )
        found.append((_log_probabilities(model, prompt).double().cpu() - theirs).abs().max(0))
    agreement = Agreement(
        tuple(float(x.values) for x in found),
        tuple(int(x.indices) + 1 for x in found),
        sum(len(prompt) - 1 for prompt in asked),
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


@torch.no_grad()
def _log_probabilities(model: Any, prompt: list[int]) -> Tensor:
    """[T - 1], in evaluation mode."""
    ids, was_training = torch.tensor([prompt], device=model.device), model.training
    try:
        logits = model.eval()(ids, use_cache=False).logits[0, :-1]
    finally:
        model.train(was_training)
    return logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]


def _ask(address: str, name: str | None, prompts: list[list[int]], timeout: float) -> Iterator[list[float]]:
    """The log probabilities of the prompts' tokens after the first, from a server with OpenAI's interface."""
    root = address.rstrip("/").removesuffix("/v1") + "/v1"
    if name is None:
        name = _read(f"{root}/models", None, timeout)["data"][0]["id"]  # the interface's list, which is never empty
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
