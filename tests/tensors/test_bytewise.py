"""Without torch: equal elements and no others, in whatever blocks; NaN and infinities."""

import math
import struct
from dataclasses import replace
from itertools import pairwise, product

import pytest
import torch
from hypothesis import given, strategies as st

from ckptool.core.model import Storage, TensorRef
from ckptool.dtypes import DTYPES
from ckptool.errors import CheckpointError
from ckptool.files import ByteRange, FileSource, InflatedSource, MemorySource
from ckptool.formats import open_checkpoint
from ckptool.tensors import bytewise
from ckptool.tensors.bytewise import (
    align_runs,
    compare_checksums,
    count_nonfinite_elements,
    has_same_content,
    is_floating,
    is_infinity_or_zero,
)
from tests.tensors.refs import tensor

RAW = bytes(range(240))


def bits(raw, dtype, shape, stride=None, **more):
    return tensor(raw, dtype, shape, stride=stride, **more)


def both_ways(a, b):
    found = has_same_content(a, b)
    assert found == has_same_content(b, a)
    return found


@pytest.fixture
def in_small_steps(monkeypatch):
    monkeypatch.setattr(bytewise, "_STEP_BYTES", 7)
    monkeypatch.setattr(bytewise, "_MIN_PARALLEL_BYTES", 64)


def changed(raw, at):
    return raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]


@pytest.mark.usefixtures("in_small_steps")
def test_every_byte_counts():
    for length in [4, 60, 64, 68, 240]:
        a = bits(RAW[:length], "float32", (length // 4,))
        assert has_same_content(a, bits(RAW[:length], "float32", (length // 4,))), length
        for at in range(length):
            assert not both_ways(a, bits(changed(RAW[:length], at), "float32", (length // 4,))), (
                length
            )


@pytest.mark.usefixtures("in_small_steps")
def test_only_its_own_bytes_count():
    a = bits(RAW, "int16", (20,), offset=30)
    for at in range(240):
        same = both_ways(a, bits(changed(RAW, at), "int16", (20,), offset=30))
        assert same == (not 60 <= at < 100)
    assert has_same_content(a, bits(RAW[60:100], "int16", (20,)))


@pytest.mark.usefixtures("in_small_steps")
def test_bits_are_compared_and_not_numbers():
    nan = struct.pack("<2f", float("nan"), 0.0)
    assert has_same_content(bits(nan, "float32", (2,)), bits(nan, "float32", (2,)))
    zeros = struct.pack("<2f", float("nan"), -0.0)
    assert not has_same_content(bits(nan, "float32", (2,)), bits(zeros, "float32", (2,)))


LAYOUTS = [
    ((5, 4), (4, 1)),
    ((5, 4), (1, 5)),
    ((5, 4), (0, 1)),
    ((5, 4), (1, 0)),
    ((5, 4), (8, 2)),
    ((5, 4), (1, 1)),
    ((5, 4), (9, 1)),
    ((2, 1, 5, 2), (10, 77, 1, 5)),
]


@pytest.mark.usefixtures("in_small_steps")
def test_elements_are_compared_wherever_they_lie():
    for (shape, stride), dtype in product(LAYOUTS, ["int8", "int16", "float32"]):
        raw = torch.arange(240, dtype=torch.uint8)
        a = bits(RAW, dtype, shape, stride, offset=2)
        whole = a.read()
        row_major = bits(whole, dtype, shape)
        assert both_ways(a, row_major), (shape, dtype)
        assert both_ways(a, bits(RAW, dtype, shape, stride, offset=2)), (shape, dtype)
        for at in range(0, len(whole), 5):
            assert not both_ways(a, bits(changed(whole, at), dtype, shape)), (shape, dtype)
        for at in range(0, len(raw), 1 if dtype == "int16" else 5):
            other = bits(changed(RAW, at), dtype, shape, stride, offset=2)
            assert both_ways(a, other) == (other.read() == whole), (shape, dtype)


def test_what_lies_alike_is_not_put_in_order():
    for shape, stride in LAYOUTS:
        a = bits(RAW, "int16", shape, stride)
        dense = stride not in ((8, 2), (9, 1), (1, 1))
        assert (align_runs(a, a) is not None) == dense
    turned = bits(RAW, "int16", (5, 4), (1, 5))
    assert align_runs(turned, bits(RAW, "int16", (5, 4))) is None
    assert align_runs(turned, bits(RAW, "int16", (5, 4), (1, 5), byteorder="big")) is None


def test_big_endian_files_and_flags():
    for dtype in ["float32", "float16", "complex64"]:
        little = bits(RAW, dtype, (30,) if dtype != "float16" else (120,))
        big = replace(little, storage=replace(little.storage, byteorder="big"))
        assert not both_ways(little, big), dtype
        assert has_same_content(big, big), dtype
        assert both_ways(big, bits(big.read(), dtype, little.shape)), dtype
        negative = replace(little, flags=("neg",))
        assert not both_ways(little, negative), dtype
        assert has_same_content(negative, negative), dtype
        assert both_ways(negative, bits(negative.read(), dtype, little.shape)), dtype


def test_conjugated_numbers():
    a = torch.randn(9, dtype=torch.complex64)
    ref = bits(a.view(torch.uint8).numpy().tobytes(), "complex64", (9,))
    lazy = replace(ref, flags=("conj",))
    resolved = bits(a.conj().resolve_conj().view(torch.uint8).numpy().tobytes(), "complex64", (9,))
    assert both_ways(lazy, resolved)
    assert not both_ways(lazy, ref)


def test_packed_elements():
    for dtype, count in [("float6_e2m3fn", 8), ("float4_e2m1fn_x2", 6), ("quint4x2", 12)]:
        raw = RAW[:6]
        assert has_same_content(bits(raw, dtype, (count,)), bits(raw, dtype, (count,))), dtype
        assert not has_same_content(
            bits(raw, dtype, (count,)), bits(changed(raw, 5), dtype, (count,))
        ), dtype


def test_no_elements_are_equal():
    for shape in [(0,), (4, 0, 3)]:
        assert has_same_content(
            bits(b"", "float32", shape), bits(RAW, "float32", shape, offset=7)
        ), shape


def test_a_number_without_dimensions():
    assert has_same_content(bits(RAW, "int64", (), offset=1), bits(RAW[8:16], "int64", ()))
    assert not has_same_content(bits(RAW, "int64", ()), bits(RAW[8:16], "int64", ()))


@given(
    content=st.binary(max_size=60),
    cuts=st.lists(st.integers(0, 60), max_size=8),
    others=st.lists(st.integers(0, 60), max_size=8),
    change=st.none() | st.integers(0, 59),
    lost=st.integers(0, 2),
)
def test_streams_are_equal_however_they_are_cut(content, cuts, others, change, lost):
    other = content[: len(content) - lost]
    if change is not None and change < len(other):
        other = changed(other, change)
    done = []
    found = bytewise._has_same_blocks(blocks(content, cuts), blocks(other, others), done.append)
    assert found == (content == other)
    assert sum(done) == len(content) if found else sum(done) <= len(content)


def blocks(content, cuts):
    edges = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    return iter([content[start:stop] for start, stop in pairwise(edges)])


@pytest.mark.usefixtures("in_small_steps")
@pytest.mark.parametrize("stride", [(1,), (2,)])
def test_all_bytes_are_told(stride):
    done = []
    a = bits(RAW, "int8", (100,), stride)
    assert has_same_content(a, a, done.append)
    assert sum(done) == 100
    done.clear()
    assert not has_same_content(a, bits(changed(RAW, 40), "int8", (100,), stride), done.append)
    assert sum(done) < 100


@pytest.mark.usefixtures("in_small_steps")
def test_files_are_read_by_two_threads_and_an_error_in_one_is_told(tmp_path):
    paths = [tmp_path / name for name in "ab"]
    content = RAW * 1000
    for path in paths:
        path.write_bytes(content)
    with_files = [over(FileSource(path), len(content)) for path in paths]
    assert has_same_content(*with_files)
    paths[1].write_bytes(content[:-1000])  # under our feet
    with pytest.raises(CheckpointError, match="ended at 239,000"):
        has_same_content(*with_files)


def over(source, size, crc32=None):
    held = Storage("0", ByteRange(source, 0, size), size, crc32=crc32)
    return TensorRef("int8", (size,), (1,), 0, held, "cpu")


def test_compressed_records(tmp_path):
    import zlib

    content = RAW * 50_000  # large enough for threads, which it must not be given
    deflater = zlib.compressobj(1, wbits=-zlib.MAX_WBITS)
    packed = deflater.compress(content) + deflater.flush()

    def inflated():
        source = MemorySource(packed, "m")
        return over(InflatedSource(ByteRange(source, 0, len(packed)), len(content)), len(content))

    plain = over(MemorySource(content, "n"), len(content))
    assert both_ways(inflated(), plain)
    assert has_same_content(inflated(), inflated())
    other = over(MemorySource(changed(content, len(content) - 1), "n"), len(content))
    assert not both_ways(inflated(), other)


def stated(shape, stride, crc32, *, offset=0, size=40, byteorder="little"):
    held = tensor(RAW[:size], "int16", shape, stride=stride, offset=offset, byteorder=byteorder)
    return replace(held, storage=replace(held.storage, crc32=crc32))


WHOLE = ((5, 4), (4, 1))
TURNED = ((5, 4), (1, 5))
PART = ((2, 4), (4, 1))


def test_what_checksums_say():
    for layout, crcs, verdict in [
        (WHOLE, (5, 5), True),
        (WHOLE, (5, 6), False),
        (WHOLE, (None, 5), None),
        (WHOLE, (5, None), None),
        (WHOLE, (None, None), None),
        (TURNED, (5, 5), True),
        (TURNED, (5, 6), False),
        (PART, (5, 5), True),
        (PART, (5, 6), None),
    ]:
        a, b = (stated(*layout, crc) for crc in crcs)
        assert compare_checksums(a, b) is verdict, layout


def test_what_checksums_do_not_say():
    a = stated(*PART, 5)
    assert compare_checksums(a, stated(*PART, 5, offset=4)) is None
    assert compare_checksums(a, stated(*PART, 5, size=42)) is None
    assert compare_checksums(a, stated(*PART, 5, byteorder="big")) is None
    assert compare_checksums(stated(*WHOLE, 5), stated(*TURNED, 5)) is None
    assert compare_checksums(a, replace(a, flags=("neg",))) is None
    holed = stated((5, 2), (4, 1), 5)
    assert compare_checksums(holed, holed) is None
    meta = TensorRef("int16", (2,), (1,), 0, None, "meta", kind="meta")
    assert compare_checksums(meta, meta) is None


def test_pairs_of_layouts_agree_with_content():
    for (shape, stride), (_, other) in product(LAYOUTS[:7], repeat=2):
        a, b = bits(RAW, "int16", shape, stride), bits(RAW, "int16", shape, other)
        assert has_same_content(a, b) == (a.read() == b.read())


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
    assert count_nonfinite_elements(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw))


def test_every_code_of_a_type_of_one_byte():
    for dtype in NARROW:
        raw = bytes(range(256)) * 3
        assert count_nonfinite_elements(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw)), dtype


def test_every_pattern_of_16_bits():
    raw = b"".join(code.to_bytes(2, "little") for code in range(1 << 16))
    for dtype in ("float16", "bfloat16"):
        assert count_nonfinite_elements(ref_of(dtype, raw)) == judged(from_bytes(dtype, raw))


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
        found = [count_nonfinite_elements(ref, told.append) for ref in checkpoint.root]
        assert found == [judged(view) for view in views]
        assert sum(told) == sum(view.nbytes for view in views)


def test_what_strides_repeat_is_read_once_and_counted_as_often_as_it_is_there():
    one = ref_of("float32", torch.tensor([math.nan, math.inf, 1.0]).numpy().tobytes())
    wide = replace(one, shape=(1000, 3), stride=(0, 1))
    told = []
    assert count_nonfinite_elements(wide, told.append) == (1000, 1000)
    assert sum(told) == 12


def test_big_endian_bytes_are_read_as_what_they_mean():
    raw = torch.tensor([math.nan, 1.0, math.inf]).numpy().byteswap().tobytes()
    assert count_nonfinite_elements(ref_of("float32", raw, byteorder="big")) == (1, 1)


def test_numbers_that_cannot_be_nan_are_not_read():
    for dtype in DTYPES:
        if not is_floating(dtype.name):
            unread = TensorRef(dtype.name, (4,), (1,), 0, None, "cpu")
            assert count_nonfinite_elements(unread) == (0, 0)
    assert count_nonfinite_elements(ref_of("float32", b"")) == (0, 0)


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
