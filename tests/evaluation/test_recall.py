"""Accuracy counts the labelled positions of the test split, all of them and nothing else."""

from types import SimpleNamespace

import pytest
import torch

from fastweights.data import make_task
from fastweights.evaluation import recall_accuracy
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

TASK = make_task("mqar-shuffled", pairs=3, vocab_size=16)


class Oracle(torch.nn.Module):
    """Knows the answers: each hidden state is the one-hot right value, or a wrong one where `spoil` says so."""

    def __init__(self, spoil):
        super().__init__()
        self.spoil = spoil
        self.lm_head = torch.nn.Identity()
        self.config = SimpleNamespace(num_hidden_layers=0)
        self.seen, self.blocks = [], []

    def model(self, input_ids, attention_mask, past_key_values):
        if past_key_values.columns == 0:  # a new sequence; its first block holds the pairs
            past_key_values.pairs = input_ids[:, 0:6:2], input_ids[:, 1:6:2]
            self.seen.append((self.training, torch.is_grad_enabled(), input_ids))
        past_key_values.columns += input_ids.shape[1]
        self.blocks.append(input_ids.shape[1])
        keys, values = past_key_values.pairs
        same = input_ids[:, :, None] == keys[:, None]
        answers = (same * values[:, None]).sum(-1)
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(self.spoil(answers), 16).float())


@pytest.mark.parametrize("examples", [1, 7, 128, 300])
def test_an_oracle_is_right_on_every_example(examples):
    oracle = Oracle(lambda answers: answers)
    assert recall_accuracy(oracle, TASK, seed=0, examples=examples) == 1.0
    assert sum(len(tokens) for _, _, tokens in oracle.seen) == examples


def test_errors_are_counted_at_the_queries_only():
    def last_query_wrong(answers):
        answers[:, -1] = 0
        answers[:, :6] = 0  # the context is not asked for
        return answers

    assert recall_accuracy(Oracle(last_query_wrong), TASK, seed=0, examples=200) == pytest.approx(2 / 3)


def test_the_model_is_tested_in_evaluation_mode_without_gradients_and_left_as_it_was():
    oracle = Oracle(lambda answers: answers).train()
    recall_accuracy(oracle, TASK, seed=0, examples=1)
    assert oracle.seen[0][:2] == (False, False)
    assert oracle.training


def test_examples_are_those_of_the_test_split_and_the_seed():
    oracles = [Oracle(lambda answers: answers) for _ in range(2)]
    for seed, oracle in enumerate(oracles):
        recall_accuracy(oracle, TASK, seed=seed, examples=4)
        expected = TASK.batch("test", seed=seed, index=0, batch_size=4).input_ids
        assert torch.equal(oracle.seen[0][2], expected)
    assert not torch.equal(oracles[0].seen[0][2], oracles[1].seen[0][2])


def test_more_examples_than_a_batch_holds_are_new_ones():
    oracle = Oracle(lambda answers: answers)
    recall_accuracy(oracle, TASK, seed=3, examples=300)
    batches = [TASK.batch("test", seed=3, index=index, batch_size=size) for index, size in enumerate((128, 128, 44))]
    assert torch.equal(torch.cat([tokens for *_, tokens in oracle.seen]), torch.cat([b.input_ids for b in batches]))


def test_long_sequences_go_through_the_model_a_few_at_a_time():
    oracle, task = Oracle(lambda answers: answers), make_task("mqar-shuffled", pairs=3, length=30_000, vocab_size=16)
    assert recall_accuracy(oracle, task, seed=0, examples=5) == 1.0
    assert [len(tokens) for _, _, tokens in oracle.seen] == [2, 2, 1]
    assert max(oracle.blocks) == 512 and sum(oracle.blocks) == 3 * 30_000


@pytest.mark.parametrize("task", ["mqar", "mqar-shuffled", "copy"])
def test_accuracy_does_not_depend_on_the_block(task):
    torch.manual_seed(0)
    lm = FastWeightsForCausalLM(
        FastWeightsConfig(vocab_size=16, hidden_size=16, num_hidden_layers=1, num_heads=2, mixer="gdn")
    )
    made = make_task(task, pairs=3, length=40, vocab_size=16)
    blocks = [recall_accuracy(lm, made, seed=0, examples=100, block=block) for block in (512, 40, 7, 1)]
    assert 0 < blocks[0] < 1 and blocks == [blocks[0]] * 4


def test_logits_that_are_not_finite_are_refused_where_that_is_asked_for():
    oracle = Oracle(lambda answers: answers)
    oracle.lm_head = torch.nn.Threshold(0.5, float("nan"))  # NaN for all but the answer
    assert recall_accuracy(oracle, TASK, seed=0, examples=4) < 1
    with pytest.raises(ValueError, match="model must give finite logits"):
        recall_accuracy(oracle, TASK, seed=0, examples=4, finite=True)
