"""The learning rate rises linearly, falls along a cosine and ends near its final fraction; which parameters decay."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from fastweights.training import learning_rate_factor, weight_decay_groups

from ..models.small import HYBRID, model


def factors(steps: int, warmup_steps: int, final: float) -> list[float]:
    return [learning_rate_factor(step, steps=steps, warmup_steps=warmup_steps, final=final) for step in range(steps)]


def test_warm_up_is_linear_and_ends_at_the_peak():
    assert factors(100, 4, 0.1)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_decay_is_a_cosine_to_the_final_fraction():
    values = factors(104, 4, 0.1)
    assert values[54] == pytest.approx(0.55)  # half way
    assert values[29] == pytest.approx(0.1 + 0.9 * 0.8535533905932737)  # a quarter: (1 + cos(pi/4)) / 2
    assert 0.1 < values[-1] < 0.101
    assert all(later < earlier for earlier, later in zip(values[4:], values[5:], strict=False))


def test_warm_up_may_start_from_a_part_of_the_peak():
    """Preconditioned DeltaNet's warm-up, from 4e-5 to 4e-4: the first step has a tenth of the peak."""
    values = [learning_rate_factor(step, steps=100, warmup_steps=4, final=0.1, start=0.1) for step in range(100)]
    assert values[:5] == pytest.approx([0.1, 0.325, 0.55, 0.775, 1.0])
    assert values[4:] == factors(100, 4, 0.1)[4:]


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 0), (1, 1), (3, 3), (2, 1)])
def test_very_short_runs_have_positive_factors(steps, warmup_steps):
    assert all(0 < value <= 1 for value in factors(steps, warmup_steps, 0.1))


def names(lm, group):
    wanted = {id(p) for p in group["params"]}
    return {name for name, p in lm.named_parameters() if id(p) in wanted}


@pytest.mark.parametrize("loaded", [False, True])
def test_norms_biases_and_decay_parameters_are_left_out(tmp_path, loaded):
    lm = model([*HYBRID, "pkda", "gdn"], tie_word_embeddings=True)
    if loaded:
        lm.save_pretrained(tmp_path)
        lm = AutoModelForCausalLM.from_pretrained(tmp_path)
    decayed, kept = weight_decay_groups(lm, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    ends = ("norm.weight", "A_log", "dt_bias", "center", "bias")
    assert names(lm, kept) == {name for name, _ in lm.named_parameters() if name.endswith(ends)}
    assert names(lm, decayed) == {name for name, _ in lm.named_parameters() if not name.endswith(ends)}
    assert len(decayed["params"]) + len(kept["params"]) == len(list(lm.parameters()))
    torch.optim.AdamW([decayed, kept])


def test_marked_parameters_are_left_out_whatever_their_shape():
    class Marked(torch.nn.Linear):
        _no_weight_decay = ("weight",)

    decayed, kept = weight_decay_groups(torch.nn.Sequential(Marked(2, 3), torch.nn.Linear(3, 2)), 0.1)
    assert [list(p.shape) for p in decayed["params"]] == [[2, 3]]
    assert [list(p.shape) for p in kept["params"]] == [[3, 2], [3], [2]]


def test_frozen_parameters_are_left_out():
    lm = model()
    lm.model.embed_tokens.requires_grad_(False)
    decayed, kept = weight_decay_groups(lm, 0.1)
    assert len(decayed["params"]) + len(kept["params"]) == len(list(lm.parameters())) - 1


def test_negative_weight_decay_is_refused():
    with pytest.raises(ValueError, match="weight_decay must be a finite number, at least 0, got -0.1"):
        weight_decay_groups(model(), -0.1)
