"""The teacher: in 8 bits, and with its outputs on disk."""

import pytest
import torch
from torch import nn

from fastweights.distillation.cache import RowCache
from fastweights.distillation.teacher import Int8Linear, Teacher, load_teacher


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear_layers_in_8_bits(dtype):
    torch.manual_seed(0)
    linear = nn.Linear(64, 32).to(dtype)
    linear.weight.data[3] = 0
    x = torch.randn(5, 64, dtype=dtype)
    small = Int8Linear(linear)
    weight = small.weight.view(torch.int8)
    assert weight.shape == linear.weight.shape and weight.abs().amax(1).tolist().count(127) == 31
    step = linear.weight.abs().amax(1).float() / 127
    error = (weight.float() * small.scale.float()[:, None] - linear.weight.float()).abs()
    assert (error <= 0.51 * step[:, None] + 0.01 * linear.weight.float().abs()).all()
    torch.testing.assert_close(small(x), linear(x), rtol=0.05, atol=0.03)
    assert small(x).dtype == dtype


def test_a_teacher_in_8_bits(models):
    ids = torch.arange(24)[None]
    batch = {"input_ids": ids, "cu_seqlens": torch.tensor([0, 24])}
    whole, small = (
        Teacher(models / "teacher", dtype, torch.device("cpu"), length=12) for dtype in ("bfloat16", "int8")
    )
    found, wanted = (teacher.read(batch, observe=False)["teacher_hidden"] for teacher in (small, whole))
    assert found.dtype == torch.bfloat16 and not torch.equal(found, wanted)
    torch.testing.assert_close(found, wanted, rtol=0.1, atol=0.1)
    kinds = [type(part) for part in small.model.model.layers.modules()]
    assert Int8Linear in kinds and nn.Linear not in kinds and type(small.model.lm_head) is nn.Linear
    assert not any(parameter.requires_grad for parameter in small.model.parameters())


def test_rows_are_computed_once(tmp_path):
    ids, positions = torch.arange(12).view(3, 4), torch.tensor([[0, 1, 2, 3], [0, 1, 0, 1], [0, 1, 2, 3]])
    calls = []

    def compute(value):
        calls.append(value)
        return torch.full((len(ids), 4, 2), float(value), dtype=torch.bfloat16)

    cache = RowCache(tmp_path, "one")
    first = cache.read(ids, positions, lambda: compute(1))
    again = RowCache(tmp_path, "one").read(ids[[2, 0, 1]], positions[[2, 0, 1]], lambda: compute(2))
    assert calls == [1] and torch.equal(first, again) and again.dtype == torch.bfloat16
    RowCache(tmp_path, "other").read(ids, positions, lambda: compute(3))
    cache.read(ids, torch.arange(4).expand(3, 4), lambda: compute(4))  # the second row is one document now
    assert calls == [1, 3, 4]


@pytest.mark.parametrize("damage", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_only_a_row_that_is_missing_is_made_anew(tmp_path, damage):
    """The bits of the others stay, whatever they are computed with."""
    ids, positions = torch.arange(8).view(2, 4), torch.arange(4).expand(2, 4)
    cache = RowCache(tmp_path, "one")
    cache.read(ids, positions, lambda: torch.zeros(2, 4, 2))
    damage(cache._file(torch.stack([ids[1], positions[1]])))
    for _ in range(2):
        found = cache.read(ids, positions, lambda: torch.ones(2, 4, 2))
        assert found[0].eq(0).all() and found[1].eq(1).all()


def test_weights_on_the_cpu_are_those_of_the_file(models):
    """Mapped into memory, which several processes share."""
    folder = models / "teacher"
    model = load_teacher(folder, "float32", torch.device("cpu"))
    with open("/proc/self/maps") as maps:
        mapped = [line.split() for line in maps if str(folder / "model.safetensors") in line]
    assert mapped
    spans = [tuple(int(end, 16) for end in line[0].split("-")) for line in mapped]
    address = model.model.layers[0].mlp.up_proj.weight.data_ptr()
    assert any(start <= address < end for start, end in spans)
