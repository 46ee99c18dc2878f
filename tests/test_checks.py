"""The argument checks of the whole library: TypeError for a wrong kind, ValueError for a wrong value."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from fastweights.checks import (
    check_choice,
    check_flag,
    check_number,
    check_positive,
    check_size,
    check_tensor,
    check_text,
    check_texts,
    check_whole_number,
    closest,
    error_prefix,
)

NAN, INFINITY = float("nan"), float("inf")


@pytest.mark.parametrize(
    "check, good",
    [
        (check_size, [1, 7, np.int64(3)]),
        (check_whole_number, [0, 2**63 - 1, np.int32(3)]),
        (lambda name, x: check_whole_number(name, x, low=2, high=3), [2, 3]),
        (check_number, [0, -1.5, np.float64(2.0)]),
        (lambda name, x: check_number(name, x, low=0, high=1), [0, 0.5, 1]),
        (lambda name, x: check_number(name, x, above=0, below=1), [0.1, 0.9]),
        (check_positive, [1, 1e-30]),
        (check_flag, [True, False]),
        (lambda name, x: check_choice(name, x, (None, "a")), [None, "a"]),
        (check_text, ["", "a"]),
        (lambda name, x: check_text(name, x, empty=False), ["a"]),
    ],
)
def test_good_values_come_back(check, good):
    for x in good:
        assert check("x", x) == x


def test_whole_numbers_come_back_as_int_and_numbers_as_float():
    assert type(check_size("x", np.int64(3))) is int and type(check_whole_number("x", np.int8(3))) is int
    assert type(check_number("x", 3)) is float and type(check_positive("x", 3)) is float


@pytest.mark.parametrize(
    "error, check, bad, message",
    [
        (TypeError, check_size, [1.0, "1", True, None, [1]], "x must be a positive whole number, got {}; pass an int"),
        (ValueError, check_size, [0, -1, np.int64(0)], "x must be a positive whole number, got {}"),
        (
            TypeError,
            check_whole_number,
            [1.0, "1", False],
            "x must be a whole number of at least 0, got {}; pass an int",
        ),
        (ValueError, check_whole_number, [-1], "x must be a whole number of at least 0, got {}"),
        (
            ValueError,
            lambda name, x: check_whole_number(name, x, low=2, high=3),
            [1, 4],
            "x must be a whole number from 2 to 3, got {}",
        ),
        (TypeError, check_number, ["1", True, None], "x must be a number, got {}; pass an int or float"),
        (ValueError, check_number, [NAN, INFINITY, -INFINITY], "x must be a finite number, got {}"),
        (
            ValueError,
            lambda name, x: check_number(name, x, low=0, high=1),
            [-0.1, 1.1, NAN],
            "x must be a finite number, at least 0 and at most 1, got {}",
        ),
        (
            ValueError,
            lambda name, x: check_number(name, x, above=0, below=1),
            [0, 1, -0.1, 1.1],
            "x must be a finite number, more than 0 and less than 1, got {}",
        ),
        (TypeError, check_positive, ["1", True], "x must be a number, got {}; pass an int or float"),
        (ValueError, check_positive, [0, -1.0], "x must be positive, got {}"),
        (TypeError, check_flag, [1, 0, "yes", None], "x must be True or False, got {}"),
        (
            TypeError,
            lambda name, x: check_choice(name, x, (None, "a")),
            [1, True],
            "x must be one of None, 'a', got {}",
        ),
        (ValueError, lambda name, x: check_choice(name, x, ("a", "b")), ["c"], "x must be one of 'a', 'b', got {}"),
        (TypeError, check_text, [1, None], "x must be a string, got {}; pass a string"),
        (ValueError, lambda name, x: check_text(name, x, empty=False), [""], "x must be a string, got {}"),
        (TypeError, check_texts, ["ab", [1], None], "x must be a list of strings, got {}"),
        (
            ValueError,
            lambda name, x: check_texts(name, x, empty=False),
            [["a", ""]],
            "x must be a list of strings, none of them empty, got {}",
        ),
    ],
)
def test_bad_values_are_refused(error, check, bad, message):
    for x in bad:
        got = int(x) if isinstance(x, np.integer) else repr(x)
        with pytest.raises(error, match=f"^{re.escape(message.format(got))}$"):
            check("x", x)


def test_a_list_of_texts_comes_back_as_a_tuple():
    assert check_texts("x", ["a", ""]) == ("a", "") == check_texts("x", ("a", ""))


def test_the_nearest_name_is_suggested():
    assert closest("gnd", ["gdn", "kda"]) == " (did you mean 'gdn'?)" and closest("zzz", ["gdn"]) == ""
    with pytest.raises(ValueError, match=r"got 'silo' \(did you mean 'silu'\?\)$"):
        check_choice("gate", "silo", (None, "silu", "sigmoid"))


def test_tensors():
    x = torch.zeros(2)
    assert check_tensor("x", x) is x and check_tensor("x", x.long(), integer=True).dtype == torch.int64
    with pytest.raises(TypeError, match="^x must be a torch.Tensor, got list"):
        check_tensor("x", [1.0])
    with pytest.raises(ValueError, match="^x must be float16, .* got torch.int64"):
        check_tensor("x", x.long())
    with pytest.raises(ValueError, match="^x must be int64, got torch.float32"):
        check_tensor("x", x, integer=True)
    with pytest.raises(ValueError, match="^x must be on the device of the other inputs, meta, got cpu"):
        check_tensor("x", x, torch.zeros(2, device="meta"))


@pytest.mark.parametrize("kind", [TypeError, ValueError])
def test_a_prefix_keeps_the_kind_of_the_error(kind):
    with pytest.raises(kind, match="^layer 3: no$") as caught, error_prefix("layer 3"):
        raise kind("no")
    assert type(caught.value) is kind
    with pytest.raises(KeyError, match="^'no'$"), error_prefix("layer 3"):
        raise KeyError("no")


def test_a_unicode_error_stays_a_value_error():
    with pytest.raises(ValueError, match="^file: 'utf-8' codec"), error_prefix("file"):
        b"\xff".decode()


def test_the_limit_of_a_counter_is_named_in_few_digits():
    for wrong in (2**63, 10**30):
        with pytest.raises(ValueError, match=rf"seed must be a whole number from 0 to 2\^63 - 1, got {wrong}$"):
            check_whole_number("seed", wrong)
    assert check_whole_number("seed", 2**63 - 1) == 2**63 - 1
