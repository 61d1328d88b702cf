"""Elements out of range in another type, with torch's own casts as the judge."""

import pytest
import torch

from ckptool import api
from ckptool.tensors.narrowing import narrows, out_of_range

FLOATS = ["float64", "float32", "bfloat16", "float16"]
NARROW = ["float32", "bfloat16", "float16", "float8_e5m2"]
INTEGERS = ["int8", "uint8", "int16", "int32", "int64"]


def counted(folder, tensor, target):
    torch.save({"x": tensor}, folder / "x.pth")
    with api.open(folder / "x.pth") as checkpoint:
        return out_of_range(dict(checkpoint.tensors())[("x",)], target)


def around(limit, source):
    """Numbers of a type around a limit, of both signs, and what is never finite."""
    limit = torch.tensor([limit], dtype=torch.float64).to(source)
    towards = torch.tensor([0.0, float("inf")], dtype=torch.float64).to(source)
    near = torch.cat([limit, *(torch.nextafter(limit, end) for end in towards)])
    rest = torch.tensor([0.0, 1e-7, float("inf"), float("-inf"), float("nan")]).to(source)
    return torch.cat([near, -near, rest])


@pytest.mark.parametrize("source", FLOATS)
@pytest.mark.parametrize("target", NARROW)
def test_what_becomes_infinite_is_counted_to_the_last_bit(tmp_path, source, target):
    limits = (61440.0, 65504.0, 65520.0, 3.3895e38, (2 - 2**-8) * 2.0**127, 2.0**128 * (1 - 2**-25))
    for limit in limits:
        numbers = around(limit, getattr(torch, source))
        cast = numbers.to(getattr(torch, target)).float()
        lost = int((torch.isinf(cast) & torch.isfinite(numbers)).sum())
        assert counted(tmp_path, numbers, target) == lost


@pytest.mark.parametrize("source", INTEGERS)
@pytest.mark.parametrize("target", [*INTEGERS, "bool"])
def test_integers_that_wrap_around_are_counted(tmp_path, source, target):
    own = torch.iinfo(getattr(torch, source))
    values = {own.min, own.max, 0, 1, 2, *((1 << n) + d for n in (7, 8, 15, 31) for d in (-1, 0))}
    numbers = torch.tensor([v for v in sorted(values) if own.min <= v <= own.max])
    numbers = numbers.to(getattr(torch, source))
    lost = int((numbers.to(getattr(torch, target)).long() != numbers.long()).sum())
    assert counted(tmp_path, numbers, target) == lost
    assert narrows(source, target) or not lost


def test_pieces_and_strides_that_repeat_count_alike(tmp_path):
    large = torch.zeros(200_001)
    large[[0, 65_535, 65_536, 200_000]] = torch.tensor([1e6, -1e6, 7e4, 1e9])
    assert counted(tmp_path, large, "float16") == 4
    assert counted(tmp_path, torch.tensor([1e6]).expand(3), "float16") == 3


def test_other_types_are_not_counted(tmp_path):
    assert not narrows("float16", "float32")
    assert not narrows("complex64", "float16")
    assert not narrows("float32", "int8")
    assert counted(tmp_path, torch.ones(2), "int8") == 0
