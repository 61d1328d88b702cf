"""NaN and infinities, counted without torch and judged by it."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ckptool.dtypes import DTYPES
from ckptool.files import ByteRange, MemorySource
from ckptool.formats import open_checkpoint
from ckptool.model import Storage, TensorRef
from ckptool.tensors.bytewise import is_floating, is_infinity_or_zero, nonfinite

WIDE = ["float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32"]
NARROW = [dtype.name for dtype in DTYPES if dtype.name.startswith("float8")]


def ref_of(dtype, raw, shape=None, **options):
    source = MemorySource(raw, "test")
    storage = Storage("0", ByteRange(source, 0, len(raw)), len(raw), **options)
    shape = shape or (len(raw) // getattr(torch, dtype).itemsize,)
    stride = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return TensorRef(dtype, shape, tuple(stride), 0, storage, "cpu")


def judged(tensor):
    """What torch counts."""
    if tensor.dtype == torch.complex32:
        tensor = tensor.to(torch.complex64)
    elif tensor.dtype.itemsize == 1:
        tensor = tensor.to(torch.float32)
    nan = tensor.isnan()
    return int(nan.sum()), int((tensor.isinf() & ~nan).sum())


def from_bytes(dtype, raw):
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", WIDE)
@given(data=st.data())
def test_any_bits_are_counted_as_torch_counts_them(dtype, data):
    size = getattr(torch, dtype).itemsize
    special = [b"\x80\x7f", b"\xff\xff", b"\x00\x7c", b"\xf0\x7f", b"\x00\x00"]
    word = st.one_of(st.binary(min_size=2, max_size=2), st.sampled_from(special))
    words = data.draw(st.lists(word, min_size=size // 2, max_size=3 * size))
    raw = b"".join(words)[: len(words) * 2 // size * size]
    assert nonfinite(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw))


def test_every_code_of_a_type_of_one_byte():
    for dtype in NARROW:
        raw = bytes(range(256)) * 3
        assert nonfinite(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw)), dtype


def test_every_pattern_of_16_bits():
    raw = b"".join(code.to_bytes(2, "little") for code in range(1 << 16))
    for dtype in ("float16", "bfloat16"):
        assert nonfinite(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw))


@pytest.mark.parametrize("dtype", [name for name in WIDE if name != "complex32"])
def test_pieces_and_blocks_of_a_large_view(dtype, tmp_path):
    rows, columns = (1500, 1000) if dtype == "float32" else (300, 250)  # blocks; pieces
    tensor = torch.zeros(rows, columns, dtype=getattr(torch, dtype))
    tensor[::7, ::3] = math.nan
    tensor[1::7, 5::11] = -math.inf
    torch.save([tensor, tensor.t(), tensor[::2, 1::3]], tmp_path / "views.pth")
    with open_checkpoint(tmp_path / "views.pth") as checkpoint:
        views = [tensor, tensor.t(), tensor[::2, 1::3]]
        told = []
        found = [nonfinite(ref, told.append) for ref in checkpoint.root]
        assert found == [judged(view) for view in views]
        assert sum(told) == sum(view.nbytes for view in views)


def test_what_strides_repeat_is_read_once_and_counted_as_often_as_it_is_there():
    one = ref_of("float32", torch.tensor([math.nan, math.inf, 1.0]).numpy().tobytes())
    wide = replace(one, shape=(1000, 3), stride=(0, 1))
    told = []
    assert nonfinite(wide, told.append) == (1000, 1000)
    assert sum(told) == 12


def test_big_endian_bytes_are_read_as_what_they_mean():
    raw = torch.tensor([math.nan, 1.0, math.inf]).numpy().byteswap().tobytes()
    assert nonfinite(ref_of("float32", raw, byteorder="big")) == (1, 1)


def test_numbers_that_cannot_be_nan_are_not_read():
    for dtype in DTYPES:
        if not is_floating(dtype.name):
            unread = TensorRef(dtype.name, (4,), (1,), 0, None, "cpu")
            assert nonfinite(unread) == (0, 0)
    assert nonfinite(ref_of("float32", b"")) == (0, 0)


@given(
    st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    st.lists(st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1.0, math.nan]), min_size=1),
)
def test_infinities_and_zeros_alone_are_known(name, values):
    tensor = torch.tensor(values, dtype=getattr(torch, name))
    raw = tensor.view(torch.uint8).numpy().tobytes()
    alone = bool((tensor.isinf() | (tensor == 0)).all())
    assert is_infinity_or_zero(ref_of(name, raw)) == alone


def test_what_is_no_number_or_no_array_is_no_infinity():
    unread = TensorRef("float32", (4,), (1,), 0, None, "cpu")
    complex_ref = ref_of("complex64", torch.zeros(1, dtype=torch.complex64).numpy().tobytes())
    assert not any(map(is_infinity_or_zero, (unread, complex_ref, ref_of("int8", b"\0"))))
