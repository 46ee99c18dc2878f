"""Hybrids of a pretrained Transformer on a GPU: packed rows in kept attention, and distillations replayed as CUDA graphs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from fastweights.data.text import TextCorpus, TextTokenizer, prepare_text
from fastweights.distillation import DistillRun, distill
from fastweights.layers import attention
from fastweights.models import linearize
from fastweights.results.language import load_result
from fastweights.training.language import load_run

from ..models.hybrid.small import teacher, tokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
LENGTHS = (70, 1, 300, 29)
ROOT = Path(__file__).parents[2]
SHARED = """
output = "{folder}/{name}"
teacher = "{folder}/teacher"
teacher_dtype = "{dtype}"
objective = "{objective}"
cache = "{folder}/tokens"
length = 256
{settings}
max_steps = 10
learning_rate = 1e-3
log_every = 1
evaluate_every = 5
evaluation_rows = 16
context_lengths = []
needles = []
[model]
path = "{folder}/student"
[corpus]
max_megabytes = 4
"""


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "gemma3_text"])
def test_packed_rows_are_separate_documents(model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's kernel for them, with windows, grouped queries and a scale."""
    lm = (
        linearize(teacher(model_type, head_dim=16, max_position_embeddings=512), to="gdn", keep="all").cuda().bfloat16()
    )
    ids = tokens(1, sum(LENGTHS)).cuda()
    alone = torch.cat([lm(part).logits for part in ids.split(LENGTHS, 1)], 1)
    monkeypatch.setattr(attention, "split_by_length", None)  # which a call would fail with
    edges = torch.tensor([0, *LENGTHS], device="cuda").cumsum(0, dtype=torch.int32)
    for longest in ({}, {"max_length_q": max(LENGTHS)}):
        packed = lm(ids, cu_seqlens=edges, **longest).logits
        torch.testing.assert_close(packed.float(), alone.float(), rtol=0.1, atol=0.1)
    packed.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in lm.parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a teacher and a student, and the run's text."""
    place = tmp_path_factory.mktemp("hybrids")
    tokenizer = prepare_text(TextCorpus(max_megabytes=4), TextTokenizer(vocab_size=1024), place / "tokens").tokenizer
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, made in (("teacher", model), ("student", linearize(model, to="gdn", keep="every:2"))):
        made.save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    return place


@pytest.mark.parametrize("compiled", [False, "blocks"])
@pytest.mark.parametrize("objective", ["attention", "logits", "text"])
def test_a_distillation_replays_its_steps(folder: Path, objective: str, compiled: Any) -> None:
    """graphs = True is refused where a step cannot be captured."""
    losses = []
    for graphs in (False, True):
        run = DistillRun(
            output=str(folder / f"{objective}-{compiled}-{graphs}"), model={"path": str(folder / "student")},
            teacher=str(folder / "teacher"), objective=objective, hidden_weight=0.1, corpus=TextCorpus(max_megabytes=4),
            cache=str(folder / "tokens"), length=256, batch_size=8, max_steps=10, learning_rate=1e-3, log_every=1,
            evaluate_every=5, evaluation_rows=16, checkpoint_every=10, context_lengths=(), needles=(), precision="bf16",
            compile=compiled, graphs=graphs,
        )  # fmt: skip
        (result,) = distill(run)  # type: ignore[misc]
        losses.append(result.losses)
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-5)


@pytest.mark.xdist_group("several GPUs")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
@pytest.mark.parametrize(
    ("objective", "dtype"), [("attention", "bfloat16"), ("logits", "bfloat16"), ("logits", "int8")]
)
def test_two_gpus_share_a_teacher(folder: Path, objective: str, dtype: str) -> None:
    """FSDP2 shards the blocks of teacher and student. Losses are those of one GPU with the batch of both, but for the teacher's
    rounding, which depends on the rows that it reads together."""
    losses = []
    for name, settings in (("one", "batch_size = 8"), ("two", "batch_size = 4\nfsdp = true")):
        output = f"{name}-{objective}-{dtype}"
        file = folder / f"{output}.toml"
        file.write_text(SHARED.format(folder=folder, name=output, objective=objective, dtype=dtype, settings=settings))
        if name == "one":
            distill(load_run(file, kind=DistillRun))
        else:
            launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "fastweights"]
            command = [sys.executable, *launch, "distill", str(file)]
            ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
            assert ended.returncode == 0, ended.stderr
        result = load_result(folder / output / "result.json")
        losses.append([*result.losses, *result.held_out_losses])
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-2, atol=1e-5)
