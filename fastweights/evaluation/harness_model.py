"""Our models behind lm-evaluation-harness's interface: prompts of any length, read in blocks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, NamedTuple

import torch
from accelerate import find_executable_batch_size
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.logging import tqdm

from ..checks import LARGEST_COUNT, check_size
from .answers import padded, score_continuations
from .causal_models import copy_cache
from .reading import evaluating, read

__all__ = ["Cut", "FastWeightsLM"]


class Cut(NamedTuple):
    """The examples of a task whose prompts were cut, and how many tokens they lost together."""

    prompts: int
    tokens: int


@register_model("fastweights")
class FastWeightsLM(HFLM):
    """The harness's class for transformers models, which ours are, with the same arguments. It differs in three things.

    - Nothing cuts a prompt but `max_length`: a memory has no longest length, and the tokenizer's `model_max_length` is another
      model's. With `max_length` the beginning of a longer prompt is left out, and `cuts` counts it.
    - Prompts and texts are read `block` tokens at a time, and logits exist for the answers alone.
    - Answers with the same prompt, such as the choices of a question, are scored after one reading of it.

    Raises:
        ValueError: `max_length` or `block` is no positive whole number, or `truncation` is set.
    """

    tokenizer: Any

    def __init__(
        self,
        pretrained: Any,
        *,
        max_length: int | None = None,
        block: int = 512,
        truncation: bool = False,
        **options: Any,
    ) -> None:
        if max_length is not None:
            check_size("max_length", max_length, high=LARGEST_COUNT)
        if truncation:
            raise ValueError("truncation must be False: max_length alone cuts prompts; pass max_length")
        self.block, self.limit = check_size("block", block, high=LARGEST_COUNT), max_length
        self._lost: dict[tuple[str, int | None], int] = {}
        super().__init__(pretrained, max_length=max_length, **options)
        self.tokenizer = copy(self.tokenizer)
        self.tokenizer.model_max_length = LARGEST_COUNT  # it would warn of longer prompts

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and its answer, at most."""
        return self.limit or LARGEST_COUNT

    @property
    def cuts(self) -> dict[str, Cut]:
        """The cut prompts of every task that has some. Texts longer than `max_length` count too whose likelihood was summed
        over windows of that length."""
        lost: dict[str, list[int]] = defaultdict(list)
        for (task, _), tokens in self._lost.items():
            lost[task].append(tokens)
        return {task: Cut(len(tokens), sum(tokens)) for task, tokens in lost.items()}

    def get_model_info(self) -> dict[str, Any]:
        """As in the harness, for its own report, with the cuts."""
        return {
            **super().get_model_info(),
            "max_length": self.limit,
            "cuts": {task: cut._asdict() for task, cut in self.cuts.items()},
        }

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        # The last token of an answer is predicted, never read.
        self._count_cuts(requests, lambda request: self.max_length + 1)
        return super().loglikelihood(requests, disable_tqdm)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        self._count_cuts(requests, lambda request: self.max_length)
        return super().loglikelihood_rolling(requests, disable_tqdm)

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        self._count_cuts(requests, self._prompt_room)
        return super().generate_until(requests, disable_tqdm)

    def _prompt_room(self, request: Any) -> int:
        """The tokens of a prompt that leave room for those to be generated."""
        new = normalize_gen_kwargs(request.args[1], self.max_gen_toks)["max_gen_toks"]
        if new >= self.max_length:
            raise ValueError(
                f"max_length must be greater than the {new} tokens that {request.task_name} generates, got {self.max_length}"
            )
        return self.max_length - new

    def _count_cuts(self, requests: Iterable[Any], room: Callable[[Any], int]) -> None:
        """Note what the prompts are about to lose. An example with several answers counts once, with its largest loss."""
        if self.limit is None:
            return
        for request in requests:
            text = "".join(part for part in request.args if isinstance(part, str))
            lost = len(self.tok_encode(text)) - room(request)
            if lost > 0:
                example = (request.task_name, request.doc_id)
                self._lost[example] = max(lost, self._lost.get(example, 0))

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        """ln p of each answer, and whether it is the greedy one. A request: (its texts, tokens before the answer, its own)."""
        if not isinstance(self._reader, PreTrainedModel):  # virtual tokens of PEFT stand in front of every reading
            return super()._loglikelihood_tokens(list(requests), disable_tqdm, override_bs)
        rows = override_bs or (self._detect_batch_size() if self.batch_size == "auto" else self.batch_size)
        sharing: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, (_, prompt, answer) in enumerate(requests):
            sharing[self._cut_prompt(prompt, answer)].append(number)
        prompts = sorted(sharing, key=len, reverse=True)  # a full memory shows at once
        found: dict[int, tuple[float, bool]] = {}
        quiet = disable_tqdm or override_bs is not None or self.rank != 0  # windows of texts come batch by batch
        with tqdm(total=len(requests), disable=quiet, desc="Reading prompts") as bar:
            for start in range(0, len(prompts), rows):
                together = prompts[start : start + rows]
                asked = [(row, number) for row, prompt in enumerate(together) for number in sharing[prompt]]
                answers = [requests[number][2] for _, number in asked]
                for (_, number), score in zip(asked, self._score(together, [row for row, _ in asked], answers, rows)):
                    found[number] = score
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], score)
                bar.update(len(asked))
        return [found[number] for number in range(len(requests))]

    def _cut_prompt(self, prompt: list[int], answer: list[int]) -> tuple[int, ...]:
        """The end of a prompt that, with its answer, is at most `max_length` tokens to read."""
        room = self.max_length + 1 - len(answer)
        if room < 1:
            raise ValueError(
                f"max_length must be at least {len(answer)}, the tokens of an answer, got {self.max_length}"
            )
        return tuple(prompt[-room:])

    def _score(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[int], answers: Sequence[Sequence[int]], rows: int
    ) -> list[tuple[float, bool]]:
        """Of each answer. `owners` are the rows of their prompts; as many answers as `rows` are scored at a time."""
        model, scores = self._reader, []
        ids, mask = padded(prompts, self.device, left=True)
        with evaluating(model), self._mixed_precision():
            cache = read(model, ids[:, :-1], self.block, mask[:, :-1])
            for start in range(0, len(owners), rows):
                part = slice(start, start + rows)
                own = copy_cache(cache)
                own.batch_select_indices(torch.tensor(owners[part], device=self.device))
                before = [prompts[row] for row in owners[part]]
                scores += score_continuations(model, own, before, answers[part], self.block)
        return [(-sum(losses), exact) for losses, exact in scores]

    @property
    def _reader(self) -> Any:
        """The model without an adapter's wrapper, whose weights it has; PEFT's own for virtual tokens."""
        config = getattr(self.model, "active_peft_config", None)
        return self.model if config is None or config.is_prompt_learning else self.model.get_base_model()

    def _mixed_precision(self) -> Any:
        precision = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=precision, enabled=precision is not None)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        return super()._model_generate(context, max_length, stop, prefill_chunk_size=self.block, **options)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The most rows, up to `max_batch_size`, of which one block fits into the memory."""

        @find_executable_batch_size(starting_batch_size=self.max_batch_size)
        def fitting(batch_size: int) -> int:
            with torch.no_grad(), self._mixed_precision():
                self.model(torch.ones(batch_size, self.block, dtype=torch.long, device=self.device))
            return batch_size

        return fitting()
