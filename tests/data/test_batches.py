"""Batches are a pure function of their arguments, pinned to the bit."""

import hashlib
import pickle
from typing import Any

import pytest
import torch

from fastweights.data import TASKS, RecallTask, StateTracking, make_task

# sha256 of input_ids and labels as little-endian int64: must never change, on any machine or version
PINNED = {
    "mqar": "d9712e6c202b309e610d7fd42ba674249c49d672b3067564aa6fe825339572eb",
    "mqar-shuffled": "1bb2c00be4cd13a91d86fefc111f8b937706839b08f0b8da19a2a8824e67faeb",
    "copy": "b5019152a1762b0461502ac56f0779b4e56cacc13c736129580665756125b208",
    "mqar-ood": "7b91966bc250479a3ed6f87213201c6e8e906edfbe6c1ae3c968f342ecd95bca",
    "mqar-shuffled-ood": "3cdc286fa9172170d9877971222299413a577783a1f89ddabb2f4935f3b2cb31",
    "palindrome": "10e05c6b43b64e7edcc8a08a177e20c51b37cee333e00bdde4e8b36dd1655e20",
    "selective-copy": "518c7a288e0eb9124207c0909cc5071a56276173e607a3ea50719f0f564211f8",
    "parity": "bd9540479151de5e95837332219b10911778cb95043b83574466f698923620be",
    "s3": "c1625eff035b030e6e6981e0d9524b82a8c3a0c495ecbf8d30f3130e6217c2b2",
    "s5": "a4e45fb18eb2f7bc8a4c00243d2863b124cfa38c4fd03c5c6007fbef90c5763c",
}


SIZES: dict[str, tuple[dict[str, Any], ...]] = {
    "state tracking": ({"pairs": 8}, {"pairs": 48, "test_length": 256}, {"pairs": 9, "elements": "swaps"}),
    "others": ({"pairs": 8, "length": 40}, {"pairs": 48, "length": 256}, {"pairs": 3, "vocab_size": 32}),
}


@pytest.mark.parametrize("name", PINNED)
def test_pinned_values(name: str) -> None:
    sha = hashlib.sha256()
    for options in SIZES["state tracking" if issubclass(TASKS[name], StateTracking) else "others"]:
        for split in ("train", "test"):
            for seed, index in ((0, 0), (2**40 + 7, 2**35 + 1)):
                batch = make_task(name, **options).batch(split, seed=seed, index=index, batch_size=16)
                for tensor in batch:
                    sha.update(tensor.numpy().astype("<i8").tobytes())
    assert sha.hexdigest() == PINNED[name]


def test_shapes_and_types(task: RecallTask) -> None:
    input_ids, labels = task.batch("train", seed=0, index=0, batch_size=3)
    for tensor in (input_ids, labels):
        assert tensor.shape == (3, task.length) and tensor.dtype == torch.int64 and tensor.is_contiguous()
    labelled = (labels != -100).sum(1).tolist()
    assert labelled == [task.pairs] * 3 if task.name in PINNED else all(labelled)


def test_a_batch_depends_on_nothing_but_its_arguments(task: RecallTask) -> None:
    wanted = task.batch("test", seed=5, index=3, batch_size=4)
    torch.manual_seed(1)
    task.batch("train", seed=5, index=3, batch_size=4)
    again = pickle.loads(pickle.dumps(task)).batch("test", seed=5, index=3, batch_size=4)
    assert torch.equal(wanted.input_ids, again.input_ids) and torch.equal(wanted.labels, again.labels)


@pytest.mark.parametrize("change", [{"seed": 6}, {"index": 4}, {"index": 3 + 2**32}, {"split": "train"}])
def test_another_argument_gives_another_batch(task: RecallTask, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"split": "test", "seed": 5, "index": 3, "batch_size": 4}
    first = task.batch(**arguments)
    second = task.batch(**(arguments | change))
    assert not (first.input_ids == second.input_ids).all(1).any()


def test_writing_into_a_batch_changes_no_other(task: RecallTask) -> None:
    first = task.batch("train", seed=0, index=0, batch_size=2)
    wanted = first.input_ids.clone()
    first.input_ids.zero_()
    assert torch.equal(task.batch("train", seed=0, index=0, batch_size=2).input_ids, wanted)


@pytest.mark.parametrize(
    "error, bad",
    [
        (ValueError, {"split": "validation"}),
        (TypeError, {"split": None}),
        (ValueError, {"seed": -1}),
        (ValueError, {"seed": 2**63}),
        (TypeError, {"seed": 1.0}),
        (TypeError, {"seed": True}),
        (ValueError, {"index": -1}),
        (TypeError, {"index": "0"}),
        (ValueError, {"batch_size": 0}),
        (TypeError, {"batch_size": 2.0}),
        (TypeError, {"batch_size": True}),
    ],
    ids=str,
)
def test_bad_arguments(task: RecallTask, error: type[Exception], bad: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"split": "train", "seed": 0, "index": 0, "batch_size": 1}
    (name,) = bad
    with pytest.raises(error, match=name):
        task.batch(**(arguments | bad))
