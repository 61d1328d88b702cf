"""Decoding and statistics, with torch as the judge."""

import math

import pytest
import torch

from ckptool.inspection.numbers import decode, statistics
from tests.tensors.refs import tensor as over

REAL = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.bool,
]  # fmt: skip
FLOAT8 = [
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
]  # fmt: skip
COMPLEX = [torch.complex32, torch.complex64, torch.complex128]


def name(dtype):
    return str(dtype).removeprefix("torch.")


def raw(tensor):
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def measured(tensor, **more):
    return statistics(over(raw(tensor), name(tensor.dtype), list(tensor.shape), **more))


def same(ours, theirs):
    return ours == theirs or (ours != ours and theirs != theirs)


@pytest.mark.parametrize("dtype", REAL, ids=name)
def test_plain_numbers_are_torchs(dtype):
    tensor = (torch.rand(50) * 200).to(dtype)
    assert list(map(float, decode(name(dtype), raw(tensor)))) == tensor.double().tolist()


@pytest.mark.parametrize("dtype", FLOAT8, ids=name)
def test_all_256_patterns_of_a_small_float_are_torchs(dtype):
    patterns = torch.arange(256, dtype=torch.uint8)
    theirs = patterns.view(dtype).float().tolist()
    ours = decode(name(dtype), raw(patterns))
    assert all(map(same, ours, theirs))


def test_all_65536_patterns_of_bfloat16_are_torchs():
    patterns = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16)
    theirs = patterns.view(torch.bfloat16).float().tolist()
    assert all(map(same, decode("bfloat16", raw(patterns)), theirs))


def test_a_byte_of_float4_is_two_numbers_the_lower_half_first():
    assert list(decode("float4_e2m1fn_x2", bytes([0x10, 0x32, 0x54, 0x76, 0xF9]))) == [
        0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -6,
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:ComplexHalf:UserWarning")
@pytest.mark.parametrize("dtype", COMPLEX, ids=name)
def test_complex_numbers_are_torchs(dtype):
    tensor = torch.randn(5, dtype=torch.complex64).to(dtype)
    assert list(decode(name(dtype), raw(tensor))) == tensor.to(torch.complex128).tolist()


@pytest.mark.parametrize("dtype", REAL[:-1], ids=name)
def test_minimum_maximum_and_mean_are_torchs(dtype):
    tensor = (torch.rand(1000) * 100).to(dtype)
    found = measured(tensor)
    exact = tensor.double()
    assert (found.minimum, found.maximum) == (exact.min().item(), exact.max().item())
    assert found.mean == pytest.approx(exact.mean().item(), rel=1e-12)
    assert (found.nan, found.infinite) == (0, 0)


def test_blocks_are_put_together():
    found = measured(torch.arange(2e6))
    assert (found.minimum, found.maximum, found.mean) == (0, 1_999_999, 999_999.5)


def test_nan_and_infinities_are_counted_and_left_out():
    tensor = torch.tensor([1.0, math.nan, math.inf, -math.inf, 3.0, math.nan])
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.mean) == (1, 3, 2)
    assert (found.nan, found.infinite) == (2, 2)


def test_nothing_finite_has_no_minimum():
    found = measured(torch.tensor([math.nan, math.inf]))
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert (found.nan, found.infinite) == (1, 1)


def test_no_elements_have_no_minimum():
    found = measured(torch.zeros(0, dtype=torch.int64))
    assert (found.minimum, found.maximum, found.mean, found.nan) == (None, None, None, 0)


def test_integers_are_exact():
    tensor = torch.tensor([2**62 + 1, 2**62 + 1, 2**62 + 4])
    found = measured(tensor)
    assert found.maximum == 2**62 + 4
    assert found.mean == (3 * 2**62 + 6) / 3


def test_a_sum_beyond_the_largest_float_is_no_nan():
    tensor = torch.full((4,), 1.7e308, dtype=torch.float64)
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.nan, found.infinite) == (1.7e308, 1.7e308, 0, 0)


def test_of_complex_numbers_only_the_odd_ones_are_counted():
    tensor = torch.tensor([1 + 1j, complex(math.nan, 0), complex(0, math.inf)])
    found = measured(tensor)
    assert (found.minimum, found.maximum, found.mean) == (None, None, None)
    assert (found.nan, found.infinite) == (1, 1)
