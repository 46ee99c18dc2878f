"""Measurements of a text model: one record per context length, task, depth or metric."""

from dataclasses import dataclass

import numpy as np

from ..kinds import checked

__all__ = ["HarnessScore", "LengthPerplexity", "NeedleRecall", "RulerRecall", "SuiteScores", "WordRecall"]


@checked
@dataclass(frozen=True, kw_only=True)
class LengthPerplexity:
    """The losses of a model on texts of one length.

    Attributes:
        length: L, tokens of context and prediction together.
        loss: mean of -ln p(x_t | x_0 ... x_(t-1)) over the positions t = 1 ... L - 1 of all texts, in nats per token. It is the
            loss of the full forward on texts cut to L tokens.
        last_loss: the same over the last `stretch` positions before L alone, where (nearly) all of the context can help. A
            memory that keeps using a longer context has a last_loss that keeps falling with L.
        texts: how many texts the means are over, the same ones at every length.
        joined: how many of these are documents joined to one another because too few were long enough.
    """

    length: int
    loss: float
    last_loss: float
    texts: int
    joined: int

    @property
    def perplexity(self) -> float:
        """e^loss"""
        return float(np.exp(self.loss))

    @property
    def last_perplexity(self) -> float:
        """e^last_loss"""
        return float(np.exp(self.last_loss))


@checked
@dataclass(frozen=True, kw_only=True)
class WordRecall:
    """Accuracy of a text model on a recall task in words of its vocabulary.

    Attributes:
        task, length, pairs, symbols, examples: the task, its tokens, its associations and words, and the sequences measured.
        accuracy: part of the queries, 0 to 1, whose right word is the most likely one of the whole vocabulary.
        chance: what guessing among the values shown would give, 1 / pairs.
    """

    task: str
    length: int
    pairs: int
    symbols: int
    examples: int
    accuracy: float
    chance: float


@checked
@dataclass(frozen=True, kw_only=True)
class NeedleRecall:
    """Needle retrieval at one depth of texts of one length.

    Attributes:
        task, length, depth: name, tokens of prompt and answer together (at most), part of the text before the needle.
        examples: texts.
        found: part of them, 0 to 1, in whose greedy continuation the value stands, RULER's score.
        exact: part of them in which every token of the answer is the most likely one after the right tokens before it: the
            greedy continuation then begins with the answer as the tokenizer writes it.
        answer_loss: mean of -ln p over the answers' tokens, in nats. It distinguishes models long before one of them is right.
    """

    task: str
    length: int
    depth: float
    examples: int
    found: float
    exact: float
    answer_loss: float


@checked
@dataclass(frozen=True, kw_only=True)
class RulerRecall:
    """A task of RULER with several facts in a text, on texts of one length.

    Attributes:
        task, length: name, tokens of prompt and answer together (at most).
        examples: texts.
        found: part of the answers, 0 to 1, that stand in the greedy continuation, the mean over texts: RULER's score.
        exact: part of the texts in which every token of the answer is the most likely one after the right tokens before it.
        answer_loss: mean of -ln p over the answers' tokens, in nats. It distinguishes models long before one of them is right.
    """

    task: str
    length: int
    examples: int
    found: float
    exact: float
    answer_loss: float


@checked
@dataclass(frozen=True, kw_only=True)
class HarnessScore:
    """One number of the harness: the value of a task's metric, or its standard error (`acc_stderr`).

    Attributes:
        cut_prompts: examples of the task, or of the tasks of a group, whose prompts were longer than the `max_length` of the
            evaluation and lost their beginning.
        cut_tokens: tokens that these prompts lost together.
    """

    task: str
    metric: str
    value: float
    cut_prompts: int = 0
    cut_tokens: int = 0


@checked
@dataclass(frozen=True, kw_only=True)
class SuiteScores:
    """A row of the table of a suite: the numbers of the model that was measured, or of one that a paper prints.

    Attributes:
        source: name of the suite; or the paper and its table, of whose columns the row is.
        size: parameters and training tokens of the paper's models; "" of the model that was measured.
        model: the name in the paper, or "this model".
        values: the number of each "task/metric", accuracies in percent; None where it was not measured.
        average: over the values that are no perplexity; None where one was not measured or the paper prints none. It is the
            paper's own where it prints one.
    """

    source: str
    size: str
    model: str
    values: dict[str, float | None]
    average: float | None
