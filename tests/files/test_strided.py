"""Strided reading against torch: every view, every element size, every way to cut it.

Torch is imported where it judges: the tests beside these fork a process that must be small.
"""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from ckptool.errors import TruncatedFile, UsageError
from ckptool.files import ByteRange, MemorySource
from ckptool.files.strided import flip_signs, iterate_row_major, narrow, swap_bytes

DTYPES = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
STORAGE = bytes((7 * i + i // 256) % 256 for i in range(1 << 16))


def expected(itemsize: int, shape: Any, stride: Any, offset: int) -> bytes:
    """What torch makes of the same view."""
    import torch

    whole = torch.frombuffer(bytearray(STORAGE), dtype=getattr(torch, DTYPES[itemsize]))
    view = torch.as_strided(whole, shape, stride, offset).contiguous()
    return view.numpy().tobytes()


def found(itemsize: int, shape: Any, stride: Any, offset: int, block: int) -> bytes:
    """What ours gives, with blocks of a size that is kept."""
    data = ByteRange(MemorySource(b"junk" + STORAGE, "memory"), 4, len(STORAGE))
    blocks = list(
        iterate_row_major(
            data, itemsize=itemsize, shape=shape, stride=stride, offset=offset, block=block
        )
    )
    assert all(0 < len(part) <= max(block, 16) for part in blocks)
    return b"".join(blocks)


def test_torch_is_imported_where_it_judges() -> None:
    for module in Path(__file__).parent.glob("*.py"):
        assert not re.search("^(import|from) torch", module.read_text(), re.MULTILINE), module


@st.composite
def views(draw: st.DrawFn) -> tuple[int, tuple[int, ...], tuple[int, ...], int]:
    """A view of at most 4,096 elements that lies inside the storage."""
    itemsize = draw(st.sampled_from(sorted(DTYPES)))
    elements = len(STORAGE) // itemsize
    shape: list[int] = []
    stride: list[int] = []
    reach, count = 0, 1
    for _ in range(draw(st.integers(0, 5))):
        size = draw(st.integers(0, max(1, min(40, 4096 // max(count, 1)))))
        most = (elements - 1 - reach) // max(size - 1, 1)
        step = draw(st.one_of(st.sampled_from([0, 1, 2, 3, 40]), st.integers(0, most)))
        shape.append(size)
        stride.append(min(step, most))
        reach += max(size - 1, 0) * stride[-1]
        count *= size
    return itemsize, tuple(shape), tuple(stride), draw(st.integers(0, elements - 1 - reach))


@given(views(), st.sampled_from([1, 16, 100, 4096, 1 << 22]))
def test_any_view_equals_torch(view: Any, block: int) -> None:
    """Whatever its strides, and however it is cut into boxes and tiles."""
    assert found(*view, block) == expected(*view)


@given(st.permutations(range(4)), st.sampled_from(sorted(DTYPES)), st.integers(64, 3000))
def test_permuted_dimensions(order: list[int], itemsize: int, block: int) -> None:
    """Transposed and channels_last weights."""
    sizes, steps = (5, 4, 3, 9), (108, 27, 9, 1)
    shape, stride = tuple(sizes[i] for i in order), tuple(steps[i] for i in order)
    view = (itemsize, shape, stride, 11)
    assert found(*view, block) == expected(*view)


@pytest.mark.parametrize("block", [64, 1000, 1 << 20])
def test_rows_that_lie_far_apart(block: int) -> None:
    """Beyond the gap that is read over, runs are read one by one."""
    for itemsize in (1, 2):
        pitch = 10_000 // itemsize
        view = (itemsize, (7, 3, 6), (1, 40, pitch), 5)
        assert found(*view, block) == expected(*view)


@pytest.mark.parametrize("block", [8, 1 << 20])
def test_negative_strides(block: int) -> None:
    """Torch has none, numpy has."""
    whole = [STORAGE[at : at + 4] for at in range(0, len(STORAGE), 4)]
    shape, offset = (5, 6), 12_000
    for stride in ((-1, 7), (7, -1), (-7, -1), (-7, 0), (-2000, 3), (3, -2000)):
        answer = b"".join(
            whole[offset + i * stride[0] + j * stride[1]]
            for i in range(shape[0])
            for j in range(shape[1])
        )
        assert found(4, shape, stride, offset, block) == answer, stride


def test_scalar_and_empty() -> None:
    """No dimensions: one element. A size of 0: none."""
    assert found(4, (), (), 3, 1 << 20) == STORAGE[12:16]
    assert found(4, (3, 0), (1, 1), 3, 1 << 20) == b""


def test_outside_the_data() -> None:
    """A view that reaches past the end is refused before anything is read."""
    data = ByteRange(MemorySource(b"x" * 64, "memory"), 0, 64)
    for stride, offset in (((1, 8), 0), ((1, -8), 0)):
        with pytest.raises(TruncatedFile):
            list(iterate_row_major(data, itemsize=4, shape=(4, 4), stride=stride, offset=offset))


@pytest.mark.parametrize("flags", [(), ("conj",)])
@pytest.mark.parametrize("stride", [(1, 1024), (1024, 1), (0, 1), (1, 0)])
def test_memory_stays_bounded(stride: tuple[int, int], flags: tuple[str, ...]) -> None:
    """A few blocks, whatever the matrix weighs and whatever is made of its elements."""
    block = 1 << 16
    data = ByteRange(MemorySource(bytes(1024 * 1024 * 4), "memory"), 0, 1024 * 1024 * 4)
    tracemalloc.start()
    try:
        total = sum(
            len(flip_signs(part, 2, is_complex=True, flags=flags))
            for part in iterate_row_major(
                data, itemsize=4, shape=(1024, 1024), stride=stride, offset=0, block=block
            )
        )
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert total == data.length
    assert peak < 6 * block


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_swap_bytes(size: int) -> None:
    """Each group reversed, and twice is nothing."""
    data = bytes(range(64))
    swapped = b"".join(data[i : i + size][::-1] for i in range(0, 64, size))
    assert swap_bytes(data, size) == swapped
    assert swap_bytes(swapped, size) == data


def raw(tensor: Any) -> bytes:
    """The bytes of a tensor, lazy bits resolved."""
    return tensor.resolve_conj().resolve_neg().numpy().tobytes()


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_conj_and_neg_of_complex(dtype: str) -> None:
    """As torch resolves them (which negates a complex zero to +0 or -0, by its type)."""
    import torch

    numbers = torch.tensor([1 + 2j, complex("inf-infj"), -3.5 - 1j], dtype=getattr(torch, dtype))
    size = numbers.element_size() // 2
    plain = raw(numbers)
    assert flip_signs(plain, size, True, ("conj",)) == raw(torch.conj(numbers))
    assert flip_signs(plain, size, True, ("neg",)) == raw(torch._neg_view(numbers))
    both = torch._neg_view(torch.conj(numbers))
    assert flip_signs(plain, size, True, ("conj", "neg")) == raw(both)


def test_neg_of_real() -> None:
    """The imaginary part of a conjugate is a real view with the neg bit."""
    import torch

    numbers = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex64)
    view = numbers.conj().imag
    assert view.is_neg()
    assert flip_signs(raw(numbers.imag), 4, False, ("neg",)) == raw(view)
    assert flip_signs(raw(numbers.imag), 4, False, ()) == raw(numbers.imag)


def a_slice(size: int) -> st.SearchStrategy[slice]:
    """Any slice with a positive step."""
    bound = st.none() | st.integers(-2 * size - 1, 2 * size + 1)
    return st.builds(slice, bound, bound, st.none() | st.integers(1, 4))


@st.composite
def indexes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[Any, ...]]:
    """A shape and a basic index into it."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    items = [draw(st.integers(-size, size - 1) | a_slice(size)) for size in shape]
    kept = draw(st.integers(0, len(items)))
    if draw(st.booleans()):
        from_end = draw(st.integers(kept, len(items)))
        return shape, (*items[:kept], Ellipsis, *items[from_end:])
    return shape, tuple(items[:kept])


@given(indexes())
def test_narrow_equals_torch(case: tuple[tuple[int, ...], tuple[Any, ...]]) -> None:
    """Shape, and the elements that are found there."""
    import torch

    shape, index = case
    view = torch.arange(10_000).as_strided(shape, tuple(range(7, 7 + len(shape))), 3)
    answer = view[index]
    sizes, stride, offset = narrow(shape, tuple(view.stride()), 3, index)
    assert sizes == tuple(answer.shape)
    ours = torch.arange(10_000).as_strided(sizes, stride, offset if answer.numel() else 0)
    assert ours.tolist() == answer.tolist()


def test_narrow_takes_a_bare_index() -> None:
    """`ref[2]`, `ref[1:3]` and `ref[...]`."""
    assert narrow((4, 3), (3, 1), 0, 2) == ((3,), (1,), 6)
    assert narrow((4, 3), (3, 1), 0, slice(1, 3)) == ((2, 3), (3, 1), 3)
    assert narrow((4, 3), (3, 1), 5, ...) == ((4, 3), (3, 1), 5)


def test_narrow_refuses() -> None:
    """What is no basic index says so."""
    refused: list[tuple[Any, str]] = [
        (4, "out of range for dimension 0 of size 4"), (-5, "out of range"),
        ((0, 0, 0), "3 indices for 2 dimensions"), (slice(None, None, -1), "positive"),
        (slice(None, None, 0), "zero"), (slice("a", None), "cannot slice"), (None, "NoneType"),
        (True, "bool"), (1.0, "float"), ((..., ...), "only one ellipsis"), ([0, 1], "list"),
    ]  # fmt: skip
    for index, text in refused:
        with pytest.raises(UsageError, match=text):
            narrow((4, 3), (3, 1), 0, index)
