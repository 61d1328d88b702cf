"""Which element types hold which."""

from __future__ import annotations

import itertools
import math

import pytest

from ckptool.matching.report import holds

torch = pytest.importorskip("torch")

REAL = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "float8_e4m3fnuz", "float8_e5m2fnuz", "int64", "int32", "int16", "int8", "uint8", "bool",
]  # fmt: skip
KNOWN = [*REAL, "uint16", "uint32", "uint64", "float8_e8m0fnu", "complex64", "complex128"]


def telling(dtype):
    """Numbers of a type that others may not hold."""
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.tensor([False, True])
    if not kind.is_floating_point:
        limits = torch.iinfo(kind)
        return torch.tensor([limits.min, -1 % 128, 0, 1, 3, limits.max // 2 + 1, limits.max]).to(
            kind
        )
    if kind.itemsize == 1:
        return torch.arange(256, dtype=torch.uint8).view(kind)
    limits = torch.finfo(kind)
    wide = torch.tensor(
        [
            *(limits.max, limits.min, limits.tiny, limits.smallest_normal, 0, 1, 1 + limits.eps),
            *(math.inf, -math.inf, math.nan),
        ],
        dtype=torch.float64,
    )
    tiny = (
        torch.zeros(1, dtype=kind).view(
            {2: torch.int16, 4: torch.int32, 8: torch.int64}[kind.itemsize]
        )
        + 1
    )
    return torch.cat([wide.to(kind), tiny.view(kind)])


def test_a_type_holds_another_where_torch_gives_every_number_back():
    for narrow, wide in itertools.product(REAL, REAL):
        numbers = telling(narrow)
        there = numbers.to(getattr(torch, wide))
        same = (numbers.double() == there.double()) | (
            numbers.double().isnan() & there.double().isnan()
        )
        back = there.tolist() == numbers.tolist() or numbers.is_floating_point()
        assert holds(wide, narrow) == (back and bool(same.all())), (wide, narrow)


def test_every_type_holds_itself():
    assert [dtype for dtype in KNOWN if not holds(dtype, dtype)] == []


def test_other_types():
    for wide, narrow, does in (
        ("complex64", "float32", True),
        ("complex64", "float64", False),
        ("complex128", "complex64", True),
        ("complex64", "complex128", False),
        ("float32", "complex64", False),
        ("complex64", "int8", True),
        ("uint64", "int64", False),
        ("int64", "uint32", True),
        ("float32", "float8_e8m0fnu", True),
        ("float8_e8m0fnu", "bool", False),
        ("float8_e5m2fnuz", "float8_e5m2", False),
        ("float32", "qint8", False),
        ("qint8", "int8", False),
        ("float32", "unheard_of", False),
    ):
        assert holds(wide, narrow) is does, (wide, narrow)
