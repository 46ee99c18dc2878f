"""Every memory layer of the library, and one of a user, in place of attention."""

from __future__ import annotations

import pytest
import torch

from fastweights.layers import MIXERS, MemoryLayer, MemoryOptions, register_mixer
from fastweights.models import HybridModel, linearize
from fastweights.models.hybrid.attention import check_takes_qkv
from fastweights.ops import gated_linear_attention

from .small import CLOSE, hybrid, teacher, tokens

FAST = ["softmax", "gdn", "gka", "lattice", "rls", "palimpsa-d", "mamba2"]


def takes_qkv(name: str) -> bool:
    try:
        check_takes_qkv(name)
        hybrid(to=name, keep=(0, 1, 2), **options(name))
    except ValueError:
        return False
    return True


def options(name: str) -> dict[str, int]:
    return {"window": 4} if name == "softmax" else {}


def check(lm: HybridModel) -> None:
    """Whole, in steps and padded the same, and every parameter learns."""
    ids = tokens()
    whole = lm(ids, labels=ids)
    whole.loss.backward()
    silent = [name for name, p in lm.named_parameters() if p.grad is None]
    assert not silent and torch.isfinite(whole.loss)
    with torch.no_grad():
        cache, parts = None, []
        for part in ids.split((6, 1, 4), 1):
            output = lm(part, past_key_values=cache, use_cache=True)
            cache, parts = output.past_key_values, [*parts, output.logits]
        torch.testing.assert_close(torch.cat(parts, 1), whole.logits, **CLOSE)
        mask = torch.tensor([[0] * 3 + [1] * 8, [1] * 11])
        padded = lm(ids, attention_mask=mask).logits[:1, 3:]
        torch.testing.assert_close(padded, lm(ids[:1, 3:]).logits, **CLOSE)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in MIXERS]
)
def test_every_mixer_that_takes_q_k_and_v(name):
    if not takes_qkv(name):
        with pytest.raises(ValueError, match="must be a mixer (that takes q, k and v|with one q, k and v)"):
            hybrid(to=name, **options(name))
        return
    check(hybrid("qwen3", name, **options(name)))


def test_most_mixers_take_q_k_and_v():
    left_out = {name for name in MIXERS if not takes_qkv(name)}
    assert left_out <= {"deltaproduct", "gated-deltaproduct", "rwkv7"}


def test_a_window_in_place_of_attention_is_the_attention_within_it():
    """With q and k as they come, groups of query heads and the scale of attention."""
    lm, ids = teacher("gemma3_text", sliding_window=64), tokens(1, 9)
    student = linearize(lm, to="softmax", window=16)
    torch.testing.assert_close(student(ids).logits, lm(ids).logits, **CLOSE)
    assert student.state_size(1000) == 4 * 2 * 15 * 2 * 12


@register_mixer("of-a-user", summary="s", equation="e", source="s")
class OfAUser(MemoryLayer):
    Options = MemoryOptions
    op = gated_linear_attention

    def rule(self, x_BTD, q_BTHK, k_BTHK, v_BTGV, run):
        return run(self.op, q_BTHK, k_BTHK, v_BTGV, -torch.ones_like(q_BTHK[..., 0]))


def test_a_memory_of_a_user():
    check(hybrid(to="of-a-user"))
