"""What stands under the layers of vLLM's own models: the numbers of transformers, over a pool in vLLM's layout."""

from __future__ import annotations

from copy import copy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from fastweights.serving.vllm import delta_layers
from fastweights.serving.vllm.delta_layers import Places, channel_decay, head_gates, places_of_prompts, read_tokens
from tests.kernels.cases import DEVICE

from ..integrations.tiny_models import EARLIER

HEADS, VALUE_HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 12, 4
CHANNELS = 2 * HEADS * KEY + VALUE_HEADS * VALUE
UNTOUCHED = 7.0
LENGTH = 80
# How many tokens the three sequences read in each step: prompts in pieces, of one token too; the rest comes one by one.
STEPS = [(5, 0, 70), (66, 1, 3), (1, 0, 1), (0, 9, 0)]
ROWS = torch.tensor([4, 1, 3], dtype=torch.int32, device=DEVICE)


def drawn(channels: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [3, T, C], beta, g and filters."""
    torch.manual_seed(0)
    x, filters = torch.randn(3, LENGTH, CHANNELS), torch.randn(CHANNELS, WIDTH)
    g = -0.3 * torch.rand(3, LENGTH, VALUE_HEADS, *([KEY] if channels else []))
    return tuple(t.to(DEVICE) for t in (x, 2 * torch.rand(3, LENGTH, VALUE_HEADS), g, filters))  # type: ignore[return-value]


def wanted(x: Tensor, beta: Tensor, g: Tensor, filters: Tensor) -> tuple[Tensor, Tensor]:
    """By transformers: answers, and the states after the last token."""
    if g.ndim == 4:
        modeling = pytest.importorskip("transformers.models.kimi_linear.modeling_kimi_linear")
        rule = modeling.recurrent_kimi_delta_attention
    else:
        rule = torch_recurrent_gated_delta_rule
    y = F.silu(F.conv1d(x.mT, filters[:, None], padding=WIDTH - 1, groups=CHANNELS)[..., :LENGTH]).mT
    q, k, v = y.split([HEADS * KEY, HEADS * KEY, VALUE_HEADS * VALUE], 2)
    q, k = (t.unflatten(2, (HEADS, KEY)).repeat_interleave(VALUE_HEADS // HEADS, 2) for t in (q, k))
    return rule(
        q, k, v.unflatten(2, (VALUE_HEADS, VALUE)), g=g, beta=beta, initial_state=None, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip


def pools(dtype: torch.dtype, turned: bool) -> tuple[Tensor, Tensor]:
    """Of six rows, full of numbers of earlier sequences, whose rows lie further apart than a state is long."""
    windows = torch.full(
        (6, 2, CHANNELS, WIDTH - 1) if turned else (6, 2, WIDTH - 1, CHANNELS), UNTOUCHED, device=DEVICE
    )
    states = torch.full((6, 2, VALUE_HEADS, VALUE, KEY), UNTOUCHED, dtype=dtype, device=DEVICE)
    return windows[:, 0].mT if turned else windows[:, 0], states[:, 0]


@torch.no_grad()
def read_in_steps(given: tuple[Tensor, ...], windows: Tensor, states: Tensor) -> Tensor:
    """As vLLM has them read: those that go on by one token, beside rows of padding, then those of prompts, packed."""
    *tokens, filters = given
    read: list[list[Tensor]] = [[], [], []]
    done = [0, 0, 0]
    steps = [*STEPS, *[(1, 1, 1)] * LENGTH]
    for step in steps:
        counts = [min(count, LENGTH - at) for count, at in zip(step, done, strict=True)]
        ones = [n for n in range(3) if counts[n] == 1 and done[n]]
        prompts = [n for n in range(3) if counts[n] and n not in ones]
        if ones:
            some = (torch.stack([t[n, done[n]] for n in ones] + [t[0, 0]] * 2)[:, None] for t in tokens)
            rows = torch.cat([ROWS[ones], ROWS.new_zeros(2)])
            o = read_tokens(*some, filters, windows, states, Places.find(rows))
            for n, each in zip(ones, o):
                read[n].append(each)
        if prompts:
            some = (torch.cat([t[n, done[n] : done[n] + counts[n]] for n in prompts])[None] for t in tokens)
            edges = torch.tensor([0] + [counts[n] for n in prompts], device=DEVICE).cumsum(0).int()
            started = torch.tensor([done[n] > 0 for n in prompts], device=DEVICE)
            o = read_tokens(*some, filters, windows, states, Places.find(ROWS[prompts], edges, started))[0]
            for n, part in zip(prompts, o.split([counts[n] for n in prompts]), strict=True):
                read[n].append(part)
        done = [at + count for at, count in zip(done, counts, strict=True)]
    return torch.stack([torch.cat(parts) for parts in read])


@pytest.mark.skipif(EARLIER, reason="transformers before 5.15 has these functions under other names")
@pytest.mark.parametrize("turned", [False, True], ids=["windows", "turned windows"])
@pytest.mark.parametrize("channels", [False, True], ids=["heads", "channels"])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.2)], ids=["float32", "bfloat16"]
)
def test_numbers_of_transformers(dtype, close, channels, turned):
    given = drawn(channels)
    windows, states = pools(dtype, turned)
    o, final = wanted(*given)
    assert (read_in_steps(given, windows, states) - o).abs().max() < close
    rows = ROWS.long()
    assert (states[rows].float() - final.mT).abs().max() < close
    assert torch.equal(windows[rows], given[0][:, 1 - WIDTH :])
    others = torch.tensor([0, 2, 5], device=DEVICE)
    assert (windows[others] == UNTOUCHED).all() and (states[others] == UNTOUCHED).all()


def test_the_places_of_prompts_are_found_once_for_all_layers():
    """And anew for a copy of the step with other rows."""
    rows, edges = torch.tensor([5, 4, 1], device=DEVICE), torch.tensor([0, 1, 4, 9], device=DEVICE)
    started = torch.tensor([True, True, False], device=DEVICE)
    step = SimpleNamespace(
        non_spec_state_indices_tensor=rows, non_spec_query_start_loc=edges, has_initial_state=started,
        num_decode_tokens=1, num_prefills=2,
    )  # fmt: skip
    places = places_of_prompts(step)
    assert [x.tolist() for x in places] == [[3, 0], [3, -1], [0, 3, 8]]
    assert places_of_prompts(step) is places
    other = copy(step)
    other.non_spec_state_indices_tensor = rows + 1
    assert places_of_prompts(other).rows.tolist() == [4, 1] and places_of_prompts(step) is places


def test_decays():
    """The gates of Gated DeltaNet and Kimi Delta Attention, whose second form does not fall below its bound."""
    step, bias, rate = torch.randn(1, 5, 3, 4).to(DEVICE), torch.randn(12).to(DEVICE), torch.randn(3).to(DEVICE)
    own = torch.stack([-rate[h].exp() * F.softplus(step[0, :, h] + bias[4 * h : 4 * h + 4]) for h in range(3)], 1)
    torch.testing.assert_close(channel_decay(step, bias, rate.view(1, 1, 3, 1))[0], own)
    gain = torch.randn(1, 5, 3).to(DEVICE)
    beta, g = head_gates(gain, step[..., 0], bias[::4], rate, 2.0)
    torch.testing.assert_close(beta, 2 / (1 + (-gain).exp()))
    torch.testing.assert_close(g[0], own[..., 0])
    bounded = [-5 * torch.sigmoid(rate[h].exp() * (step[0, :, h] + bias[4 * h : 4 * h + 4])) for h in range(3)]
    torch.testing.assert_close(channel_decay(step, bias, rate, -5.0)[0], torch.stack(bounded, 1))


@pytest.mark.parametrize(("ours", "wanted"), [(True, None), (False, 64)])
def test_no_states_in_the_middle_of_a_prompt(ours, wanted, monkeypatch):
    """vLLM's prefill by FlashInfer writes them at multiples of 64 tokens since 0.33, so that prompts need no cut there."""

    class Original:
        def get_prefill_checkpoint_alignment(self) -> int:
            return 64

    monkeypatch.setattr(delta_layers, "prepare", lambda layer: ours)
    assert delta_layers.make_gated_delta_net(Original)().get_prefill_checkpoint_alignment() == wanted
